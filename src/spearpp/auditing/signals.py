"""Replay each recovered input alone: does one sample explain its part of the gradient, and how large a part is it?

A gradient is a sum of d_i x̂_iᵀ over the samples. A recovered input x with direction q and point p gives the signal
that was observed for it, d = L q / (q·p). If x is one sample, the network and the loss predict the same signal:

    d = κ Jᵀ (softmax(o) - e_y),     o: outputs for x,  J = do/dz: their Jacobian at this layer,  y: its label

with κ = 1/N for the mean of N losses. Three numbers follow, for each input on its own and without the truth:

- the **mismatch** ‖d - κ d(x)‖ / ‖d‖, at the level of noise for a sample. Over the **slope**, the relative change of
  d(x) with a relative change of x, it is the error of x that the mismatch implies;
- the **weight** κ. It is the same for all samples. An input that stands for k samples, because they were merged or one
  was repeated, has k times the weight;
- the **bend**: half of the second derivative of d(x). The mean of two samples at a relative distance 2δ from each other
  has a mismatch of bend · δ². So √(noise / bend) is how far from each other samples may lie and still be taken for one.
  Where outputs do not depend on x (a saturated softmax, tiny inputs) the bend vanishes, and nothing can be concluded.
"""

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
from spearpp.types import Float, Int, Tensor, replace_rows, select_rows
from spearpp.update import ClientUpdate
from spearpp.update.lazy import tensor_specs

FITS = 0.6
"""Share of a signal outside the column space up to which its label fits: 1e-6 for exact inputs, up to 0.5 for those
that noise has moved by 7 %, and 0.7 to 0.9 for wrong labels."""
MARGIN = 1.3
"""How much farther outside the next best label must be."""
TOLD = 0.01
"""Share outside from which on a label is told from the best: less may be rounding."""
DIRECTIONS = 4
"""Wrong inputs, and inputs that fit, towards which slope and bend are measured."""
STEP = 1e-4
"""Relative step of the numerical derivative of the outputs."""
ROUNDING = 3.0
"""How many times the relative spacing of its dtype a client's own signal may be off: 1 to 2 was seen for float32."""
TRIES = 6
"""How often an input that does not fit is moved within rounding: a neuron of a later layer may be exactly at zero."""
UNFIT = 1e-3
"""Mismatch from which on that is tried."""


@dataclass(frozen=True, eq=False)
class Signals:
    """What replaying each input alone gives, one row for each."""

    labels: Int[Tensor, "k"]
    """y, the label that explains the signal best; -1 if the loss has no labels."""
    mismatch: Float[Tensor, "k"]
    """‖d - κ d(x)‖ / ‖d‖."""
    noise: Float[Tensor, "k"]
    """What noise and rounding explain of the mismatch."""
    weight: Float[Tensor, "k"]
    """κ."""
    slope: Float[Tensor, "k 2"]
    """Relative change of d(x) over the relative change of x: of its direction alone, and with its size."""
    bend: Float[Tensor, "k 2"]
    """Half of the relative second derivative of d(x), likewise."""
    spare: Int[Tensor, "k"]
    """Equations to spare: neurons with a signal, less the outputs that a signal can be made of."""


@dataclass(frozen=True, eq=False)
class _Candidates:
    """Inputs with the signals that were observed for them."""

    inputs: Float[Tensor, "k n"]
    observed: Float[Tensor, "k m"]
    noise: Float[Tensor, "k"]
    """What noise and rounding change in the signal, over its norm."""


def labels_of(
    model: nn.Module, update: ClientUpdate, layer: Layer, result: Inversion, factors: Factors, *, uphill: bool = False
) -> Int[Tensor, "k"]:
    """The label of each recovered input, told by its gradient; -1 where none fits.

    With the right label the predicted signal lies in the column space of the layer's gradient. With a wrong one it does
    not: no other sample is needed to tell. Of two classes both do, and only the sign tells: the signal must point to
    where L q_i does, or away from it for an update that goes ``uphill``, as one with the weights before and after
    swapped.

    Raises:
        OptionError: if the model does not take the inputs, or is no classifier.
    """
    network = Network(model, update, layer)
    towards = _observed(factors, result) * (-1 if uphill else 1)
    found = []
    for rows in torch.arange(len(result.inputs)).split(network.rows_at_once):
        outputs, jacobian = network(result.inputs[rows])
        signals = _of_every_label(outputs, jacobian)
        left_over = torch.linalg.vector_norm(signals - (signals @ factors.left) @ factors.left.T, dim=2)
        share = left_over / torch.linalg.vector_norm(signals, dim=2).clamp_min(torch.finfo(signals.dtype).tiny)
        known = rows < len(towards)
        against = (signals[known] * towards[rows[known], None]).sum(2) <= 0
        share[known] = torch.where(against, torch.inf, share[known])
        found.append(share)
    shares, labels = torch.cat(found).sort(dim=1)
    sure = (shares[:, 0] <= FITS) & (shares[:, 1] >= (MARGIN * shares[:, 0]).clamp_min(TOLD))
    return torch.where(sure, labels[:, 0], -1)


def replay_alone(
    model: nn.Module, update: ClientUpdate, layer: Layer, result: Inversion, factors: Factors
) -> Signals | None:
    """Replay every input that has a direction by itself; None if there is none, or no bias to know its size by.

    The loss is taken for cross-entropy; if that explains no input, for binary cross-entropy of every output.

    Raises:
        OptionError: if the model does not take the inputs, or is no classifier.
    """
    if not len(result.directions) or not result.scale_known:
        return None
    network = Network(model, update, layer)
    wrong = result.inputs[~result.fits][:DIRECTIONS].double()
    inputs = result.inputs[: len(result.directions)].double()
    directions = result.directions.to(factors.left)
    noise = torch.linalg.vector_norm(factors.row_noise) * torch.linalg.vector_norm(
        directions / factors.singular_values, dim=1
    )
    epsilon = max(torch.finfo(each.dtype).eps for each in (update.gradients[layer.weight], result.inputs))
    candidates = _Candidates(inputs, _observed(factors, result), noise.clamp_min(ROUNDING * epsilon))
    plain = _fit(network, candidates, wrong, binary=False)
    if not bool((plain.mismatch <= UNFIT).any()):
        binary = _fit(network, candidates, wrong, binary=True)
        if bool((binary.mismatch <= UNFIT).any()):
            return _moved_within_rounding(network, candidates, wrong, binary, binary=True)
    return _moved_within_rounding(network, candidates, wrong, plain, binary=False)


class Network:
    """The part of a model behind a Linear layer, linearised at inputs."""

    def __init__(self, model: nn.Module, update: ClientUpdate, layer: Layer) -> None:
        self.model = as_sent(model, update).double()
        self.layer, self.module = layer, self.model.get_submodule(module_name(self.model, layer))
        self.device = tensor_specs(update.gradients)[layer.weight].device
        self.rows_at_once = 64

    def outputs(self, inputs: Float[Tensor, "k n"]) -> Float[Tensor, "k classes"]:
        """The outputs alone."""
        return forward(self.model, inputs.to(self.device)).detach()

    def __call__(self, inputs: Float[Tensor, "k n"]) -> tuple[Float[Tensor, "k c"], Float[Tensor, "k c m"]]:
        """Outputs, and their Jacobian with respect to the pre-activations of the layer.

        Raises:
            OptionError: if the layer does not see one row for each sample.
        """
        caught: list[Tensor] = []

        def catch(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
            caught.append(output)
            return output.clone()  # a ReLU in place would change what was caught

        handle = self.module.register_forward_hook(catch)
        try:
            outputs = forward(self.model, inputs.to(self.device))
        finally:
            handle.remove()
        if len(caught) != 1 or caught[0].shape != (len(inputs), self.layer.neurons):
            raise OptionError("the layer does not see one row for each sample: it cannot be replayed alone")
        rows = [
            torch.autograd.grad(outputs[:, column].sum(), caught[0], retain_graph=True)[0]
            for column in range(outputs.shape[1])
        ]
        jacobian = torch.stack(rows, dim=1)
        self.rows_at_once = chunk_size(jacobian.device, 24 * jacobian[0].numel())
        return outputs.detach(), jacobian


def _observed(factors: Factors, result: Inversion) -> Float[Tensor, "found m"]:
    """d_i = L q_i / (q_i·p_i) for every input whose direction was found."""
    found = result.directions.to(factors.left)
    inputs = result.inputs[: len(found)].to(factors.left)
    if factors.right.shape[1] > inputs.shape[1]:
        inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
    points = inputs @ factors.right.T / factors.singular_values.square()
    product = (points * found).sum(1, keepdim=True)
    return (found / torch.where(product == 0, 1.0, product)) @ factors.left.T


def _of_every_label(outputs: Float[Tensor, "k c"], jacobian: Float[Tensor, "k c m"]) -> Float[Tensor, "k c m"]:
    """Jᵀ (softmax(o) - e_y) for every label y."""
    return torch.einsum("kc,kcm->km", outputs.softmax(1), jacobian)[:, None] - jacobian


def _fit(network: Network, candidates: _Candidates, wrong: Float[Tensor, "w n"], binary: bool) -> Signals:
    """The signals of one loss: cross-entropy, or binary cross-entropy of every output."""
    parts = []
    for rows in torch.arange(len(candidates.noise)).split(network.rows_at_once):
        some = select_rows(candidates, rows)
        outputs, jacobian = network(some.inputs)
        labels, residual = _best_label(outputs, jacobian, some.observed, binary)
        signal = torch.einsum("kc,kcm->km", residual, jacobian)
        size = torch.linalg.vector_norm(signal, dim=1).clamp_min(torch.finfo(signal.dtype).tiny)
        weight = (some.observed * signal).sum(1) / size.square()
        left_over = torch.linalg.vector_norm(some.observed - weight[:, None] * signal, dim=1)
        mismatch = left_over / torch.linalg.vector_norm(some.observed, dim=1).clamp_min(torch.finfo(size.dtype).tiny)
        towards = _towards(candidates.inputs, rows, wrong)
        slope, bend = _derivatives(network, some.inputs, towards, outputs, jacobian, signal / size[:, None], binary)
        spare = (signal != 0).sum(1) - outputs.shape[1]
        parts.append(
            Signals(
                labels=labels,
                mismatch=torch.where(weight > 0, mismatch, torch.inf),
                noise=some.noise,
                weight=weight,
                slope=slope / size[:, None],
                bend=bend / size[:, None],
                spare=spare.clamp_min(0),
            )
        )
    columns = {name: torch.cat([getattr(each, name) for each in parts]) for name in parts[0].__dataclass_fields__}
    return Signals(**columns)


def _best_label(
    outputs: Float[Tensor, "k c"], jacobian: Float[Tensor, "k c m"], observed: Float[Tensor, "k m"], binary: bool
) -> tuple[Int[Tensor, "k"], Float[Tensor, "k c"]]:
    """The label that explains an observed signal best, and dL/do for it."""
    if binary:  # dL/do = sigmoid(o) - t, so an output is a target where the signal pulls it up
        pulled = torch.linalg.lstsq(jacobian.mT, observed[:, :, None]).solution[:, :, 0]
        return torch.full_like(outputs[:, 0], -1).long(), outputs.sigmoid() - (pulled < 0).to(outputs)
    signals = _of_every_label(outputs, jacobian)
    size = torch.linalg.vector_norm(signals, dim=2).clamp_min(torch.finfo(signals.dtype).tiny)
    cosine = torch.einsum("kcm,km->kc", signals, observed) / size
    labels = cosine.argmax(1)
    return labels, outputs.softmax(1) - functional.one_hot(labels, outputs.shape[1])


def _towards(
    inputs: Float[Tensor, "all n"], rows: Int[Tensor, "k"], wrong: Float[Tensor, "w n"]
) -> tuple[list[Tensor], list[Tensor]]:
    """Directions in which the inputs of these rows may be off: certain ones, and examples of others.

    If q_k is wrong, every other input is off by a multiple of the wrong input x̂_k, because p_i is orthogonal to q_k.
    The others are differences to some inputs that fit; samples that could be merged differ in such ways.
    """
    at = inputs[rows]
    shifts = range(1, min(len(inputs), DIRECTIONS + 1))
    return [at, *(each - at for each in wrong)], [inputs[(rows + shift) % len(inputs)] - at for shift in shifts]


def _derivatives(
    network: Network,
    inputs: Float[Tensor, "k n"],
    towards: tuple[list[Tensor], list[Tensor]],
    outputs: Float[Tensor, "k c"],
    jacobian: Float[Tensor, "k c m"],
    unit: Float[Tensor, "k m"],
    binary: bool,
) -> tuple[Float[Tensor, "k 2"], Float[Tensor, "k 2"]]:
    """Slope and bend of the signal: the least slope in certain directions, or the median in the others if that is less.

    Merged samples do not differ towards a wrong input, so such directions do not count for the bend.
    Within one activation pattern outputs are linear in the input and J is constant, so only the softmax bends.
    """
    probability = torch.sigmoid if binary else (lambda o: o.softmax(1))
    size = torch.linalg.vector_norm(inputs, dim=1, keepdim=True)
    slopes: list[Tensor] = []
    bends: list[Tensor] = []
    for direction in [*towards[0], *towards[1]]:
        length = torch.linalg.vector_norm(direction, dim=1, keepdim=True)
        direction = direction * size / length.clamp_min(1e-300)
        ahead, behind = (network.outputs(inputs + sign * STEP * direction) for sign in (1, -1))
        moved = (ahead - behind) / (2 * STEP)
        small = 1e-2 / torch.linalg.vector_norm(moved, dim=1, keepdim=True).clamp_min(1e-300)
        plus, minus, here = (probability(outputs + sign * small * moved) for sign in (1, -1, 0))
        first = torch.einsum("kc,kcm->km", (plus - minus) / (2 * small), jacobian)
        second = torch.einsum("kc,kcm->km", (plus + minus - 2 * here) / (2 * small.square()), jacobian)
        for derivative, kept in ((first, slopes), (second, bends)):
            across = derivative - (derivative * unit).sum(1, keepdim=True) * unit
            sizes = torch.stack([torch.linalg.vector_norm(each, dim=1) for each in (across, derivative)], dim=1)
            kept.append(torch.where(length > 0, sizes, torch.inf))  # a wrong input has no direction towards itself
    certain = len(towards[0])
    least = torch.stack(slopes[:certain]).amin(0)
    if towards[1]:
        least = torch.minimum(least, torch.stack(slopes[certain:]).median(0).values)
    return least, torch.stack([bends[0], *bends[certain:]]).amin(0)


def _moved_within_rounding(
    network: Network, candidates: _Candidates, wrong: Float[Tensor, "w n"], best: Signals, binary: bool
) -> Signals:
    """Fit what does not fit again at inputs that are moved within rounding: any neuron may be exactly at zero."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(TRIES):
        rows = torch.nonzero((best.mismatch > UNFIT) & (best.mismatch < 0.5))[:, 0]
        if not len(rows):
            return best
        some = select_rows(candidates, rows)
        turn = torch.randn(some.inputs.shape, generator=generator, dtype=some.inputs.dtype).to(some.inputs)
        size = torch.linalg.vector_norm(some.inputs, dim=1, keepdim=True) / some.inputs.shape[1] ** 0.5
        shifted = replace(some, inputs=some.inputs + torch.finfo(torch.float32).eps * 8 * size * turn)
        again = _fit(network, shifted, wrong, binary)
        better = again.mismatch < best.mismatch[rows]
        best = replace_rows(best, rows[better], select_rows(again, better))
    return best
