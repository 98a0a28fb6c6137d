"""Proof without ground truth: the whole update computed again from the recovered inputs and labels.

A small difference alone proves nothing: where all samples are alike, as temperatures of neighbouring days are, any of
them reproduces the update fairly well. So the same replay is done with inputs that are wrong in two ways, on this very
update: each input averaged with another one ("mixed"), and inputs whose columns are shuffled among the samples
("unrelated").
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from spearpp.errors import OptionError
from spearpp.model import Layer
from spearpp.types import Float, Int, Tensor
from spearpp.update import ClientUpdate
from spearpp.update.lazy import blocks, row_blocks, tensor_specs
from spearpp.update.names import plain

CLASSES = 1000
"""Outputs up to which every label is tried."""
PROVES = 0.5
"""A replay proves something if its difference is at most this share of what mixed and unrelated inputs leave."""
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
    mixed: float = 0.0
    """The difference that remains with each input averaged with another one; 0 if there is only one."""
    unrelated: float = 0.0
    """The difference that remains with the columns of the inputs shuffled among the samples; 0 if there is only one."""

    @property
    def baseline(self) -> float:
        """The difference that wrong inputs leave on this update."""
        return min(self.mixed, self.unrelated)

    @property
    def proves(self) -> bool:
        """Whether these inputs reproduce the update clearly better than wrong ones do."""
        return self.baseline > 0 and self.difference <= PROVES * self.baseline


def replay(model: nn.Module, update: ClientUpdate, inputs: Float[Tensor, "b n"], labels: Int[Tensor, "b"]) -> Replay:
    """Compute the update again, as one gradient of the mean cross-entropy, and compare.

    Where that leaves a difference, the samples may count unequally (clipping). How much each counts follows from
    the gradients of the biases alone, which are few: least squares over as many unknowns as samples. The same is done
    with wrong inputs, for comparison.

    Raises:
        OptionError: if the model does not take the inputs.
    """
    weights = as_sent(model, update)
    device = next(iter(tensor_specs(update.gradients).values())).device
    inputs, labels = inputs.to(device), labels.to(device)
    played = _played(weights, update, inputs, labels, unequal=True)
    if len(inputs) < 2:
        return played
    generator = torch.Generator().manual_seed(0)
    order = torch.stack([torch.randperm(len(inputs), generator=generator) for _ in range(inputs.shape[1])], dim=1)
    wrong = ((inputs + inputs.roll(1, 0)) / 2, inputs.gather(0, order.to(device)))
    compared = (_played(weights, update, each, labels, unequal=played.weighted) for each in wrong)
    mixed, unrelated = (each.difference for each in compared)
    return replace(played, mixed=mixed, unrelated=unrelated)


def _played(
    weights: nn.Module, update: ClientUpdate, inputs: Float[Tensor, "b n"], labels: Int[Tensor, "b"], *, unequal: bool
) -> Replay:
    """The replay of one batch, where ``unequal`` also with samples that count unequally."""
    named = {plain(name): each for name, each in weights.named_parameters() if plain(name) in update.gradients}
    outputs = forward(weights, inputs)
    losses = nn.functional.cross_entropy(outputs, labels, reduction="none")
    plainly = _compare(update, named, losses.mean())
    if plainly.difference <= UNEQUAL or not unequal:
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
    across, own, size = (dict.fromkeys(made, 0.0) for _ in range(3))
    for name, each in made.items():
        for seen, played in _pairs(update, name, each):
            across[name] += float((seen * played).sum())
            own[name] += float(played.square().sum())
            size[name] += float(seen.square().sum())
    scale = sum(across.values()) / sum(own.values()) if sum(own.values()) > 0 else 0.0
    apart = {name: max(0.0, size[name] - 2 * scale * across[name] + scale**2 * own[name]) for name in made}
    if sum(apart.values()) <= UNEQUAL * sum(
        size.values()
    ):  # the expanded square loses the digits of a small difference
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
    parts = zip(row_blocks(tensor_specs(update.gradients)[name].shape), blocks(update.gradients, name), strict=True)
    for (start, stop), block in parts:
        seen = block.double()
        rows = None if made is None else made.reshape(len(made) if made.ndim else 1, -1)[start:stop]
        yield seen, torch.zeros_like(seen) if rows is None else rows.reshape(seen.shape).double()


def as_sent(model: nn.Module, update: ClientUpdate) -> nn.Module:
    """A copy of the model with the weights that the client had."""
    try:
        weights = copy.deepcopy(model).eval()
        weights.to(next(iter(tensor_specs(update.weights).values())).device)
        with torch.no_grad():
            for name, parameter in weights.named_parameters():
                parameter.requires_grad_(True)
                if plain(name) in update.weights:
                    parameter.copy_(update.weights[plain(name)])
    except RuntimeError as error:
        raise OptionError(f"the model cannot be copied with the weights that were sent: {error}") from error
    return weights


def module_name(model: nn.Module, layer: Layer) -> str:
    """The name of a layer's module in a model that may be wrapped."""
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
