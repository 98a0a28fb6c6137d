"""Replay of the whole update: a proof that does not need the original data.

A replay computes the gradient of the recovered inputs and labels, and compares the gradient with the update. A small
difference alone proves nothing. If all samples are similar, for example temperatures of neighbouring days, any of these
samples reproduces the update fairly well. For this reason the same update is also replayed with inputs that are wrong
in two ways: each input averaged with another input ("mixed"), and inputs whose columns are shuffled among the samples
("unrelated").
"""

import copy
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import nn

from spearpp.errors import OptionError
from spearpp.linalg.time_limit import OutOfTimeError, check_time
from spearpp.model import Layer
from spearpp.model.loss import Loss
from spearpp.types import Float, Int, Tensor
from spearpp.update import ClientUpdate
from spearpp.update.lazy import blocks, row_blocks, tensor_specs
from spearpp.update.names import plain

MAX_CLASSES = 1000
"""Largest number of outputs of a classifier. Every label is tried. A design choice: the number of ImageNet classes,
which bounds the memory of the Jacobian."""
PROOF_SHARE = 0.5
"""A replay is a proof if its difference is at most this share of the difference of mixed and of unrelated inputs. A
design choice: right inputs must reproduce the update at least twice as well as wrong inputs."""
REWEIGHTED_FROM = 1e-3
"""Difference above which the replay tries different weights for the samples (clipping, class weights, several steps). A
design choice: 1e-3 is far above the rounding of float32 and far below the difference of wrong inputs."""
CANCELLED = 1e-3
"""Relative squared difference up to which the difference is computed again, entry by entry. Derived: the expanded
square ‖a‖² - 2 a·b + ‖b‖² has a rounding error of about 1e-16 ‖a‖², so above 1e-3 at least 13 digits are right."""
MIN_SAMPLE_WEIGHT = -0.1
"""Smallest weight of a sample, relative to the largest weight. A smaller weight rejects the weights. A design choice:
no sample has a negative weight in its own loss, but noise can make a small weight negative."""


@dataclass(frozen=True)
class Replay:
    """Comparison between the gradient of the recovered batch and the update."""

    difference: float
    """‖update - scale · replay‖ / ‖update‖ over all parameters that were sent."""
    scale: float
    """The factor that fits best. 1 for the gradient of a mean loss. Other values mean another lr, another number of
    steps or another reduction of the loss."""
    by_parameter: dict[str, float]
    """The same difference for each parameter."""
    weighted: bool = False
    """Whether the samples have different weights, for example because of clipping."""
    mixed: float = 0.0
    """The difference with each input averaged with another input. 0 if there is only one input."""
    unrelated: float = 0.0
    """The difference with the columns of the inputs shuffled among the samples. Those of a single input are shuffled
    among each other."""
    kind: str = "gradients"
    """What the client sent: gradients, weights or deltas."""

    @property
    def baseline(self) -> float:
        """The smaller of the two differences of wrong inputs."""
        return min(self.mixed, self.unrelated)

    @property
    def proves(self) -> bool:
        """Whether the recovered inputs reproduce the update clearly better than wrong inputs."""
        return self.baseline > 0 and self.difference <= PROOF_SHARE * self.baseline

    @property
    def meaning(self) -> str:
        """What the difference means for this kind of update, and what unrelated data would leave.

        >>> Replay(2e-7, 1.0, {}, mixed=0.4, unrelated=0.6).meaning[:67]
        'Up to rounding, the recovered samples explain the whole update. Unr'
        """
        if self.difference <= REWEIGHTED_FROM:
            text = "Up to rounding, the recovered samples explain the whole update."
        elif self.kind == "gradients":
            text = (
                f"The recovered samples do not explain {self.difference:.1%} of the update. Possible reasons: noise, "
                "compression, another loss, or samples that are only approximately right."
            )
        else:
            text = (
                f"The replay computes one step, and {self.difference:.1%} of the update is not explained by it. If the "
                "client trained for several steps, this is expected even if every sample is right. Only the comparison "
                "with wrong samples shows whether they are."
            )
        if self.unrelated:
            text += f" Unrelated data would leave {self.unrelated:.0%} unexplained."
        if self.proves:
            times = f"{self.baseline / self.difference:.0f}" if self.difference > 1e-3 * self.baseline else "over 1,000"
            return f"{text} The recovered samples fit {times} times as well as the better of two wrong batches."
        if self.mixed and self.difference > REWEIGHTED_FROM:
            text += " Wrong samples fit nearly as well, so the replay alone does not prove that the samples are right."
        return text


def replay(
    model: nn.Module,
    update: ClientUpdate,
    inputs: Float[Tensor, "b n"],
    labels: Int[Tensor, "b"],
    loss: Loss = Loss.CROSS_ENTROPY,
) -> Replay:
    """Compute the gradient of the mean loss of a batch and compare the gradient with the update.

    If the difference is large, the samples may have different weights (clipping). The weights follow from the gradients
    of the biases by least squares, with one unknown per sample. Wrong inputs are replayed in the same way, for
    comparison.

    Raises:
        OptionError: if the model does not accept the inputs.
    """
    client = as_sent(model, update)
    device = next(iter(tensor_specs(update.gradients).values())).device
    inputs, labels = inputs.to(device), labels.to(device)

    def once(batch: Tensor, *, reweight: bool) -> Replay:
        return _compare_losses(update, client, loss.each(forward(client, batch), labels), reweight=reweight)

    right = replace(once(inputs, reweight=True), kind=update.kind)
    generator = torch.Generator().manual_seed(0)
    if len(inputs) < 2:
        other = inputs[:, torch.randperm(inputs.shape[1], generator=generator).to(device)]
        return replace(right, unrelated=once(other, reweight=False).difference)
    order = torch.stack([torch.randperm(len(inputs), generator=generator) for _ in range(inputs.shape[1])], dim=1)
    wrong = ((inputs + inputs.roll(1, 0)) / 2, inputs.gather(0, order.to(device)))
    mixed, unrelated = (once(each, reweight=right.weighted).difference for each in wrong)
    return replace(right, mixed=mixed, unrelated=unrelated)


def replay_all(
    model: nn.Module | None, update: ClientUpdate, batches: list[tuple[Tensor, Tensor]], loss: Loss | None
) -> Replay | None:
    """Replay the whole update with the first of several batches that the model accepts, or return None.

    Args:
        model: the network, or None.
        update: what the client sent.
        batches: inputs and labels of whole batches.
        loss: the loss of the client; None if it is unknown.
    """
    if model is None or loss is None:
        return None
    for inputs, labels in batches:
        with suppress(OptionError, OutOfTimeError):
            return replay(model, update, inputs, labels, loss)
    return None


def _compare_losses(update: ClientUpdate, client: nn.Module, losses: Float[Tensor, "b"], *, reweight: bool) -> Replay:
    """Compare the gradient of the mean loss with the update. ``reweight`` also tries different weights of samples."""
    named = {plain(name): each for name, each in client.named_parameters() if plain(name) in update.gradients}
    equal = _compare(update, named, losses.mean())
    if equal.difference <= REWEIGHTED_FROM or not reweight:
        return equal
    weights = _sample_weights(update, named, losses)
    if weights is None or float(weights.min()) < MIN_SAMPLE_WEIGHT * float(weights.max()):
        return equal
    weighted = _compare(update, named, (weights * losses).mean())
    return replace(weighted, weighted=True) if weighted.difference < equal.difference else equal


def _sample_weights(update: ClientUpdate, named: dict[str, nn.Parameter], losses: Float[Tensor, "b"]) -> Tensor | None:
    """Return the weight of each sample from the gradients of the biases, or None if there are too few biases."""
    biases = {name: each for name, each in named.items() if each.ndim == 1}
    if sum(each.numel() for each in biases.values()) < 2 * len(losses):
        return None
    columns = []
    for loss in losses:
        check_time()
        columns.append(torch.cat(_gradients(loss / len(losses), biases)))
    observed = torch.cat([update.gradients[name].to(losses) for name in biases])
    matrix = torch.stack(columns, dim=1).double()
    return torch.linalg.lstsq(matrix.cpu(), observed.double().cpu()[:, None]).solution[:, 0].to(losses)


def _gradients(loss: Tensor, named: dict[str, nn.Parameter]) -> tuple[Tensor, ...]:
    """Return the gradient of each parameter, which is zero for a parameter that the loss does not depend on."""
    return torch.autograd.grad(loss, list(named.values()), retain_graph=True, materialize_grads=True)


def _compare(update: ClientUpdate, named: dict[str, nn.Parameter], loss: Tensor) -> Replay:
    """Compare the gradient of a loss with the update, parameter by parameter."""
    computed = dict(zip(named, _gradients(loss, named), strict=True))
    product, computed_square, sent_square = (dict.fromkeys(computed, 0.0) for _ in range(3))
    for name, gradient in computed.items():
        for sent, replayed in _row_pairs(update, name, gradient):
            product[name] += float((sent * replayed).sum())
            computed_square[name] += float(replayed.square().sum())
            sent_square[name] += float(sent.square().sum())
    total = sum(computed_square.values())
    scale = sum(product.values()) / total if total > 0 else 0.0
    squares = {
        name: max(0.0, sent_square[name] - 2 * scale * product[name] + scale**2 * computed_square[name])
        for name in computed
    }
    if sum(squares.values()) <= CANCELLED * sum(sent_square.values()):
        squares = {
            name: sum(float((sent - scale * new).square().sum()) for sent, new in _row_pairs(update, name, gradient))
            for name, gradient in computed.items()
        }
    return Replay(
        difference=(sum(squares.values()) / max(sum(sent_square.values()), 1e-300)) ** 0.5,
        scale=scale,
        by_parameter={name: (squares[name] / max(sent_square[name], 1e-300)) ** 0.5 for name in computed},
    )


def _row_pairs(update: ClientUpdate, name: str, computed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield blocks of rows of one parameter's gradient in float64: as sent, and as computed by the replay."""
    rows = computed.reshape(len(computed) if computed.ndim else 1, -1)
    parts = zip(row_blocks(tensor_specs(update.gradients)[name].shape), blocks(update.gradients, name), strict=True)
    for (start, stop), block in parts:
        yield block.double(), rows[start:stop].reshape(block.shape).double()


def as_sent(model: nn.Module, update: ClientUpdate) -> nn.Module:
    """Return a copy of the model, in evaluation mode, with the weights that the client started from.

    Raises:
        OptionError: if the model cannot be copied or the weights do not fit.
    """
    try:
        client = copy.deepcopy(model).eval()
        client.to(next(iter(tensor_specs(update.weights).values())).device)
        with torch.no_grad():
            for name, parameter in client.named_parameters():
                parameter.requires_grad_(True)
                if plain(name) in update.weights:
                    parameter.copy_(update.weights[plain(name)])
    except RuntimeError as error:
        raise OptionError(f"the model cannot be copied with the weights of the update: {error}") from error
    return client


def module_name(model: nn.Module, layer: Layer) -> str:
    """Return the name of a layer's module in a model that may be wrapped."""
    wanted = layer.weight.removesuffix("weight").rstrip(".")
    return next(name for name, _ in model.named_modules() if plain(f"{name}." if name else "").rstrip(".") == wanted)


def forward(model: nn.Module, inputs: Float[Tensor, "k n"]) -> Float[Tensor, "k classes"]:
    """Return the outputs of a classifier.

    Raises:
        OptionError: if the model does not accept the inputs or is not a classifier.
        OutOfTimeError: if the time limit of the caller has passed.
    """
    check_time()
    try:
        outputs = model(inputs.to(next(model.parameters()).dtype))
    except Exception as error:  # the forward method is user code and may raise anything
        raise OptionError(f"the model does not accept flat inputs of shape {tuple(inputs.shape)}: {error}") from error
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or not 2 <= outputs.shape[1] <= MAX_CLASSES:
        shape = f"the output must have the shape (batch, classes), with 2 to {MAX_CLASSES} classes"
        raise OptionError(f"the model is not a classifier: {shape}")
    if len(outputs) != len(inputs) or not outputs.requires_grad:
        raise OptionError("the output of the model has no gradient, or does not have one row per sample")
    return outputs
