"""Residuals of the network equations, and their derivatives, in the coordinates of a search."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from spearpp.inversion.network import Network
from spearpp.inversion.spans import Span
from spearpp.inversion.tangents import linearised
from spearpp.linalg import sphere
from spearpp.linalg.chunks import chunk_size
from spearpp.linalg.tensor_cores import tensor_cores
from spearpp.linalg.time_limit import check_time
from spearpp.types import Float, Int, Tensor

MAX_RECORDED_WORK = 1e12
"""Largest work, in multiplications for the matrices JᵀJ of all points, for which a GPU computes these matrices and
captures a step as a CUDA graph. Above it, conjugate gradients are used. Measured on an H200: with 2.6e11 (60 points, b
= 450, m = 1000) a step takes 5 ms, a third of it to launch its kernels. With 1.2e13 (60 points, b = 1200, m = 4000) it
takes 100 ms, and conjugate gradients take 60 ms."""
TANGENT_COPIES = 8
"""Tensors of the size of one layer's tangents that are in memory at the same time. Design choice: an estimate for
networks with a few hidden layers."""


class _Linearised(NamedTuple):
    """The residuals at some points, and their derivatives."""

    residuals: list[Tensor]
    scales: list[Float[Tensor, "k"]]
    """Factors that the derivatives still lack."""
    jvps: Callable[[Tensor], Iterator[Tensor]]
    """Maps directions [k, n, u] to the derivatives [k, n, e] of the residuals of each span."""
    vjps: Callable[[list[Tensor]], Tensor]
    """Maps vectors [k, n, e] of all spans back to pre-activations [k, n, m]."""


class Residuals:
    """The equations of some spans for the points p = origin + basis · t, with a label for each point.

    Each vector is divided by its norm, because a signal of length zero would satisfy its equations trivially.
    """

    def __init__(
        self,
        network: Network,
        spans: Sequence[Span],
        preactivations: Float[Tensor, "m b"],
        dtype: torch.dtype,
    ) -> None:
        self.network, self.spans, self.dtype = network, spans, dtype
        self._rough = preactivations.is_cuda and dtype == torch.float32
        """Whether derivatives are computed on tensor cores, which is accurate enough for a search."""
        network.prepare(preactivations.device, dtype)
        self._all = preactivations
        self._outside = self._all_outside = [span.complement.to(dtype) for span in spans]
        self._origin = self.basis = preactivations.new_zeros(0)
        """Derivative of the pre-activations with respect to t."""
        self.widths: Mapping[str, float] | None = None
        """Widths of smoothed activations."""

    @property
    def equations(self) -> int:
        """Number of equations for each point."""
        return sum(span.equations for span in self.spans)

    def place(
        self,
        origin: Float[Tensor, "b"],
        basis: Float[Tensor, "b u"],
        outside: Sequence[Float[Tensor, "_ k"]] = (),
        beyond: Float[Tensor, "m j"] | None = None,
    ) -> None:
        """Set the coordinates, p = origin + basis · t, and for each span further directions outside of it.

        Changes ``beyond`` of the pre-activations, which no p causes, become the last coordinates.
        """
        self._outside = self._all_outside
        if outside:
            pairs = zip(self._all_outside, outside, strict=True)
            self._outside = [torch.cat([always, each.to(self.dtype)], dim=1) for always, each in pairs]
        self._origin = (self._all @ origin).to(self.dtype)
        self.basis = (self._all @ basis).to(self.dtype)
        if beyond is not None:
            self.basis = torch.cat([self.basis, beyond.to(self.dtype)], dim=1)

    def preactivations(self, t: Float[Tensor, "k u"]) -> Float[Tensor, "k m"]:
        """Return the pre-activations of the layer."""
        return self._origin + t @ self.basis.T

    def __call__(
        self, t: Float[Tensor, "k u"], labels: Int[Tensor, "k"], weights: Float[Tensor, "k s"] | None = None
    ) -> Float[Tensor, "k e"]:
        """Return the residual of every equation, multiplied by the weight of its span for each point."""
        vectors = self.network.vectors(self.preactivations(t), labels, self.spans, self.widths)
        pairs = zip(vectors, self._outside, strict=True)
        shares = [(each @ outside) / sphere.norm(each)[:, None] for each, outside in pairs]
        if weights is not None:
            shares = [share * weight[:, None] for share, weight in zip(shares, weights.T, strict=True)]
        return torch.cat(shares, dim=1)

    def squared(
        self, t: Float[Tensor, "k u"], labels: Int[Tensor, "k"], weights: Float[Tensor, "k s"] | None = None
    ) -> Float[Tensor, "k"]:
        """Return the squared norm of the residuals of each point."""
        return self(t, labels, weights).square().sum(1)

    def normal_equations(
        self, t: Float[Tensor, "k u"], labels: Int[Tensor, "k"], weights: Float[Tensor, "k s"] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ‖r‖², JᵀJ and Jᵀr of each point, in chunks of points that bound the memory."""
        size = len(t) if _recording() else self._points_at_once(t)
        chunks = torch.arange(len(t), device=t.device).split(size)
        parts = []
        for rows in chunks:
            if len(chunks) > 1:
                check_time()
            parts.append(self._normal(t[rows], labels[rows], None if weights is None else weights[rows]))
        error, hessian, slope = (torch.cat(each) for each in zip(*parts, strict=True))
        return error, hessian, slope

    def is_small(self, t: Float[Tensor, "k u"]) -> bool:
        """Return whether a GPU takes longer to launch the kernels of all points at once than to run them."""
        return t.is_cuda and len(t) <= self._points_at_once(t) and self.multiplications(*t.shape) <= MAX_RECORDED_WORK

    def multiplications(self, points: int, unknowns: int) -> float:
        """Return the number of multiplications for the matrices JᵀJ of some points."""
        weights = len(self.network.rests) * sum(each.numel() for each in self.network.weights.values())
        products = 4 * weights + self.equations * (unknowns + max(self._origin.shape[0], 1))
        return float(points) * unknowns * products

    def _points_at_once(self, t: Float[Tensor, "k u"]) -> int:
        """Return the number of points whose derivatives fit into a quarter of a GPU's free memory, or a CPU chunk."""
        widest = max(self.equations, self._origin.shape[0], *(len(each) for each in self.network.weights.values()))
        each = TANGENT_COPIES * t.element_size() * t.shape[1] * widest
        free = torch.cuda.mem_get_info(t.device)[0] // 4 if t.is_cuda else 0
        return max(1, free // each, chunk_size(t.device, each))

    def products(
        self, t: Float[Tensor, "k u"], labels: Int[Tensor, "k"], weights: Float[Tensor, "k s"] | None = None
    ) -> tuple[Float[Tensor, "k"], Float[Tensor, "k u"], Callable[[Float[Tensor, "k u"]], Float[Tensor, "k u"]]]:
        """Return ‖r‖², Jᵀr, and the function that multiplies one vector for each point by JᵀJ."""
        at = self._linearised(t, labels, weights)
        scales = [each[:, None, None] for each in at.scales]
        squares = [each.square() for each in scales]

        def product(direction: Tensor) -> Tensor:
            with tensor_cores(self._rough):
                images = at.jvps(direction[:, None])
                pulled = at.vjps([square * image for square, image in zip(squares, images, strict=True)])
                return pulled[:, 0] @ self.basis

        with tensor_cores(self._rough):
            pairs = zip(scales, at.residuals, strict=True)
            slope = at.vjps([scale * residual[:, None] for scale, residual in pairs])[:, 0] @ self.basis
        return _squared(at.residuals), slope, product

    def _linearised(self, t: Tensor, labels: Tensor, weights: Tensor | None) -> _Linearised:
        """Return residuals and derivatives. The derivative of r = Cᵀ v / ‖v‖ is (Cᵀ v̇ - r (v · v̇) / ‖v‖) / ‖v‖."""
        at = linearised(self.network, self.preactivations(t), labels, self.spans, self.widths)
        norms = [sphere.norm(each) for each in at.vectors]
        units = [each / norm[:, None] for each, norm in zip(at.vectors, norms, strict=True)]
        shares = [unit @ outside for unit, outside in zip(units, self._outside, strict=True)]
        factors = torch.ones_like(norms[0]).expand(len(norms), -1) if weights is None else weights.T
        lengths = [each.shape[1] - span.appended_one for each, span in zip(at.vectors, self.spans, strict=True)]
        frames = [
            (outside[:length], unit[:, :length], share[:, None])
            for outside, length, unit, share in zip(self._outside, lengths, units, shares, strict=True)
        ]

        def jvps(directions: Tensor) -> Iterator[Tensor]:
            for moved, (outside, unit, share) in zip(at.jvps(directions @ self.basis.T), frames, strict=True):
                yield torch.baddbmm(moved @ outside, moved @ unit[:, :, None], share, alpha=-1)

        def vjps(images: list[Tensor]) -> Tensor:
            back = [
                torch.baddbmm(image @ outside.T, image @ share.mT, unit[:, None], alpha=-1)
                for image, (outside, unit, share) in zip(images, frames, strict=True)
            ]
            return at.vjps(back)

        residuals = [share * factor[:, None] for share, factor in zip(shares, factors, strict=True)]
        scales = [factor / norm for factor, norm in zip(factors, norms, strict=True)]
        return _Linearised(residuals, scales, jvps, vjps)

    def _normal(self, t: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        at = self._linearised(t, labels, weights)
        axes, residual = torch.eye(t.shape[1], dtype=t.dtype, device=t.device)[None], torch.cat(at.residuals, dim=1)
        with tensor_cores(self._rough):
            parts = zip(at.scales, at.jvps(axes), strict=True)
            transposed = torch.cat([part * scale[:, None, None] for scale, part in parts], dim=2)
            slope = (transposed @ residual[:, :, None])[:, :, 0]
            return residual.square().sum(1), transposed @ transposed.mT, slope


def _squared(residuals: list[Tensor]) -> Float[Tensor, "k"]:
    return torch.stack([each.square().sum(1) for each in residuals]).sum(0)


def _recording() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
