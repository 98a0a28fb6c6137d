"""The equations of a network: conditions that every sample satisfies on its own, whatever the activation is.

One sample is one unknown vector p̄, its coordinates: its input is x̂ = V p̄, where the orthonormal columns of V span
the rows of the layer's gradient. The network then computes everything else from z = Ŵ V p̄. For every Linear layer l
with the gradient Ĝ_l = D_l [Y_l 1], where the columns of D_l are the signals dℒ/dz and the rows of Y_l are the inputs
of the layer:

- **forward equations**: the input [y_l(p̄); 1] of every later layer lies in the row space of Ĝ_l;
- **backward equations**: the signal d_l(p̄, label) of every layer, also of the layer itself, lies in the column space
  of Ĝ_l. They need the loss and a label.

Each space has b dimensions, so an input with m entries must satisfy m + 1 - b forward equations, and a signal m - b
backward equations. The unknowns are the b - 1 coordinates p̄; the last entry of x̂ is 1. The spaces come from noisy
gradients, so a level, and not a constant, decides which points satisfy the equations (``Span.share_and_level``).

**Several rounds.** The gradients and weights of a layer in T rounds form one layer with T·m neurons. Its signals are
those of all rounds, one below the other. Each round has its own weights after the layer, and gives its own equations
for later layers, whose inputs differ between the rounds. (``docs/method.md``, section "The network equations")
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.func import grad

from spearpp.errors import RankError
from spearpp.inversion.chain import first_derivatives, signals_of
from spearpp.inversion.factors import Factors, decompose
from spearpp.inversion.observation import Observation, observe
from spearpp.inversion.spans import Span
from spearpp.linalg import sphere
from spearpp.model.following import Following
from spearpp.model.loss import Loss
from spearpp.model.rest import Rest
from spearpp.types import Float, Int, Tensor

SIGMAS = 5.0
"""Number of standard deviations of noise that are accepted. A point satisfies an equation if the share of its vector
outside the space is at most this many times the level. The stated error uses the same number (``Spread.reach``).
Measured: in float32 networks with three hidden layers, the shares of true samples are 0.6 to 1.4 times their levels."""
MIN_DOUBTFUL_RATIO = 1.5
"""Ratio of a share to its level above which a point is examined again: it may be a local minimum, or a neuron may be at
a kink of its activation. Measured: the largest ratio is 0.2 to 1.4 for nearly all samples, and it was 1.75 for a local
minimum beside two samples that differ by 1 %."""
CLIENT_ROUNDING = 3.0
"""Relative rounding error of the vectors that the client computes for a sample, in units of the machine epsilon of the
gradient. Measured together with ``SIGMAS``: with this rounding in the levels, true samples have the ratios given
there."""
JITTERED_POINTS = 6
"""Number of points within rounding of a sample that are tried. Design choice: if one neuron is at a kink, half of the
points are on the right side, and six tries all fail with a probability of 1/64."""
JITTER_SIZE = 1e-6
"""Size of the change of each pre-activation at these points, relative to the root mean square of the pre-activations.
Derived: about ten times the rounding of float32."""


@dataclass(frozen=True, eq=False)
class Network:
    """The equations of a network: its operations after the inverted layer, and the spaces that its gradients give."""

    rests: tuple[Rest, ...]
    """The rest of the network with the weights of each round."""
    loss: Loss | None
    """The loss of the client; None if it is unknown or the outputs depend on more than the layer."""
    output_count: int
    """Number of outputs of the network; 0 if it is unknown."""
    spans: tuple[Span, ...]
    """The spaces of all later layers, and of the layer's own signals, that the gradients determine."""
    weights: dict[str, Tensor]
    """The weight of each later layer, by name."""
    output_gradient: Float[Tensor, "c"] | None = None
    """The gradient of the bias of the output layer in the last round: for a mean loss, the mean over the samples of the
    derivatives of the loss at the outputs. None if the layer has no bias."""
    input_noise: Float[Tensor, "b m"] | None = None
    """Maps the pre-activations of a sample to σ Σ⁻¹p, whose norm is the noise in the entries of its input; None if this
    noise is rounding (``spearpp.inversion.levels``)."""
    notes: list[str] = field(default_factory=list)
    """Why some later layers give no equations."""

    @property
    def usable_spans(self) -> tuple[Span, ...]:
        """The spans whose vectors can be computed: without a loss, only those of inputs."""
        return tuple(span for span in self.spans if self.loss is not None or not span.signals)

    @property
    def label_count(self) -> int:
        """Number of labels of the loss; 0 without a loss."""
        return 0 if self.loss is None else self.loss.labels(self.output_count)

    def vectors(
        self,
        preactivations: Float[Tensor, "k m"],
        labels: Int[Tensor, "k"],
        spans: Sequence[Span],
        widths: Mapping[str, float] | None = None,
    ) -> list[Tensor]:
        """Return the vector of every sample that must lie in each of the spans."""
        if not any(span.signals for span in spans):
            return self.of_spans(self._inputs(preactivations, widths), [], spans)
        return self.of_spans(*self.replay(preactivations, labels, widths), spans)

    def replay(
        self,
        preactivations: Float[Tensor, "k m"],
        labels: Int[Tensor, "k"],
        widths: Mapping[str, float] | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the inputs of the later layers, and the signals of the layer and all later layers, for each sample.

        With several rounds, the signals of the layer are those of all rounds side by side, and the later layers of the
        rounds follow each other.
        """
        loss = self.loss
        if loss is None:
            raise ValueError("signals need a loss")
        own: list[Tensor] = []
        inputs: list[Tensor] = []
        signals: list[Tensor] = []
        for rest, z in zip(self.rests, preactivations.chunk(len(self.rests), dim=1), strict=True):
            seen, (first, *later) = self._replay_round(rest, loss, z, labels, widths)
            own, inputs, signals = [*own, first], [*inputs, *seen], [*signals, *later]
        return inputs, [own[0] if len(own) == 1 else torch.cat(own, dim=1), *signals]

    def _replay_round(
        self, rest: Rest, loss: Loss, z: Tensor, labels: Tensor, widths: Mapping[str, float] | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the inputs of the later layers of one round, and the signals of the layer and of the later layers."""
        if rest.is_chain:
            steps = rest.steps(z, widths)
            *slopes, last = first_derivatives(
                [*steps.activations, (steps.outputs, lambda each: loss.each(each, labels))]
            )
            return steps.inputs, signals_of(last, steps.weights, slopes)[0]

        def total(shifts: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            later = dict(zip(rest.layers, shifts[1:], strict=True))
            inputs, outputs = rest(z + shifts[0], later, widths)
            return loss.total(outputs, labels), inputs

        sizes = [z.shape[1], *(len(self.weights[name]) for name in rest.layers)]
        signals, inputs = grad(total, has_aux=True)([z.new_zeros(len(z), size) for size in sizes])
        return inputs, signals

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Copy the weights of all rounds to a device and dtype."""
        for rest in self.rests:
            rest.prepare(device, dtype)

    def scales(self, preactivations: Float[Tensor, "k m"]) -> dict[str, float]:
        """Return the standard deviation of the argument of every activation in the first round, by name of its node."""
        return self.rests[0].scales(preactivations.chunk(len(self.rests), dim=1)[0])

    def levels(
        self, preactivations: Float[Tensor, "k m"], labels: Int[Tensor, "k"], tolerated: float = MIN_DOUBTFUL_RATIO
    ) -> tuple[Float[Tensor, "s k"], Float[Tensor, "s k"]]:
        """Return the share of each sample's vectors outside the ``usable_spans``, and what noise explains.

        If the network predicts the label with confidence, softmax(o) - e_y is a difference of nearly equal numbers. The
        relative rounding error of this signal is the machine epsilon divided by the norm of the signal.

        If a pre-activation lies within rounding of a kink of its activation, rounding decides which slope the signal
        has. Where a share exceeds ``tolerated`` times its level, a few points within rounding of the sample are tried,
        and the best one counts.
        """
        _, shares, levels = self.vectors_with_levels(preactivations, labels)
        rows = torch.nonzero((shares > tolerated * levels).any(0))[:, 0] if self.loss is not None else labels[:0]
        if not len(rows):
            return shares, levels
        generator = torch.Generator().manual_seed(0)
        shift = torch.randn(JITTERED_POINTS, 1, preactivations.shape[1], generator=generator, dtype=torch.float64)
        size = JITTER_SIZE * preactivations[rows].square().mean(1, keepdim=True).sqrt()
        tried = (preactivations[rows] + size * shift.to(preactivations)).flatten(0, 1)
        _, *found = self.vectors_with_levels(tried, labels[rows].repeat(JITTERED_POINTS))
        moved = [each.unflatten(1, (JITTERED_POINTS, -1)) for each in found]
        ratios = torch.cat([(shares / levels)[:, None, rows], moved[0] / moved[1]], dim=1).amax(0)
        best = ratios.argmin(0)
        for kept, each in zip((shares, levels), moved, strict=True):
            choices = torch.cat([kept[:, None, rows], each], dim=1)
            kept[:, rows] = choices.gather(1, best.expand(len(kept), 1, -1))[:, 0]
        return shares, levels

    def rounding_of_signals(
        self, preactivations: Float[Tensor, "k m"], labels: Int[Tensor, "k"], span: Span
    ) -> Float[Tensor, "k"]:
        """Return the rounding error of each sample's signals in a span, relative to their norms."""
        return span.rounding * self._cancellation(self.replay(preactivations, labels)[1])

    def _cancellation(self, signals: list[Tensor]) -> Float[Tensor, "k"]:
        """Return how many times larger the relative rounding error of each sample's signals is than that of its inputs.

        Only losses whose derivative is a difference of nearly equal numbers have a factor above 1.
        """
        if self.loss not in (Loss.CROSS_ENTROPY, Loss.BCE):
            return torch.ones_like(signals[0][:, 0])
        count = len(self.rests[0].layers)
        outputs = signals[count::count] if count else signals[0].chunk(len(self.rests), dim=1)
        return 1 / torch.stack([sphere.norm(each) for each in outputs]).amin(0).clamp(max=1)

    def vectors_with_levels(
        self, preactivations: Float[Tensor, "k m"], labels: Int[Tensor, "k"]
    ) -> tuple[list[Tensor], Float[Tensor, "s k"], Float[Tensor, "s k"]]:
        """Return the vectors of ``usable_spans``, and shares and levels, at exactly these pre-activations."""
        spans, cancellation = self.usable_spans, torch.ones_like(preactivations[:, 0])
        if self.loss is None:
            vectors = self.vectors(preactivations, labels, spans)
        else:
            inputs, signals = self.replay(preactivations, labels)
            vectors = self.of_spans(inputs, signals, spans)
            cancellation = self._cancellation(signals)
        input_noise = self._noise_of_inputs(preactivations)
        pairs = zip(spans, vectors, strict=True)
        found = [span.share_and_level(each, cancellation, input_noise) for span, each in pairs]
        shares, levels = (torch.stack(each) for each in zip(*found, strict=True))
        return vectors, shares, levels

    def without_input_noise(
        self, preactivations: Float[Tensor, "k m"], levels: Float[Tensor, "s k"]
    ) -> Float[Tensor, "k"]:
        """Return which share of its levels is not caused by noise in the entries of each input.

        The causes are independent, so the square of a level is the sum of the squares of its causes. The largest share
        of all ``usable_spans`` is returned.
        """
        noise = self._noise_of_inputs(preactivations)
        moved = torch.stack([span.sensitivity * noise for span in self.usable_spans]) / levels
        return (1 - moved.square()).clamp_min(0).amax(0).sqrt()

    def _noise_of_inputs(self, preactivations: Float[Tensor, "k m"]) -> Float[Tensor, "k"]:
        """Return the standard deviation of the noise in the entries of each input; 0 if it is rounding."""
        if self.input_noise is None:
            return torch.zeros_like(preactivations[:, 0])
        return torch.linalg.vector_norm(preactivations @ self.input_noise.T, dim=1)

    def _inputs(self, preactivations: Tensor, widths: Mapping[str, float] | None) -> list[Tensor]:
        """Return the inputs of the later layers of all rounds."""
        parts = zip(self.rests, preactivations.chunk(len(self.rests), dim=1), strict=True)
        found = [rest.steps(z, widths).inputs if rest.is_chain else rest(z, {}, widths)[0] for rest, z in parts]
        return [each for inputs in found for each in inputs]

    @staticmethod
    def of_spans(inputs: list[Tensor], signals: list[Tensor], spans: Sequence[Span]) -> list[Tensor]:
        """Return the vectors of the spans, with the appended 1 of inputs."""
        found = [signals[span.layer] if span.signals else inputs[span.layer - 1] for span in spans]
        return [
            torch.cat([each, torch.ones_like(each[:, :1])], dim=1) if span.appended_one else each
            for span, each in zip(spans, found, strict=True)
        ]


def network_equations(rounds: Sequence[Following], own: Factors, seen: Observation) -> Network:
    """Derive the equations of a network from the gradients of its later layers.

    A later layer gives equations only if its gradient has the rank of the batch. With fewer outputs than samples, the
    row space of its gradient does not contain the input of each sample. ``own`` and ``seen`` belong to the inverted
    layer.
    """
    loss, outputs, count = rounds[0].loss, rounds[0].outputs, len(rounds[0].rest.layers)
    spans: list[Span] = []
    notes: list[str] = []
    weights: dict[str, Tensor] = {}
    output_gradient = None
    if loss is not None and not count and seen.has_bias:  # an output layer, whose last rows belong to the last round
        output_gradient = seen.gradient[-outputs:, -1].double()
    for each in rounds:
        each.rest.prepare(seen.device, torch.float64)
    for index, (following, name) in enumerate(((each, name) for each in rounds for name in each.rest.layers), start=1):
        weights[name] = following.rest.weight(name)
        if name not in following.layers:
            notes.append(f"{name} has no gradient in the update")
            continue
        grad_weight, grad_bias, weight, bias = following.layers[name]
        if loss is not None and index == count * len(rounds) and grad_bias is not None and len(grad_bias) == outputs:
            output_gradient = grad_bias.double()
        later = observe(grad_weight, grad_bias, weight, bias, prefix=f"{name}: ")
        factors = _at_rank(later, own.batch_size)
        if factors is None:
            notes.append(f"the gradient of {name} does not show the {own.batch_size} samples of the batch")
            continue
        noise, rounding = factors.entry_noise, CLIENT_ROUNDING * later.gradient_epsilon
        rows = factors.rows.T.contiguous()
        values, left = factors.singular_values, factors.left
        spans.append(Span(index, False, rows, values, noise, rounding, left, later.has_bias))
        spans.append(Span(index, True, left, values, noise, rounding, rows))
    rounding = CLIENT_ROUNDING * seen.gradient_epsilon
    spans.append(Span(0, True, own.left, own.singular_values, own.entry_noise, rounding))
    spans = [span for span in spans if span.equations > 0]
    rests = tuple(each.rest for each in rounds)
    return Network(rests, loss, outputs, tuple(spans), weights, output_gradient, notes=notes)


def _at_rank(seen: Observation, batch_size: int) -> Factors | None:
    """Return the factors at the rank of the batch; None if the gradient clearly has another rank."""
    if min(seen.gradient.shape) <= batch_size:
        return None
    try:
        factors = decompose(seen, batch_size)
    except RankError:
        return None
    return factors if factors.batch_size == batch_size else None
