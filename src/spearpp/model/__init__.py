"""Which layers of a model the attack is about: Linear, then ReLU, and what comes next.

A model is traced with ``torch.fx``, which runs its ``forward`` on symbols and needs no input. Where that
fails (control flow on values), layers are taken in the order of their definition, and said to be assumed:
a certificate holds only if the ReLU is there, so a wrong guess finds nothing and claims nothing.
"""

from dataclasses import replace

from torch import nn

from spearpp.errors import DataError, ShapeError
from spearpp.model.checkpoint import assumed_networks, of_checkpoint
from spearpp.model.definition import by_definition, in_transformers
from spearpp.model.graph import Tracer, by_graph
from spearpp.model.layer import Layer, layer_of
from spearpp.model.operations import is_linear
from spearpp.update import ClientUpdate
from spearpp.update.lazy import nonzero, tensor_specs
from spearpp.update.names import plain

__all__ = ["Layer", "assumed_networks", "find_layers"]


def find_layers(model: nn.Module | None, update: ClientUpdate) -> list[Layer]:
    """Every Linear layer of the model, or every weight of a checkpoint that may be one.

    Args:
        model: the network; None to go by the update alone, where each 2-D weight counts as a layer.
        update: what the client sent.

    Raises:
        DataError: if the model has other parameters than the update.

    >>> from torch import nn
    >>> from spearpp import simulate
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 3))
    >>> update = ClientUpdate.from_gradients(model, [w.clone() for w in model.parameters()])
    >>> for layer in find_layers(model, update): print(layer.name, layer.qualifies, layer.reason)
    0 True its output goes to ReLU
    2 False its output goes to GELU, not to ReLU
    4 False its output is the model's: no ReLU follows
    """
    if model is None:
        found = of_checkpoint(update)
    else:
        model = _unwrapped(model)
        own = {plain(name): each.shape for name, each in model.named_parameters()}
        sent = {name: each.shape for name, each in tensor_specs(update.weights).items()}
        if not own.keys() & sent.keys():
            raise DataError("the model has none of the update's parameters: is it another model?")
        for name in own.keys() & sent.keys():
            if own[name] != sent[name]:
                seen = f"{tuple(sent[name])}, in the model {tuple(own[name])}"
                raise ShapeError(f"{name} has shape {seen}: is it another model?")
        found = _of_model(model)
    return [_with_gradient(layer, update) for layer in found]


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of what Opacus, DataParallel and torch.compile put around it."""
    while True:
        children = dict(model.named_children())
        name = next(iter(children), "")
        if len(children) != 1 or name not in ("module", "_module", "_orig_mod"):
            return model
        model = children[name]


def _with_gradient(layer: Layer, update: ClientUpdate) -> Layer:
    """The same, disqualified if there is no gradient for it."""
    if not layer.qualifies:
        return layer
    if layer.weight not in update.weights:
        reason = "its weight is computed from other parameters, or is not in the update"
        return replace(layer, qualifies=False, reason=reason)
    missing = [name for name in (layer.weight, layer.bias) if name is not None and name not in update.gradients]
    if layer.weight in missing:
        return replace(layer, qualifies=False, reason="no gradient was sent for it: it is frozen or was left out")
    if missing:
        return replace(layer, qualifies=False, reason=f"its bias has no gradient ({layer.bias} was not sent)")
    if not nonzero(update.gradients, layer.weight):
        return replace(layer, qualifies=False, reason="its gradient is zero: frozen, or no sample fires a neuron")
    known = layer.next if layer.next in update.gradients else None
    return replace(layer, next=known)


def _of_model(model: nn.Module) -> list[Layer]:
    found: dict[str, Layer] = {}
    try:
        graph = Tracer().trace(model)
    except Exception:  # forward is the user's code and may fail on symbols in any way
        found = dict(by_definition(model))
    else:
        found = dict(by_graph(model, graph))
    found |= dict(in_transformers(model))
    attention = [name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name in names:
        if any(name.startswith(f"{outer}." if outer else "") for outer in attention):
            found[name] = layer_of(model, name, qualifies=False, reason="it is part of an attention: no ReLU follows")
    unused = "it was not seen in use when the model was traced"
    traced_into = {name for name in names if not is_linear(model.get_submodule(name)) and f"{name}.weight" in found}
    names = [name for name in names if name not in traced_into]
    names += [name for name in found if name not in names]
    return [found.get(name) or layer_of(model, name, qualifies=False, reason=unused) for name in names]
