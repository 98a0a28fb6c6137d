"""Proof without ground truth: labels from the recovered inputs, and the whole update computed again."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from spearpp.errors import OptionError
from spearpp.layers import Layer
from spearpp.lowrank import Factors, decompose
from spearpp.observation import observe
from spearpp.result import Inversion
from spearpp.shapes import Float, Int, Tensor
from spearpp.update import ClientUpdate
from spearpp.update.lazy import blocks, heights, outlines
from spearpp.update.names import plain

CLASSES = 1000
"""Outputs up to which every label is tried."""
FITS = 0.6
"""Share of a gradient outside the update's span up to which its label fits: 1e-6 for exact inputs, up to 0.5 for
those that noise has moved by 7 %, and 0.7 to 0.9 for wrong labels."""
APART = 1.3
"""How much farther outside the next best label must be."""
TOLD = 0.01
"""Share outside from which on a label is told from the best: less may be rounding."""
PROVEN = 0.4
"""Difference up to which a replay proves that the inputs are the client's. Images of others with the right labels
gave 0.95 and more, raw pixels 0.65, and the mean image of the batch 0.56 (``docs/research.md``)."""
UNEQUAL = 1e-3
"""Difference from which on it is tried whether samples count unequally: clipping, class weights, several steps."""


@dataclass(frozen=True)
class Replay:
    """The gradient of the recovered batch, against the update."""

    difference: float
    """‖update - scale · replay‖ / ‖update‖ over all parameters sent."""
    scale: float
    """The factor that fits best: 1 for the gradient of a mean; else the client's lr, steps or reduction was another."""
    by_parameter: dict[str, float]
    """The same difference for each parameter."""
    weighted: bool = False
    """Whether samples had to count unequally, as clipping makes them."""

    @property
    def proves(self) -> bool:
        """Whether these inputs explain the whole update, which inputs of others do not."""
        return self.difference <= PROVEN


def labels_of(
    model: nn.Module, update: ClientUpdate, layer: Layer, result: Inversion, *, uphill: bool = False
) -> Int[Tensor, "k"]:
    """The label of each recovered input, told by its gradient; -1 where none fits.

    With the right label y, dL/dz of input i is a column of D, so it lies in the column space of the layer's
    gradient. With a wrong one it does not: no other sample is needed to tell. Of two classes both do, and only
    the sign tells: the gradient must point to where L q_i does, or away from it for an update that goes ``uphill``,
    as one with the weights before and after swapped.

    Raises:
        OptionError: if the model does not take the inputs, or is no classifier.
    """
    weights, device = as_sent(model, update), outlines(update.gradients)[layer.weight].device
    module = weights.get_submodule(_module_name(weights, layer))
    inputs = result.inputs.to(device)
    caught: list[Tensor] = []

    def catch(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        caught.append(output)
        return output.clone()  # a ReLU in place would change what was caught

    handle = module.register_forward_hook(catch)
    try:
        outputs = forward(weights, inputs)
    finally:
        handle.remove()
    if len(caught) != 1 or caught[0].shape != (len(inputs), layer.neurons):
        raise OptionError("the layer does not see one row for each sample: labels cannot be told")
    factors = decompose(observe(*update.layer(layer.weight, layer.bias)), result.batch_size)
    span, towards = factors.left, _columns(factors, result) * (-1 if uphill else 1)
    outside = []
    for label in range(outputs.shape[1]):
        loss = nn.functional.cross_entropy(outputs, torch.full_like(outputs[:, 0], label).long(), reduction="sum")
        column = torch.autograd.grad(loss, caught[0], retain_graph=True)[0].double().flatten(1)
        left_over = torch.linalg.vector_norm(column - (column @ span) @ span.T, dim=1)
        size = torch.linalg.vector_norm(column, dim=1).clamp_min(torch.finfo(column.dtype).tiny)
        against = (column[: len(towards)] * towards).sum(1) <= 0
        share = left_over / size
        share[: len(towards)][against] = torch.inf
        outside.append(share)
    shares, labels = torch.stack(outside, dim=1).sort(dim=1)
    sure = (shares[:, 0] <= FITS) & (shares[:, 1] >= (APART * shares[:, 0]).clamp_min(TOLD))
    return torch.where(sure, labels[:, 0], -1)


def _columns(factors: Factors, result: Inversion) -> Float[Tensor, "found m"]:
    """L q_i, up to a positive factor, for every input whose direction was found: q_i·p_i is positive."""
    found = result.directions.to(factors.left)
    inputs = result.inputs[: len(found)].to(factors.left)
    if factors.right.shape[1] > inputs.shape[1]:
        inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
    points = inputs @ factors.right.T / factors.singular_values.square()
    sign = (points * found).sum(1).sign()
    return (sign[:, None] * found) @ factors.left.T


def replay(model: nn.Module, update: ClientUpdate, inputs: Float[Tensor, "b n"], labels: Int[Tensor, "b"]) -> Replay:
    """Compute the update again, as one gradient of the mean cross-entropy, and compare.

    Where that leaves a difference, the samples may count unequally (clipping). How much each counts follows from
    the gradients of the biases alone, which are few: least squares over as many unknowns as samples.

    Raises:
        OptionError: if the model does not take the inputs.
    """
    weights = as_sent(model, update)
    device = next(iter(outlines(update.gradients).values())).device
    named = {plain(name): each for name, each in weights.named_parameters() if plain(name) in update.gradients}
    outputs = forward(weights, inputs.to(device))
    losses = nn.functional.cross_entropy(outputs, labels.to(device), reduction="none")
    plainly = _compare(update, named, losses.mean())
    if plainly.difference <= UNEQUAL:
        return plainly
    counts = _counts(update, named, losses)
    if counts is None or float(counts.min()) < -0.1 * float(counts.max()):  # no sample counts against its own loss
        return plainly
    weighted = _compare(update, named, (counts * losses).mean())
    return replace(weighted, weighted=True) if weighted.difference < plainly.difference else plainly


def _counts(update: ClientUpdate, named: dict[str, nn.Parameter], losses: Float[Tensor, "b"]) -> Tensor | None:
    """How much each sample counts, from the gradients of the biases; None if these are too few to tell."""
    biases = {name: each for name, each in named.items() if each.ndim == 1}
    if sum(each.numel() for each in biases.values()) < 2 * len(losses):
        return None
    columns = []
    for loss in losses:
        parts = torch.autograd.grad(loss / len(losses), list(biases.values()), retain_graph=True, allow_unused=True)
        filled = zip(parts, biases.values(), strict=True)
        columns.append(torch.cat([torch.zeros_like(each) if part is None else part for part, each in filled]))
    seen = torch.cat([update.gradients[name].to(losses) for name in biases])
    matrix = torch.stack(columns, dim=1).double()
    return torch.linalg.lstsq(matrix.cpu(), seen.double().cpu()[:, None]).solution[:, 0].to(losses)


def _compare(update: ClientUpdate, named: dict[str, nn.Parameter], loss: Tensor) -> Replay:
    again = torch.autograd.grad(loss, list(named.values()), allow_unused=True, retain_graph=True)
    made = dict(zip(named, again, strict=True))
    across, own, size = 0.0, 0.0, dict.fromkeys(made, 0.0)
    for name, each in made.items():
        for seen, played in _pairs(update, name, each):
            across += float((seen * played).sum())
            own += float(played.square().sum())
            size[name] += float(seen.square().sum())
    scale = across / own if own > 0 else 0.0
    apart = dict.fromkeys(made, 0.0)
    for name, each in made.items():
        for seen, played in _pairs(update, name, each):
            apart[name] += float((seen - scale * played).square().sum())
    return Replay(
        difference=(sum(apart.values()) / max(sum(size.values()), 1e-300)) ** 0.5,
        scale=scale,
        by_parameter={name: (apart[name] / max(size[name], 1e-300)) ** 0.5 for name in made},
    )


def _pairs(update: ClientUpdate, name: str, made: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """A parameter's gradient as it was sent and as it was made again, in float64, some rows at a time."""
    parts = zip(heights(outlines(update.gradients)[name].shape), blocks(update.gradients, name), strict=True)
    for (start, stop), block in parts:
        seen = block.double()
        rows = None if made is None else made.reshape(len(made) if made.ndim else 1, -1)[start:stop]
        yield seen, torch.zeros_like(seen) if rows is None else rows.reshape(seen.shape).double()


def as_sent(model: nn.Module, update: ClientUpdate) -> nn.Module:
    """A copy of the model with the weights that the client had."""
    try:
        weights = copy.deepcopy(model).eval()
        weights.to(next(iter(outlines(update.weights).values())).device)
        with torch.no_grad():
            for name, parameter in weights.named_parameters():
                parameter.requires_grad_(True)
                if plain(name) in update.weights:
                    parameter.copy_(update.weights[plain(name)])
    except RuntimeError as error:
        raise OptionError(f"the model cannot be copied with the weights that were sent: {error}") from error
    return weights


def _module_name(model: nn.Module, layer: Layer) -> str:
    wanted = layer.weight.removesuffix("weight").rstrip(".")
    return next(name for name, _ in model.named_modules() if plain(f"{name}." if name else "").rstrip(".") == wanted)


def forward(model: nn.Module, inputs: Float[Tensor, "k n"]) -> Float[Tensor, "k classes"]:
    """The outputs of a classifier.

    Raises:
        OptionError: if the model does not take the inputs, or is no classifier.
    """
    try:
        outputs = model(inputs.to(next(model.parameters()).dtype))
    except Exception as error:  # forward is the user's code
        raise OptionError(f"the model does not take flat inputs of shape {tuple(inputs.shape)}: {error}") from error
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or not 2 <= outputs.shape[1] <= CLASSES:
        raise OptionError("the model is no classifier: its output is not (batch, classes)")
    if len(outputs) != len(inputs) or not outputs.requires_grad:
        raise OptionError("the model's output has no gradient, or not one row for each sample")
    return outputs
