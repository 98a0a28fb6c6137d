"""Proof without ground truth: labels from the recovered inputs, and the whole update computed again."""

import copy
from dataclasses import dataclass

import torch
from torch import nn

from spearpp.errors import OptionError
from spearpp.layers import Layer
from spearpp.lowrank import decompose
from spearpp.observation import observe
from spearpp.result import Inversion
from spearpp.shapes import Float, Int, Tensor
from spearpp.update import ClientUpdate
from spearpp.update.names import plain

CLASSES = 1000
"""Outputs up to which every label is tried."""
FITS = 0.1
"""Share of a gradient outside the update's span up to which its label fits."""
APART = 3.0
"""How much farther outside the next best label must be."""


@dataclass(frozen=True)
class Replay:
    """The gradient of the recovered batch, against the update."""

    difference: float
    """‖update - scale · replay‖ / ‖update‖ over all parameters sent."""
    scale: float
    """The factor that fits best: 1 for the gradient of a mean; else the client's lr, steps or reduction was another."""
    by_parameter: dict[str, float]
    """The same difference for each parameter."""


def labels_of(model: nn.Module, update: ClientUpdate, layer: Layer, result: Inversion) -> Int[Tensor, "k"]:
    """The label of each recovered input, told by its gradient; -1 where none fits.

    With the right label y, dL/dz of input i is a column of D, so it lies in the column space of the layer's
    gradient. With a wrong one it does not: no other sample is needed to tell.

    Raises:
        OptionError: if the model does not take the inputs, or is no classifier.
    """
    weights, device = _as_sent(model, update), update.gradients[layer.weight].device
    module = weights.get_submodule(_module_name(weights, layer))
    inputs = result.inputs.to(device)
    caught: list[Tensor] = []
    handle = module.register_forward_hook(lambda _module, _inputs, output: caught.append(output))
    try:
        outputs = _forward(weights, inputs)
    finally:
        handle.remove()
    if len(caught) != 1:
        raise OptionError("the layer is used more than once: labels cannot be told")
    span = decompose(observe(*update.layer(layer.weight, layer.bias)), result.batch_size).left
    outside = []
    for label in range(outputs.shape[1]):
        loss = nn.functional.cross_entropy(outputs, torch.full_like(outputs[:, 0], label).long(), reduction="sum")
        column = torch.autograd.grad(loss, caught[0], retain_graph=True)[0].double().flatten(1)
        left_over = torch.linalg.vector_norm(column - (column @ span) @ span.T, dim=1)
        size = torch.linalg.vector_norm(column, dim=1).clamp_min(torch.finfo(column.dtype).tiny)
        outside.append(left_over / size)
    shares, labels = torch.stack(outside, dim=1).sort(dim=1)
    sure = (shares[:, 0] <= FITS) & (shares[:, 1] >= APART * shares[:, 0])
    return torch.where(sure, labels[:, 0], -1)


def replay(model: nn.Module, update: ClientUpdate, inputs: Float[Tensor, "b n"], labels: Int[Tensor, "b"]) -> Replay:
    """Compute the update again, as one gradient of the mean cross-entropy, and compare.

    Raises:
        OptionError: if the model does not take the inputs.
    """
    weights = _as_sent(model, update)
    device = next(iter(update.gradients.values())).device
    named = {plain(name): each for name, each in weights.named_parameters() if plain(name) in update.gradients}
    loss = nn.functional.cross_entropy(_forward(weights, inputs.to(device)), labels.to(device))
    again = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    pairs = {
        name: (update.gradients[name].double(), torch.zeros_like(each).double() if g is None else g.double())
        for (name, each), g in zip(named.items(), again, strict=True)
    }
    across = sum(float((seen * made).sum()) for seen, made in pairs.values())
    own = sum(float(made.square().sum()) for _, made in pairs.values())
    scale = across / own if own > 0 else 0.0
    apart = {name: float(torch.linalg.norm(seen - scale * made)) for name, (seen, made) in pairs.items()}
    size = {name: float(torch.linalg.norm(seen)) for name, (seen, _) in pairs.items()}
    whole = sum(each**2 for each in size.values()) ** 0.5
    return Replay(
        difference=sum(each**2 for each in apart.values()) ** 0.5 / max(whole, 1e-300),
        scale=scale,
        by_parameter={name: apart[name] / max(size[name], 1e-300) for name in pairs},
    )


def _as_sent(model: nn.Module, update: ClientUpdate) -> nn.Module:
    """A copy of the model with the weights that the client had."""
    weights = copy.deepcopy(model).eval()
    device = next(iter(update.weights.values())).device
    weights.to(device)
    with torch.no_grad():
        for name, parameter in weights.named_parameters():
            parameter.requires_grad_(True)
            if plain(name) in update.weights:
                parameter.copy_(update.weights[plain(name)])
    return weights


def _module_name(model: nn.Module, layer: Layer) -> str:
    wanted = layer.weight.removesuffix("weight").rstrip(".")
    return next(name for name, _ in model.named_modules() if plain(f"{name}." if name else "").rstrip(".") == wanted)


def _forward(model: nn.Module, inputs: Float[Tensor, "k n"]) -> Float[Tensor, "k classes"]:
    try:
        outputs = model(inputs.to(next(model.parameters()).dtype))
    except Exception as error:  # forward is the user's code
        raise OptionError(f"the model does not take flat inputs of shape {tuple(inputs.shape)}: {error}") from error
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or not 2 <= outputs.shape[1] <= CLASSES:
        raise OptionError("the model is no classifier: its output is not (batch, classes)")
    return outputs
