"""The equations of a network: conditions that every sample satisfies on its own, whatever the activation is.

One sample is one unknown vector: its input is x̂ = V p, where the orthonormal columns of V span the rows of the layer's
gradient. The network then computes everything else from z = Ŵ V p. For every Linear layer l with the gradient
Ĝ_l = D_l [Y_l 1], where the columns of D_l are the signals dL/dz and the rows of Y_l are the inputs of the layer:

- **forward equations**: the input [y_l(p); 1] of every later layer lies in the row space of Ĝ_l;
- **backward equations**: the signal d_l(p, label) of every layer, also of the layer itself, lies in the column space of
  Ĝ_l. They need the loss and a label.

Each space has b dimensions, so an input with m entries must satisfy m + 1 - b forward equations, and a signal m - b
backward equations. The unknowns are the b - 1 coordinates of p; the last entry of x̂ is 1. With K hidden layers of
width m there are about (2K - 1)(m - b) equations, so a batch is determined up to about b = m (2K - 1)/(2K).

The spaces come from noisy gradients. For a true vector v = B c in the space with the orthonormal basis B, noise of
standard deviation σ in the entries of Ĝ_l leaves a part of norm σ √(d - b) ‖Σ⁻¹c‖ outside, where d is the length of v
and Σ holds the singular values. This level, and not a constant, decides which points satisfy the equations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch.func import grad

from spearpp.errors import RankError
from spearpp.inversion.factors import Factors, decompose
from spearpp.inversion.observation import Observation, observe
from spearpp.model.following import Following
from spearpp.model.loss import Loss
from spearpp.model.rest import Rest
from spearpp.types import Float, Int, Tensor

SIGMAS = 5.0
"""Largest share of a sample's vector outside its space, in units of its level; the stated error covers as many standard
deviations. Measured: 0.6 to 1.4 for true samples of float32 networks with three hidden layers."""
ROUNDING = 3.0
"""Rounding error of a sample's own vectors, in units of the machine epsilon of the gradient. Measured: see
``SIGMAS``."""
TRIES = 6
"""Number of points within rounding of a sample that are tried. Design choice: for one neuron at a kink, six tries all
fail with a probability of 1/64."""
JITTER = 1e-6
"""Size of the rounding of pre-activations, relative to their root mean square. Derived: about ten times the rounding of
float32."""


@dataclass(frozen=True, eq=False)
class Span:
    """A space that contains one vector of every sample: the inputs, or the signals, of one layer."""

    layer: int
    """0 for the layer that is inverted, l for the l-th later layer."""
    signals: bool
    """Whether the vectors are signals (backward equations) or inputs (forward equations)."""
    basis: Float[Tensor, "d b"]
    singular_values: Float[Tensor, "b"]
    noise: float
    """σ, the standard deviation of the noise in an entry of the gradient."""
    rounding: float
    appended_one: bool = False
    """Whether the vectors are inputs with an appended 1, because the layer has a bias."""

    @property
    def equations(self) -> int:
        """Number of equations: the dimensions outside the space."""
        return self.basis.shape[0] - self.basis.shape[1]

    @property
    def typical_level(self) -> float:
        """The level that noise causes for a vector whose coordinates in the space are alike."""
        return self.noise * self.equations**0.5 * float((self.singular_values**-2).mean()) ** 0.5

    @cached_property
    def complement(self) -> Float[Tensor, "d equations"]:
        """Orthonormal basis of the vectors that are orthogonal to the space."""
        return torch.linalg.qr(self.basis, mode="complete")[0][:, self.basis.shape[1] :]

    def share_outside(self, vectors: Float[Tensor, "k d"]) -> Float[Tensor, "k"]:
        """Return ‖(I - B Bᵀ) v‖ / ‖v‖."""
        outside = vectors - (vectors @ self.basis) @ self.basis.T
        return torch.linalg.vector_norm(outside, dim=1) / _norm(vectors)

    def level(self, vectors: Float[Tensor, "k d"], cancellation: Float[Tensor, "k"]) -> Float[Tensor, "k"]:
        """Return the share outside that noise and rounding explain for a true vector.

        ``cancellation`` says how many times larger the rounding of each sample's signals is than that of its inputs.
        """
        amplified = torch.linalg.vector_norm((vectors @ self.basis) / self.singular_values, dim=1)
        noise = self.noise * self.equations**0.5 * amplified / _norm(vectors)
        rounding = self.rounding * cancellation if self.signals else torch.full_like(noise, self.rounding)
        return torch.hypot(noise, rounding)


@dataclass(frozen=True, eq=False)
class Network:
    """The rest of a network behind the inverted layer, and the spaces that its gradients give."""

    rest: Rest
    loss: Loss | None
    """The loss of the client; None if it is unknown or the outputs depend on more than the layer."""
    outputs: int
    """Number of outputs of the network; 0 if they are not known."""
    spans: tuple[Span, ...]
    """The spaces of all later layers, and of the layer's own signals, that the gradients determine."""
    weights: dict[str, Tensor]
    """The weight of each later layer, by name."""
    output_gradient: Float[Tensor, "c"] | None = None
    """The gradient of the bias of the output layer: the sum of the signals at the outputs; None if there is no bias."""
    notes: list[str] = field(default_factory=list)
    """Why some later layers give no equations."""

    @property
    def equations(self) -> tuple[Span, ...]:
        """The spans whose vectors can be computed: without a loss, only those of inputs."""
        return tuple(span for span in self.spans if self.loss is not None or not span.signals)

    @property
    def labels(self) -> int:
        """Number of labels that the loss knows; 0 without a loss."""
        return 0 if self.loss is None else self.loss.labels(self.outputs)

    def vectors(
        self,
        preactivations: Float[Tensor, "k m"],
        labels: Int[Tensor, "k"],
        spans: Sequence[Span],
        widths: Mapping[str, float] | None = None,
    ) -> list[Tensor]:
        """Return the vector of every sample that must lie in each of the spans."""
        if not any(span.signals for span in spans):
            return self._of_spans(self.rest(preactivations, {}, widths)[0], [], spans)
        return self._of_spans(*self.replay(preactivations, labels, widths), spans)

    def replay(
        self,
        preactivations: Float[Tensor, "k m"],
        labels: Int[Tensor, "k"],
        widths: Mapping[str, float] | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the inputs of the later layers, and the signals of the layer and all later layers, for each sample."""
        loss = self.loss
        if loss is None:
            raise ValueError("signals need a loss")

        def total(shifts: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            later = dict(zip(self.rest.layers, shifts[1:], strict=True))
            inputs, outputs = self.rest(preactivations + shifts[0], later, widths)
            return loss.total(outputs, labels), inputs

        sizes = [preactivations.shape[1], *(len(self.weights[name]) for name in self.rest.layers)]
        shifts = [preactivations.new_zeros(len(preactivations), size) for size in sizes]
        signals, inputs = grad(total, has_aux=True)(shifts)
        return inputs, signals

    def levels(
        self, preactivations: Float[Tensor, "k m"], labels: Int[Tensor, "k"]
    ) -> tuple[Float[Tensor, "s k"], Float[Tensor, "s k"]]:
        """Return the share of each sample's vectors outside the spans of ``equations``, and what noise explains.

        A classifier that is sure of a label computes softmax(o) - e_y as a difference of nearly equal numbers. The
        client's rounding error of this signal, relative to its size, is the machine epsilon over its size.

        A pre-activation may lie within rounding of a kink of its activation, and rounding then decides which slope the
        signal has. Where a sample exceeds its levels, a few points within rounding of it are tried.
        """
        shares, levels = self._levels(preactivations, labels)
        generator = torch.Generator().manual_seed(0)
        for _ in range(TRIES if self.loss is not None else 0):
            rows = torch.nonzero((shares > levels).any(0))[:, 0]
            if not len(rows):
                break
            shift = torch.randn(len(rows), preactivations.shape[1], generator=generator, dtype=torch.float64)
            size = JITTER * preactivations[rows].square().mean(1, keepdim=True).sqrt()
            moved, allowed = self._levels(preactivations[rows] + size * shift.to(preactivations), labels[rows])
            better = (moved / allowed).amax(0) < (shares / levels)[:, rows].amax(0)
            shares[:, rows[better]], levels[:, rows[better]] = moved[:, better], allowed[:, better]
        return shares, levels

    def _levels(self, preactivations: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return shares and levels at exactly these pre-activations."""
        spans, cancellation = self.equations, torch.ones_like(preactivations[:, 0])
        if self.loss is None:
            vectors = self.vectors(preactivations, labels, spans)
        else:
            inputs, signals = self.replay(preactivations, labels)
            vectors = self._of_spans(inputs, signals, spans)
            if self.loss is not Loss.MSE:
                cancellation = 1 / _norm(signals[-1]).clamp(max=1)
        pairs = list(zip(spans, vectors, strict=True))
        shares = torch.stack([span.share_outside(each) for span, each in pairs])
        return shares, torch.stack([span.level(each, cancellation) for span, each in pairs])

    @staticmethod
    def _of_spans(inputs: list[Tensor], signals: list[Tensor], spans: Sequence[Span]) -> list[Tensor]:
        """Return the vectors of the spans, with the appended 1 of inputs."""
        found = [signals[span.layer] if span.signals else inputs[span.layer - 1] for span in spans]
        return [
            torch.cat([each, torch.ones_like(each[:, :1])], dim=1) if span.appended_one else each
            for span, each in zip(spans, found, strict=True)
        ]


def network_equations(following: Following, own: Factors, seen: Observation) -> Network:
    """Derive the equations of a network from the gradients of its later layers.

    A later layer gives equations only if its gradient has the rank of the batch: with fewer outputs than samples its
    row space does not contain the single inputs.

    Args:
        following: the rest of the network behind the inverted layer, with its gradients.
        own: the factors of the inverted layer.
        seen: the gradient and weights of the inverted layer.
    """
    rest, loss, outputs = following.rest, following.loss, following.outputs
    rest.prepare(seen.device, torch.float64)
    spans: list[Span] = []
    notes: list[str] = []
    weights: dict[str, Tensor] = {}
    output_gradient = seen.gradient[:, -1].double() if loss is not None and not rest.layers and seen.has_bias else None
    for index, name in enumerate(rest.layers, start=1):
        weights[name] = rest.weight(name)
        if name not in following.layers:
            notes.append(f"{name} has no gradient in the update")
            continue
        grad_weight, grad_bias, weight, bias = following.layers[name]
        if loss is not None and index == len(rest.layers) and grad_bias is not None and len(grad_bias) == outputs:
            output_gradient = grad_bias.double()
        later = observe(grad_weight, grad_bias, weight, bias, prefix=f"{name}: ")
        factors = _at_rank(later, own.batch_size)
        if factors is None:
            notes.append(f"the gradient of {name} does not show the {own.batch_size} samples of the batch")
            continue
        noise, rounding = _noise(factors, later), ROUNDING * later.gradient_epsilon
        rows = (factors.right / factors.singular_values[:, None]).T.contiguous()
        if rows.shape[0] > own.batch_size:
            spans.append(
                Span(index, False, rows, factors.singular_values, noise, rounding, appended_one=later.has_bias)
            )
        if factors.left.shape[0] > own.batch_size:
            spans.append(Span(index, True, factors.left, factors.singular_values, noise, rounding))
    if own.left.shape[0] > own.batch_size:
        rounding = ROUNDING * seen.gradient_epsilon
        spans.append(Span(0, True, own.left, own.singular_values, _noise(own, seen), rounding))
    return Network(rest, loss, outputs, tuple(spans), weights, output_gradient, notes)


def _at_rank(seen: Observation, batch_size: int) -> Factors | None:
    """Return the factors at the rank of the batch; None if the gradient clearly has another rank."""
    if min(seen.gradient.shape) <= batch_size:
        return None
    try:
        factors = decompose(seen, batch_size)
    except RankError:
        return None
    return factors if factors.batch_size == batch_size else None


def _noise(factors: Factors, seen: Observation) -> float:
    """Return the standard deviation of the noise in an entry, averaged over the rows."""
    return float(torch.linalg.vector_norm(factors.row_noise)) / max(1, seen.gradient.shape[0]) ** 0.5


def _norm(vectors: Float[Tensor, "k d"]) -> Float[Tensor, "k"]:
    return torch.linalg.vector_norm(vectors, dim=1).clamp_min(torch.finfo(vectors.dtype).tiny)
