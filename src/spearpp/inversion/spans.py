"""Spaces that contain one vector of every sample: the inputs, or the signals, of one layer of a network."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from spearpp.linalg import sphere
from spearpp.linalg.nullspace import complement_of_basis
from spearpp.types import Float, Tensor


@dataclass(frozen=True, eq=False)
class Span:
    """A space that contains one vector of every sample: the inputs, or the signals, of one layer."""

    layer: int
    """0 for the layer that is inverted, l for the l-th later layer, counted through all rounds."""
    signals: bool
    """Whether the vectors are signals (backward equations) or inputs (forward equations)."""
    basis: Float[Tensor, "d b"]
    singular_values: Float[Tensor, "b"]
    noise: float
    """σ, the standard deviation of the noise in an entry of the gradient."""
    rounding: float
    partner: Float[Tensor, "d2 b"] | None = None
    """Basis of the space of the same layer's inputs if the vectors are signals, and of its signals if they are inputs:
    the gradient of the layer is about basis · Σ · partnerᵀ. None for the layer that is inverted."""
    appended_one: bool = False
    """Whether the vectors are inputs with an appended 1, because the layer has a bias."""
    drift: float = 0.0
    """Share of a sample's vector outside the space because the weights moved during local training."""
    sensitivity: float = 0.0
    """The share outside that noise in the entries of the input causes, over the standard deviation of this noise."""

    @cached_property
    def equations(self) -> int:
        """Number of equations: the dimensions outside the space.

        Entries that are zero in the whole space do not count. They belong to neurons without a gradient, have no noise,
        and their equations hold for all points nearby.
        """
        return int((self.basis != 0).any(1).sum()) - self.basis.shape[1]

    @property
    def typical_level(self) -> float:
        """The level that noise and drift cause for a vector whose coordinates in the space are alike."""
        noise = self.noise * self.equations**0.5 * float((self.singular_values**-2).mean()) ** 0.5
        return math.hypot(noise, self.drift)

    @cached_property
    def complement(self) -> Float[Tensor, "d _"]:
        """Orthonormal basis of the vectors that are orthogonal to the space."""
        return complement_of_basis(self.basis)

    def without(self, known: Float[Tensor, "k _"]) -> Float[Tensor, "d k"]:
        """Return an orthonormal basis of directions that are orthogonal to the vectors of all but the known samples.

        With the gradient G = Σ_i d_i y_iᵀ, the pseudo-inverse pairs signals with inputs: y_iᵀ G⁺ d_j is 1 for i = j and
        0 for two different samples. So the signals of all other samples are orthogonal to (G⁺)ᵀ y_i, and their inputs
        to G⁺ d_i.

        Args:
            known: the inputs of the known samples if this is a space of signals, and their signals otherwise. In the
                layer that is inverted, their coordinates.
        """
        if self.partner is not None:
            missing = self.partner.shape[0] - known.shape[1]
            known = torch.nn.functional.pad(known, (0, missing), value=1.0) @ self.partner
        return torch.linalg.qr(self.basis @ (known / self.singular_values).T)[0]

    def share_outside(self, vectors: Float[Tensor, "k d"]) -> Float[Tensor, "k"]:
        """Return ‖(I - B Bᵀ) v‖ / ‖v‖."""
        outside = vectors - (vectors @ self.basis) @ self.basis.T
        return torch.linalg.vector_norm(outside, dim=1) / sphere.norm(vectors)

    def share_and_level(
        self, vectors: Float[Tensor, "k d"], cancellation: Float[Tensor, "k"], input_noise: Float[Tensor, "k"]
    ) -> tuple[Float[Tensor, "k"], Float[Tensor, "k"]]:
        """Return the share outside, and what noise, rounding and movement explain of it for a true vector.

        For a true vector v = B c, noise of standard deviation σ in the entries of the gradient leaves a part of norm σ
        √e ‖Σ⁻¹c‖ outside, with the number e of equations. ``cancellation`` says how many times larger the rounding of
        each sample's signals is than that of its inputs, ``input_noise`` is the standard deviation of the noise in the
        entries of each sample's input.
        """
        inside, length = vectors @ self.basis, sphere.norm(vectors)
        share = torch.linalg.vector_norm(torch.addmm(vectors, inside, self.basis.T, alpha=-1), dim=1) / length
        amplified = torch.linalg.vector_norm(inside / self.singular_values, dim=1)
        squared = (self.noise * self.equations**0.5 * amplified / length).square() + self.drift**2
        squared += (self.rounding * cancellation).square() if self.signals else self.rounding**2
        if self.sensitivity:
            squared += (self.sensitivity * input_noise).square()
        return share, squared.sqrt()
