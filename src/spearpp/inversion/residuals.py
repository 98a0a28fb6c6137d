"""Residuals of the network equations, and their derivatives, in the coordinates of a search."""

from collections.abc import Mapping, Sequence

import torch
from torch.func import jvp, vmap

from spearpp.inversion.network import Network, Span
from spearpp.linalg.chunks import chunk_size
from spearpp.types import Float, Int, Tensor

TANGENT_COPIES = 8
"""Tensors of the size of one layer's tangents that are in memory at the same time. Measured: six to eight for networks
with three hidden layers."""


class Residuals:
    """The equations of some spans for the points p = origin + basis · t, with a label for each point.

    Each vector is divided by its norm, because a signal of length zero would satisfy its equations trivially.

    Args:
        network: the network.
        spans: the spans whose equations are used.
        preactivations: A, with z = A p.
        dtype: dtype of the computation.
        weights: weight of the equations of each span; None for 1.
    """

    def __init__(
        self,
        network: Network,
        spans: Sequence[Span],
        preactivations: Float[Tensor, "m b"],
        dtype: torch.dtype,
        weights: Sequence[float] | None = None,
    ) -> None:
        self.network, self.spans, self.dtype = network, spans, dtype
        network.rest.prepare(preactivations.device, dtype)
        self._all = preactivations
        self._outside = [span.complement().to(dtype) for span in spans]
        self._weights = [1.0] * len(spans) if weights is None else weights
        self._origin = self._basis = preactivations.new_zeros(0)
        self.widths: Mapping[str, float] | None = None

    @property
    def equations(self) -> int:
        """Number of equations for each point."""
        return sum(span.equations for span in self.spans)

    def place(self, origin: Float[Tensor, "b"], basis: Float[Tensor, "b u"]) -> None:
        """Set the coordinates: p = origin + basis · t."""
        self._origin = (self._all @ origin).to(self.dtype)
        self._basis = (self._all @ basis).to(self.dtype)

    def preactivations(self, t: Float[Tensor, "k u"]) -> Float[Tensor, "k m"]:
        """Return the pre-activations of the layer."""
        return self._origin + t @ self._basis.T

    def __call__(self, t: Float[Tensor, "k u"], labels: Int[Tensor, "k"]) -> Float[Tensor, "k e"]:
        """Return the residual of every equation."""
        vectors = self.network.vectors(self.preactivations(t), labels, self.spans, self.widths)
        tiny = torch.finfo(self.dtype).tiny
        shares = [
            weight * (each @ outside) / torch.linalg.vector_norm(each, dim=1, keepdim=True).clamp_min(tiny)
            for each, outside, weight in zip(vectors, self._outside, self._weights, strict=True)
        ]
        return torch.cat(shares, dim=1)

    def squared(self, t: Float[Tensor, "k u"], labels: Int[Tensor, "k"]) -> Float[Tensor, "k"]:
        """Return the squared norm of the residuals of each point."""
        return self(t, labels).square().sum(1)

    def normal_equations(self, t: Float[Tensor, "k u"], labels: Int[Tensor, "k"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return ‖r‖², JᵀJ and Jᵀr of each point, in chunks of points that bound the memory."""
        widest = max(self.equations, self._origin.shape[0], *(len(each) for each in self.network.weights.values()))
        size = chunk_size(t.device, TANGENT_COPIES * t.element_size() * t.shape[1] * widest)
        parts = [self._normal(*each) for each in zip(t.split(size), labels.split(size), strict=True)]
        error, hessian, slope = (torch.cat(each) for each in zip(*parts, strict=True))
        return error, hessian, slope

    def jacobian(self, t: Float[Tensor, "k u"], labels: Int[Tensor, "k"]) -> Float[Tensor, "k u e"]:
        """Return the transposed Jacobian of each point."""
        directions = torch.eye(t.shape[1], dtype=t.dtype, device=t.device)

        def along(direction: Tensor) -> Tensor:
            return jvp(lambda points: self(points, labels), (t,), (direction.expand_as(t),))[1]

        return vmap(along, out_dims=1)(directions)

    def _normal(self, t: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        residual = self(t, labels)
        jacobian = self.jacobian(t, labels)
        slope = (jacobian @ residual[:, :, None])[:, :, 0]
        return residual.square().sum(1), jacobian @ jacobian.mT, slope
