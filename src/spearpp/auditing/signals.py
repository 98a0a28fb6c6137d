"""Replay each recovered input alone: does one sample explain its part of the gradient, and how large is this part?

The gradient of a layer is a sum of d_i x_iᵀ over the samples, where d_i is the **signal** of sample i: the gradient of
the loss with respect to the layer's pre-activations. A recovered input x with direction q and point p has the observed
signal d = L q / (q·p); ``spearpp.inversion`` defines these letters. If x is one sample, the network and the loss give
the same signal:

    d = κ Jᵀ (softmax(o) - e_y),     o: outputs for x,  J = do/dz: their Jacobian at this layer,  y: label of x

with κ = 1/N for the mean of N losses. Let d(x) be the prediction without κ. Three numbers follow for each input,
without the original data:

- the **mismatch** ‖d - κ d(x)‖ / ‖d‖. It is at the level of the noise if x is a sample. The **slope** is the relative
  change of d(x) over the relative change of x. Mismatch over slope is the error of x that the mismatch implies;
- the **contribution** κ. It is the same for all samples. An input that represents k samples contributes k times as
  much, because k samples were merged or one sample occurs k times;
- the **curvature**: half of the second derivative of d(x). The mean x of two samples, each at a distance of δ ‖x‖ from
  x, has a mismatch of curvature · δ². Two samples can therefore be mistaken for one if δ is below √(noise / curvature).
  Where the outputs do not depend on x (a saturated softmax, tiny inputs), the curvature vanishes and the replay proves
  nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional

from spearpp.auditing.replay import as_sent, forward, module_name
from spearpp.errors import OptionError
from spearpp.inversion.factors import Factors
from spearpp.inversion.result import Inversion
from spearpp.linalg.chunks import chunk_size
from spearpp.model import Layer
from spearpp.model.loss import Loss
from spearpp.types import Bool, Float, Int, Tensor, join_rows, replace_rows, select_rows
from spearpp.update import ClientUpdate
from spearpp.update.lazy import tensor_specs

EXAMPLE_DIRECTIONS = 4
"""Number of inputs that fit towards which slope and curvature are measured. A design choice: a median needs a few
directions, and each direction costs two passes through the model."""
WRONG_DIRECTIONS = 16
"""Largest number of wrong inputs towards which the slope is measured. A design choice: the errors of the other inputs
lie towards the wrong inputs, so as many as possible are measured, and each costs two passes through the model."""
DERIVATIVE_STEP = 1e-4
"""Relative step of the numerical derivative of the outputs. A design choice for central differences in float64:
rounding adds an error of about 1e-12, and a step this short changes the activation of few neurons."""
OUTPUT_STEP = 1e-2
"""Step of the numerical derivatives of the softmax or sigmoid, in units of the outputs. A design choice for central
differences in float64: the relative truncation error is of the order of 1e-5."""
ROUNDING = 3.0
"""How many times the relative spacing of its dtype the rounding error of an observed signal may be. Measured: 1 to 2
for float32."""
TRIES = 6
"""How often an input with a mismatch is replayed again at a point within rounding of it. A neuron of a later layer may
be exactly at zero, and rounding then decides whether the neuron is active. A design choice: six tries all fail with a
probability of 1/64 for one such neuron."""
MATCHED_UP_TO = 1e-3
"""Largest mismatch of an input that reproduces its part of the update. Other inputs are replayed again within rounding,
and call for another loss. A design choice: 1e-3 is far above the rounding of float32 gradients."""
WRONG_MISMATCH = 0.5
"""Mismatch of a wrong input: it is not replayed again, and no replay of the whole batch proves it. Measured: wrong
inputs have a mismatch of 0.5 or more."""

FIRST_CHUNK = 64
"""Number of inputs that are replayed at once before the size of the Jacobian is known. A design choice: the Jacobians
of 64 inputs fit into memory for typical classifiers."""


@dataclass(frozen=True, eq=False)
class Signals:
    """The replay of each input alone, one row per input."""

    labels: Int[Tensor, "k"]
    """y, the label that explains the signal best. -1 if the loss has no labels."""
    mismatch: Float[Tensor, "k"]
    """‖d - κ d(x)‖ / ‖d‖."""
    outside: Float[Tensor, "k"]
    """Share of d that is not a combination of the derivatives of the outputs, so that no loss explains it. Computed for
    a single input only, because it takes long for networks with many outputs; 0 otherwise."""
    noise: Float[Tensor, "k"]
    """The mismatch that noise and rounding explain."""
    contribution: Float[Tensor, "k"]
    """κ, the contribution of the input to the update."""
    slope: Float[Tensor, "k 2"]
    """Relative change of d(x) over the relative change of x: first of the direction of d(x), then of d(x) itself."""
    curvature: Float[Tensor, "k 2"]
    """Half of the relative second derivative: first of the direction of d(x), then of d(x) itself."""
    extra_equations: Int[Tensor, "k"]
    """Number of neurons with a signal minus the number of unknowns: the outputs, whose gradients can be combined to any
    signal, or label and scale at the output layer."""

    @property
    def matched(self) -> Bool[Tensor, "k"]:
        """Which inputs alone reproduce their part of the update. A wrong network leaves a far larger mismatch."""
        return self.mismatch <= MATCHED_UP_TO


class AfterLayer:
    """The part of a model after a Linear layer, linearised at given inputs."""

    def __init__(self, model: nn.Module, update: ClientUpdate, layer: Layer) -> None:
        self.model = as_sent(model, update).double()
        self.layer, self.module = layer, self.model.get_submodule(module_name(self.model, layer))
        self.device = tensor_specs(update.gradients)[layer.weight].device
        self.rows_at_once = FIRST_CHUNK

    def outputs(self, inputs: Float[Tensor, "k n"]) -> Float[Tensor, "k classes"]:
        """Return the outputs without the Jacobian."""
        return forward(self.model, inputs.to(self.device)).detach()

    def __call__(self, inputs: Float[Tensor, "k n"]) -> tuple[Float[Tensor, "k c"], Float[Tensor, "k c m"]]:
        """Return the outputs and their Jacobian with respect to the pre-activations of the layer.

        Raises:
            OptionError: if the input of the layer does not have one row per sample.
        """
        preactivations: list[Tensor] = []

        def record(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
            preactivations.append(output)
            return output.clone()  # an in-place ReLU would overwrite the recorded tensor

        handle = self.module.register_forward_hook(record)
        try:
            outputs = forward(self.model, inputs.to(self.device))
        finally:
            handle.remove()
        if len(preactivations) != 1 or preactivations[0].shape != (len(inputs), self.layer.neurons):
            raise OptionError(
                "the input of the layer does not have one row per sample: no sample can be replayed alone"
            )
        rows = [
            torch.autograd.grad(outputs[:, column].sum(), preactivations[0], retain_graph=True)[0]
            for column in range(outputs.shape[1])
        ]
        jacobian = torch.stack(rows, dim=1)
        # Three float64 tensors of the size of the Jacobian are in memory at the same time.
        self.rows_at_once = chunk_size(jacobian.device, 24 * jacobian[0].numel())
        return outputs.detach(), jacobian


@dataclass(frozen=True, eq=False)
class _Candidates:
    """Inputs with their observed signals."""

    inputs: Float[Tensor, "k n"]
    observed: Float[Tensor, "k m"]
    noise: Float[Tensor, "k"]
    """The change of the signal that noise and rounding explain, relative to the norm of the signal."""


def replay_alone(
    model: nn.Module,
    update: ClientUpdate,
    layer: Layer,
    result: Inversion,
    loss: Loss | None,
    inputs: Float[Tensor, "found n"] | None = None,
) -> Signals | None:
    """Replay alone every input that has a direction.

    If cross-entropy explains no input, the replay tries binary cross-entropy of every output. If the layer sees
    features, ``inputs`` holds the inputs of the model that belong to them.

    Returns:
        One row per input, or None if no input can be replayed: none has a direction, the layer has no bias (the size of
        an input is then unknown), the update is a sum of several clients, or the result was read from a folder, which
        holds no factors. If the loss is unknown, only ``outside`` says something, and no input matches.

    Raises:
        OptionError: if the model does not accept the inputs or is not a classifier.
    """
    factors = result.factors
    if update.clients > 1 or factors is None or not len(result.directions) or not result.scale_known:
        return None
    network = AfterLayer(model, update, layer)
    wrong = result.inputs[~result.fits][:WRONG_DIRECTIONS].double()
    if inputs is None:
        inputs = result.inputs[: len(result.directions)].double()
    else:
        wrong = inputs[:0]
    directions = result.directions.to(factors.left)
    spread = torch.linalg.vector_norm(directions / factors.singular_values, dim=1)
    noise = torch.linalg.vector_norm(factors.row_noise) * spread
    epsilon = max(torch.finfo(each.dtype).eps for each in (update.gradients[layer.weight], result.inputs))
    candidates = _Candidates(inputs, observed_signals(factors, result), noise.clamp_min(ROUNDING * epsilon))
    best = _fit(network, candidates, wrong, loss or Loss.CROSS_ENTROPY)
    if loss is None:
        return replace(
            best, labels=torch.full_like(best.labels, -1), mismatch=torch.full_like(best.mismatch, torch.inf)
        )
    if loss is Loss.CROSS_ENTROPY and not bool(best.matched.any()):
        binary = _fit(network, candidates, wrong, Loss.BCE)
        if bool(binary.matched.any()):
            best, loss = binary, Loss.BCE
    return _moved_within_rounding(network, candidates, wrong, best, loss)


def _fit(network: AfterLayer, candidates: _Candidates, wrong: Float[Tensor, "w n"], loss: Loss) -> Signals:
    """Replay inputs alone with one loss."""
    parts, alone = [], len(candidates.noise) == 1
    for rows in torch.arange(len(candidates.noise)).split(network.rows_at_once):
        some = select_rows(candidates, rows)
        outputs, jacobian = network(some.inputs)
        labels, residual = _best_label(outputs, jacobian, some.observed, loss)
        signal = torch.einsum("kc,kcm->km", residual, jacobian)
        size = torch.linalg.vector_norm(signal, dim=1).clamp_min(torch.finfo(signal.dtype).tiny)
        contribution = (some.observed * signal).sum(1) / size.square()
        difference = torch.linalg.vector_norm(some.observed - contribution[:, None] * signal, dim=1)
        mismatch = difference / torch.linalg.vector_norm(some.observed, dim=1).clamp_min(torch.finfo(size.dtype).tiny)
        towards = _towards(candidates.inputs, rows, wrong)
        unit = signal / size[:, None]
        change = _along_outputs(network, outputs, jacobian, loss)
        if network.layer.equations:
            change = _along_signals(network, outputs, residual, signal, loss)
        # At the output layer the Jacobian is the identity, and only the label and the scale of the signal are unknown.
        unknowns = 2 if network.layer.output else outputs.shape[1]
        slope, curvature = _derivatives(change, some.inputs, towards, unit)
        parts.append(
            Signals(
                labels=labels,
                mismatch=torch.where(contribution > 0, mismatch, torch.inf),
                outside=_share_outside(jacobian, some.observed) if alone else torch.zeros_like(mismatch),
                noise=some.noise,
                contribution=contribution,
                slope=slope / size[:, None],
                curvature=curvature / size[:, None],
                extra_equations=((signal != 0).sum(1) - unknowns).clamp_min(0),
            )
        )
    return join_rows(*parts)


def _share_outside(jacobian: Float[Tensor, "k c m"], observed: Float[Tensor, "k m"]) -> Float[Tensor, "k"]:
    """Return the share of each observed signal outside the span of the derivatives of the outputs."""
    basis = torch.linalg.qr(jacobian.mT)[0]
    inside = (basis @ (basis.mT @ observed[:, :, None]))[:, :, 0]
    size = torch.linalg.vector_norm(observed, dim=1).clamp_min(torch.finfo(observed.dtype).tiny)
    return torch.linalg.vector_norm(observed - inside, dim=1) / size


def _best_label(
    outputs: Float[Tensor, "k c"], jacobian: Float[Tensor, "k c m"], observed: Float[Tensor, "k m"], loss: Loss
) -> tuple[Int[Tensor, "k"], Float[Tensor, "k c"]]:
    """Return the label that explains the observed signal best, and dL/do for this label."""
    here = _prediction(loss)(outputs)
    if loss is Loss.BCE:  # dL/do = sigmoid(o) - t is negative exactly where the target t is 1
        output_gradient = torch.linalg.lstsq(jacobian.mT, observed[:, :, None]).solution[:, :, 0]
        return torch.full_like(outputs[:, 0], -1).long(), here - (output_gradient < 0).to(outputs)
    signals = signals_of_labels(here, jacobian)
    size = torch.linalg.vector_norm(signals, dim=2).clamp_min(torch.finfo(signals.dtype).tiny)
    cosine = torch.einsum("kcm,km->kc", signals, observed) / size
    labels = cosine.argmax(1)
    return labels, here - functional.one_hot(labels, outputs.shape[1])


def observed_signals(factors: Factors, result: Inversion) -> Float[Tensor, "found m"]:
    """Return d_i = L q_i / (q_i·p_i) for every input whose direction was found."""
    found = result.directions.to(factors.left)
    inputs = result.inputs[: len(found)].to(factors.left)
    if factors.right.shape[1] > inputs.shape[1]:
        inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
    points = inputs @ factors.right.T / factors.singular_values.square()
    product = (points * found).sum(1, keepdim=True)
    return (found / torch.where(product == 0, 1.0, product)) @ factors.left.T


def signals_of_labels(predicted: Float[Tensor, "k c"], jacobian: Float[Tensor, "k c m"]) -> Float[Tensor, "k c m"]:
    """Return Jᵀ (f - e_y) for every label y, where f is what the network predicts: softmax(o) for cross-entropy."""
    return torch.einsum("kc,kcm->km", predicted, jacobian)[:, None] - jacobian


def _prediction(loss: Loss) -> Callable[[Tensor], Tensor]:
    """Return the function whose difference to the target is dL/do, up to a factor that is the same for all samples."""
    if loss is Loss.BCE:
        return torch.sigmoid
    return (lambda o: o) if loss is Loss.MSE else (lambda o: o.softmax(1))


def _towards(
    inputs: Float[Tensor, "all n"], rows: Int[Tensor, "k"], wrong: Float[Tensor, "w n"]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return directions in which the inputs of these rows may be wrong: first likely directions, then examples.

    The likely directions are the input itself and the differences to wrong inputs. If q_k is wrong, the error of every
    other input is a multiple of the wrong input x̂_k, because p_i is orthogonal to q_k. The examples are differences
    to inputs that fit. Samples that could be merged differ in this way.
    """
    at = inputs[rows]
    shifts = range(1, min(len(inputs), EXAMPLE_DIRECTIONS + 1))
    return [at, *(each - at for each in wrong)], [inputs[(rows + shift) % len(inputs)] - at for shift in shifts]


Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From inputs and directions, both (k, n), to the first and half of the second derivative of the signal, (k, m)."""


def _along_outputs(
    network: AfterLayer, outputs: Float[Tensor, "k c"], jacobian: Float[Tensor, "k c m"], loss: Loss
) -> Change:
    """Return the derivatives of the signal of a network with ReLU.

    Within one activation pattern the outputs are linear in the input and J is constant, so only the softmax or sigmoid
    has a second derivative.
    """
    prediction = _prediction(loss)

    def change(inputs: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        ahead, behind = (network.outputs(inputs + sign * DERIVATIVE_STEP * direction) for sign in (1, -1))
        along = (ahead - behind) / (2 * DERIVATIVE_STEP)
        step = OUTPUT_STEP / torch.linalg.vector_norm(along, dim=1, keepdim=True).clamp_min(1e-300)
        plus, minus, here = (prediction(outputs + sign * step * along) for sign in (1, -1, 0))
        first, second = ((plus - minus) / (2 * step), (plus + minus - 2 * here) / (2 * step.square()))
        return torch.einsum("kc,kcm->km", first, jacobian), torch.einsum("kc,kcm->km", second, jacobian)

    return change


def _along_signals(
    network: AfterLayer,
    outputs: Float[Tensor, "k c"],
    residual: Float[Tensor, "k c"],
    signal: Float[Tensor, "k m"],
    loss: Loss,
) -> Change:
    """Return the derivatives of the signal of a network with other activations, whose J depends on the input."""
    prediction = _prediction(loss)
    targets = prediction(outputs) - residual

    def at(inputs: Tensor) -> Tensor:
        moved, jacobian = network(inputs)
        return torch.einsum("kc,kcm->km", prediction(moved) - targets, jacobian)

    def change(inputs: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        plus, minus = (at(inputs + sign * DERIVATIVE_STEP * direction) for sign in (1, -1))
        return (plus - minus) / (2 * DERIVATIVE_STEP), (plus + minus - 2 * signal) / (2 * DERIVATIVE_STEP**2)

    return change


def _derivatives(
    change: Change,
    inputs: Float[Tensor, "k n"],
    towards: tuple[list[Tensor], list[Tensor]],
    unit: Float[Tensor, "k m"],
) -> tuple[Float[Tensor, "k 2"], Float[Tensor, "k 2"]]:
    """Return slope and curvature of the signal.

    The slope is the smaller of two numbers: the smallest slope over the likely directions, and the median slope over
    the example directions. The curvature is the smallest over all directions except the directions towards wrong
    inputs, because merged samples do not differ in these.
    """
    size = torch.linalg.vector_norm(inputs, dim=1, keepdim=True)
    likely, examples = towards
    slopes: list[Tensor] = []
    curvatures: list[Tensor] = []
    for direction in [*likely, *examples]:
        length = torch.linalg.vector_norm(direction, dim=1, keepdim=True)
        first, second = change(inputs, direction * size / length.clamp_min(1e-300))
        for derivative, results in ((first, slopes), (second, curvatures)):
            across = derivative - (derivative * unit).sum(1, keepdim=True) * unit
            sizes = torch.stack([torch.linalg.vector_norm(each, dim=1) for each in (across, derivative)], dim=1)
            results.append(torch.where(length > 0, sizes, torch.inf))  # a wrong input has no direction towards itself
    slope = torch.stack(slopes[: len(likely)]).amin(0)
    if examples:
        slope = torch.minimum(slope, torch.stack(slopes[len(likely) :]).median(0).values)
    return slope, torch.stack([curvatures[0], *curvatures[len(likely) :]]).amin(0)


def _moved_within_rounding(
    network: AfterLayer, candidates: _Candidates, wrong: Float[Tensor, "w n"], best: Signals, loss: Loss
) -> Signals:
    """Replay inputs with a mismatch again at random points within rounding of them, and keep the best replay.

    A neuron of a later layer may be exactly at zero. Rounding then decides whether the neuron is active.
    """
    generator = torch.Generator().manual_seed(0)
    for _ in range(TRIES):
        rows = torch.nonzero((best.mismatch > MATCHED_UP_TO) & (best.mismatch < WRONG_MISMATCH))[:, 0]
        if not len(rows):
            return best
        some = select_rows(candidates, rows)
        shift = torch.randn(some.inputs.shape, generator=generator, dtype=some.inputs.dtype).to(some.inputs)
        size = torch.linalg.vector_norm(some.inputs, dim=1, keepdim=True) / some.inputs.shape[1] ** 0.5
        shifted = replace(some, inputs=some.inputs + torch.finfo(torch.float32).eps * 8 * size * shift)
        found = _fit(network, shifted, wrong, loss)
        better = found.mismatch < best.mismatch[rows]
        best = replace_rows(best, rows[better], select_rows(found, better))
    return best
