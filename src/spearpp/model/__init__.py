"""Find the Linear layers of a model, and decide which of them an audit can invert.

A Linear layer qualifies in three cases: a ReLU follows it; a later Linear layer depends on its output alone, so that
the equations of the network can be solved (``spearpp.model.rest``); or it is the output layer, for which the loss gives
equations.

``torch.fx`` traces a model: it runs ``forward`` on symbolic values and needs no input. If tracing fails (for example
because control flow depends on values), the layers are assumed to run in the order of their definition. A wrong
assumption cannot lead to a wrong certificate. With two or more samples, a certificate holds only if the ReLU exists. A
single sample is certified whatever the activation is.
"""

from dataclasses import replace

from torch import nn

from spearpp.errors import CHECK_MODEL, DataError, OptionError, ShapeError
from spearpp.model.assumed import AssumedNetwork, assumed_networks
from spearpp.model.find import by_definition, by_graph, in_transformers, of_checkpoint
from spearpp.model.layer import Layer, Sees, layer_of
from spearpp.model.operations import Tracer, is_linear
from spearpp.update import ClientUpdate
from spearpp.update.lazy import nonzero, pick, tensor_specs
from spearpp.update.names import common_prefix, plain

__all__ = ["Layer", "Sees", "assumed_networks", "check_types", "find_layers", "named_as", "unwrapped"]


def check_types(update: object, model: object) -> None:
    """Check that an update is a ``ClientUpdate`` and that a model is a module or None.

    Raises:
        OptionError: if one of them has another type. The message says what to pass instead.
    """
    if not isinstance(update, ClientUpdate):
        how = "build one with spearpp.ClientUpdate.from_gradients, from_weights or load"
        raise OptionError(f"update is a {type(update).__name__}: expected a spearpp.ClientUpdate; {how}")
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise OptionError(f"model is the class {model.__name__}: expected a network, for example {model.__name__}()")
    if model is not None and not isinstance(model, nn.Module):
        how = "pass the network itself, not its weights or its name"
        raise OptionError(f"model is a {type(model).__name__}: expected a torch.nn.Module or None; {how}")


def named_as(update: ClientUpdate, model: nn.Module | None) -> ClientUpdate:
    """Return the update with the parameter names of a model.

    The names change only if the update and the model have no name in common. If the names are numbers ("0", "1", …), as
    those of lists and ``arr_0`` files are, they are replaced by position: in the order of the parameters, or in the
    order of the state dict if running statistics were sent too. Otherwise, a prefix that all names share is removed or
    added.

    Args:
        update: the client's update.
        model: the network, or None to return the update unchanged.

    Raises:
        DataError: if the names are numbers and the update has more or fewer tensors than the model has parameters.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> weights = [each.detach().numpy() for each in model.parameters()]
    >>> list(named_as(ClientUpdate.from_gradients(weights, weights), model).gradients)
    ['0.weight', '0.bias', '2.weight', '2.bias']
    """
    check_types(update, model)
    own = [] if model is None else [plain(name) for name, _ in model.named_parameters()]
    sent = list(update.weights)
    if model is None or set(own) & set(sent):
        return update
    if all(name.isdecimal() for name in sent):
        entries = [plain(name) for name, each in model.state_dict().items() if each.is_floating_point()]
        order = next((each for each in (own, entries) if len(each) == len(sent)), None)
        if order is None:
            why = f"the update holds {len(sent)} tensors without names, the model has {len(own)} parameters"
            raise DataError(why, hint="pass the model whose parameters these are, or omit --model")
        names = dict(zip(sorted(sent, key=int), order, strict=True))
    else:
        removed, added = common_prefix(own, sent), common_prefix(sent, own)
        names = {name: f"{added}{name.removeprefix(removed)}" for name in sent}
    if not set(names.values()) & set(own):
        return update
    return replace(
        update,
        weights=pick(update.weights, {new: old for old, new in names.items() if new in own}),
        gradients=pick(
            update.gradients, {new: old for old, new in names.items() if new in own and old in update.gradients}
        ),
    )


def find_layers(model: nn.Module | None, update: ClientUpdate) -> list[Layer]:
    """Return every Linear layer of a model. Each layer says whether the audit can invert it, and why.

    Args:
        model: the network. If it is None, every two-dimensional weight of the update counts as a Linear layer.
        update: the client's update.

    Returns:
        The layers, in the order of the model.

    Raises:
        OptionError: if an argument has another type.
        DataError: if the model and the update have no parameter in common. ``named_as`` adapts names of another style.
        ShapeError: if a parameter has different shapes in the model and in the update.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 3))
    >>> update = ClientUpdate.from_gradients(model, [w.clone() for w in model.parameters()])
    >>> for layer in find_layers(model, update): print(layer.name, layer.qualifies, layer.reason)
    0 True its output goes to ReLU
    2 True its output goes to GELU: the equations of the network are solved
    4 True its output is the model's output: the equations of cross-entropy are solved
    """
    check_types(update, model)
    if model is None:
        found = of_checkpoint(update)
    else:
        model = unwrapped(model)
        own = {plain(name): parameter.shape for name, parameter in model.named_parameters()}
        sent = {name: spec.shape for name, spec in tensor_specs(update.weights).items()}
        if not own.keys() & sent.keys():
            names = f"the update has {next(iter(sent))[:80]!r}, the model has {next(iter(own), 'none')[:80]!r}"
            why = f"the model has none of the update's parameters: is it another model? ({names}, ...)"
            raise DataError(why, hint=CHECK_MODEL)
        for name in own.keys() & sent.keys():
            if own[name] != sent[name]:
                shapes = f"shape {tuple(sent[name])} in the update and {tuple(own[name])} in the model"
                raise ShapeError(f"{name} has {shapes}: is it another model?", hint=CHECK_MODEL)
        found = _of_model(model)
        if isinstance(model, AssumedNetwork):
            found = [_assumed(layer) for layer in found]
    return [_check_gradient(layer, update) for layer in found]


def _assumed(layer: Layer) -> Layer:
    """Return a layer of a network whose activation function is an assumption."""
    if not layer.qualifies:
        return layer
    reason = layer.reason.replace("its output goes to", "its output is assumed to go to", 1)
    return replace(layer, assumed=True, reason=reason)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of the wrappers of Opacus, DataParallel and torch.compile."""
    while True:
        children = dict(model.named_children())
        name = next(iter(children), "")
        if len(children) != 1 or name not in ("module", "_module", "_orig_mod"):
            return model
        model = children[name]


def _check_gradient(layer: Layer, update: ClientUpdate) -> Layer:
    """Disqualify a layer without a gradient, and remove its next layer if the next layer has no gradient."""
    if not layer.qualifies:
        return layer
    reason = None
    if layer.weight not in update.weights:
        reason = "its weight is computed from other parameters, or is not in the update"
    elif layer.weight not in update.gradients:
        reason = "no gradient was sent for it: the layer is frozen or was left out"
    elif layer.bias is not None and layer.bias not in update.gradients:
        reason = f"its bias has no gradient ({layer.bias} was not sent)"
    elif not nonzero(update.gradients, layer.weight):
        reason = "its gradient is zero: the layer is frozen, or no sample activates a neuron"
    if reason is not None:
        return replace(layer, qualifies=False, reason=reason)
    return replace(layer, next=layer.next if layer.next in update.gradients else None)


def _of_model(model: nn.Module) -> list[Layer]:
    """Return every Linear layer of a model, before the update is considered."""
    try:
        graph = Tracer().trace(model)
    except Exception:  # forward is user code and may raise anything when it runs on symbols
        found = dict(by_definition(model))
    else:
        found = dict(by_graph(model, graph))
    found |= dict(in_transformers(model))
    attention = [name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name in names:
        if any(name.startswith(f"{outer}." if outer else "") for outer in attention):
            reason = "it is part of an attention layer, which mixes tokens"
            found[name] = layer_of(model, name, qualifies=False, reason=reason)
    traced_into = {name for name in names if not is_linear(model.get_submodule(name)) and f"{name}.weight" in found}
    names = [name for name in names if name not in traced_into]
    names += [name for name in found if name not in names]
    unused = "it was not used when the model was traced"
    return [found.get(name) or layer_of(model, name, qualifies=False, reason=unused) for name in names]
