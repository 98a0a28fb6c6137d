"""Everything that a search needs to know about one layer: the factors of its gradient, their noise, and the equations
of later layers.

The table of symbols in ``docs/method.md#symbols`` defines the letters. In short: a point p stands for the input
x̂ = Rᵀp = V p̄, and p̄ = Σ p are the coordinates of this input.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from spearpp.inversion.factors import Factors, decompose
from spearpp.inversion.network import Network
from spearpp.inversion.next_layer import FewOutputs, NextLayer
from spearpp.inversion.observation import Observation
from spearpp.inversion.tolerance import Tolerance, tolerance
from spearpp.linalg import sphere
from spearpp.linalg.nullspace import complement_of_basis
from spearpp.types import Bool, Float, Tensor, to_device

MAX_REPEATED_SINE = 1e-3
"""Largest sine of the angle between two rows of L that repeat each other. Design choice. Measured: if the server
changes its weights between the rounds, the smallest sine was 0.09 (docs/results/rounds.md)."""
MAX_REPEATED_NOISE = 100.0
"""Rows also repeat each other if the sine is at most this many times the sine that noise explains. Derived: an entry of
up to about 60 standard deviations may count as noise (``tolerance``: a bound of 5, widened by 3, and by 4 in
``evidence.patterns``). Only rows that differ by more can contradict a wrong direction."""


@dataclass(frozen=True)
class Problem:
    """The factors of a gradient, the pre-activations that the weights imply, and the rules for what counts as zero."""

    seen: Observation
    """The gradient and the weights."""
    factors: Factors
    """The gradient, factored: Ĝ ≈ L R."""
    tolerance: Tolerance
    """Which numbers count as zero, given the noise of the gradient."""
    preactivations: Float[Tensor, "m b"]
    """A = Ŵ Rᵀ with rows a_k: the pre-activations of the input x̂ = Rᵀp are A p."""
    next_layer: NextLayer | None = None
    """Equations from the gradient of the next layer; None if it was not given or cannot be used."""
    dropout: bool = False
    """Whether Dropout follows the ReLU: active neurons may then have no gradient."""
    one_step: bool = False
    """Whether the gradient is known to come from one step, so that local training cannot have moved the weights."""
    rounds: int = 1
    """Number of rounds of one client whose rows form the layer, one below the other."""
    outputs: FewOutputs | None = None
    """Equations from the weights of a next layer with few outputs, if ``next_layer`` is None."""
    network: Network | None = None
    """Equations from the gradients of all later layers; None if they were not given. For a gradient of rank one, they
    are kept only if they contradict its input."""

    @property
    def batch_size(self) -> int:
        """b, the number of samples that the gradient shows."""
        return self.factors.batch_size

    def zeros(self, directions: Float[Tensor, "k b"]) -> Bool[Tensor, "k m"]:
        """Return which entries of L q are zero up to noise, one row for each direction q."""
        return self.tolerance.zeros(directions @ self.factors.left.T, directions)

    def on(self, device: torch.device) -> "Problem":
        """Return this problem on another device, without the next layer. ``seen`` stays on its device."""
        return replace(
            self,
            factors=to_device(self.factors, device),
            tolerance=to_device(self.tolerance, device),
            preactivations=self.preactivations.to(device),
            next_layer=None,
            outputs=None,
        )

    @cached_property
    def live_rows(self) -> Float[Tensor, "live b"]:
        """The rows of L that belong to neurons with a gradient. All other rows are zero."""
        return self.factors.left[self.factors.live]

    @cached_property
    def coordinates_to_preactivations(self) -> Float[Tensor, "m b"]:
        """Ŵ V, which maps the coordinates p̄ of an input x̂ = V p̄ to its pre-activations z."""
        return self.preactivations / self.factors.singular_values

    @property
    def bias_functional(self) -> Float[Tensor, "b"] | None:
        """The vector e for which e · p̄ is the last entry of x̂ = V p̄, which is 1; None for a layer without bias."""
        return self.factors.rows[:, -1] if self.seen.has_bias else None

    @cached_property
    def input_space(self) -> tuple[Float[Tensor, "b"], Float[Tensor, "b u"]]:
        """Origin and orthonormal basis of the coordinates of all inputs, p̄ = origin + basis · t (``affine``)."""
        left = self.factors.left
        return affine(torch.eye(self.batch_size, dtype=left.dtype, device=left.device), self.bias_functional)

    @cached_property
    def rows_per_noise(self) -> Float[Tensor, "m b"]:
        """ℓ_k / σ_k, the rows of L divided by their noise; zero for neurons without a gradient.

        They are scaled so that the longest row has length 1.
        """
        noise = torch.where(self.factors.live, self.factors.row_noise, 1.0)
        rows = self.factors.left / noise[:, None]
        return rows / sphere.norm(rows).max()

    @cached_property
    def repeated_rows(self) -> Bool[Tensor, "m"]:
        """Which rows of L repeat the row of the same neuron in an earlier round, up to their sign, size and noise.

        If the server does not change its weights, the client sends the same gradient again. A direction with a zero in
        the first of these rows then has a zero in all of them, so only the first row is evidence.
        """
        repeated = torch.zeros_like(self.factors.live)
        if self.rounds == 1:
            return repeated
        left, spread = self.factors.left, torch.linalg.vector_norm(1 / self.factors.singular_values)
        length = sphere.norm(left)
        rows = (left / length[:, None]).reshape(self.rounds, -1, left.shape[1])
        noise = (self.factors.row_noise * spread / length).reshape(self.rounds, -1)
        parts = repeated.reshape(self.rounds, -1)
        for index in range(1, self.rounds):
            sine = (1 - (rows[:index] * rows[index]).sum(-1).square()).clamp_min(0).sqrt()
            parts[index] = (sine <= (MAX_REPEATED_NOISE * noise[index]).clamp_min(MAX_REPEATED_SINE)).any(0)
        return parts.flatten()


def pose(seen: Observation, *, batch_size: int | None = None, sparsity: float | None = None) -> Problem:
    """Factor the gradient of a layer and compute everything that a search needs.

    See ``decompose`` for ``batch_size``, and ``tolerance`` for ``sparsity``.

    Raises:
        RankError: if the rank of the gradient does not allow inversion.
    """
    factors = decompose(seen, batch_size)
    return Problem(seen, factors, tolerance(seen, factors, sparsity), seen.weight @ factors.right.T)


def affine(
    space: Float[Tensor, "b k"], bias_functional: Float[Tensor, "b"] | None
) -> tuple[Float[Tensor, "b"], Float[Tensor, "b u"]]:
    """Return origin and basis of the coordinates p̄ in a space whose inputs end in 1: p̄ = origin + basis · t.

    Both bases are orthonormal. ``bias_functional`` is that of the problem; None for a layer without bias, whose
    coordinates are not restricted.
    """
    if bias_functional is None:
        return torch.zeros_like(space[:, 0]), space
    end = space.T @ bias_functional
    length = torch.linalg.vector_norm(end)
    unit = end / length
    return space @ (unit / length), space @ complement_of_basis(unit[:, None])
