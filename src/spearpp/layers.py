"""Which layers of a model the attack is about: Linear, then ReLU, and what comes next.

A model is traced with ``torch.fx``, which runs its ``forward`` on symbols and needs no input. Where that
fails (control flow on values), layers are taken in the order of their definition, and said to be assumed:
a certificate holds only if the ReLU is there, so a wrong guess finds nothing and claims nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import fx, nn
from torch.nn import functional

from spearpp.errors import DataError, ShapeError
from spearpp.shapes import Tensor
from spearpp.update import ClientUpdate
from spearpp.update.names import plain

RESHAPING = {
    "flatten",
    "view",
    "reshape",
    "contiguous",
    "unsqueeze",
    "squeeze",
    "float",
    "double",
    "to",
    "detach",
    "clone",
}
PASSING = (nn.Flatten, nn.Identity, nn.Unflatten)
NEARLY = (nn.ReLU6, nn.Hardtanh)
"""Activations that are ReLU but for large values; a certificate decides."""
DROPPING = (nn.Dropout, nn.AlphaDropout)
RELU_FUNCTIONS = {functional.relu, torch.relu, torch.relu_, functional.relu_}
DROPPING_FUNCTIONS = {functional.dropout}


@dataclass(frozen=True)
class Layer:
    """A Linear layer of the model and what the audit can do with it."""

    name: str
    """The module's name; of a checkpoint, the weight's without ``.weight``."""
    weight: str
    bias: str | None
    neurons: int
    features: int
    qualifies: bool
    reason: str
    """Why it qualifies, or why not, in words."""
    sees: str = "features"
    """What its inputs are: "inputs" of the model itself, "one input of several", or "features" that earlier layers
    computed."""
    next: str | None = None
    """The weight of the Linear layer that takes its ReLU and nothing else."""
    assumed: bool = False
    """The ReLU was not seen, only guessed; a certificate proves it."""


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
        found = _of_checkpoint(update)
    else:
        model = _unwrapped(model)
        own = {plain(name): each.shape for name, each in model.named_parameters()}
        if not own.keys() & update.weights.keys():
            raise DataError("the model has none of the update's parameters: is it another model?")
        for name in own.keys() & update.weights.keys():
            if own[name] != update.weights[name].shape:
                seen = f"{tuple(update.weights[name].shape)}, in the model {tuple(own[name])}"
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
    if not bool(update.gradients[layer.weight].any()):
        return replace(layer, qualifies=False, reason="its gradient is zero: frozen, or no sample fires a neuron")
    known = layer.next if layer.next in update.gradients else None
    return replace(layer, next=known)


def _of_checkpoint(update: ClientUpdate) -> list[Layer]:
    matrices = [name for name, weight in update.weights.items() if weight.ndim == 2]
    layers = []
    for index, name in enumerate(matrices):
        weight = update.weights[name]
        stem = name.removesuffix("weight")
        bias = f"{stem}bias" if name.endswith("weight") else _following(update.weights, name)
        fits = bias in update.weights and update.weights[bias].shape == weight.shape[:1] if bias else False
        after = matrices[index + 1] if index + 1 < len(matrices) else None
        takes = after is not None and update.weights[after].shape[1] == weight.shape[0]
        layers.append(
            Layer(
                name=stem.rstrip(".") or name,
                weight=name,
                bias=bias if fits else None,
                neurons=weight.shape[0],
                features=weight.shape[1],
                qualifies=after is not None,
                reason="taken for Linear and ReLU: without a model only a certificate can tell"
                if after is not None
                else "the last matrix of the checkpoint: an output layer, no ReLU follows",
                sees="inputs" if index == 0 and next(iter(update.weights)) == name else "features",
                next=after if takes else None,
                assumed=True,
            )
        )
    return layers


def _following(weights: dict[str, Tensor], name: str) -> str | None:
    """The name after this one, as a list in parameter order has the bias after the weight."""
    names = list(weights)
    index = names.index(name) + 1
    return names[index] if index < len(names) and weights[names[index]].ndim == 1 else None


def _of_model(model: nn.Module) -> list[Layer]:
    found: dict[str, Layer] = {}
    try:
        graph = _Tracer().trace(model)
    except Exception:  # forward is the user's code and may fail on symbols in any way
        found = dict(_by_definition(model))
    else:
        found = dict(_by_graph(model, graph))
    found |= dict(_in_transformers(model))
    attention = [name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name in names:
        if any(name.startswith(f"{outer}." if outer else "") for outer in attention):
            found[name] = _layer(model, name, qualifies=False, reason="it is part of an attention: no ReLU follows")
    unused = "it was not seen in use when the model was traced"
    names += [name for name in found if name not in names]
    return [found.get(name) or _layer(model, name, qualifies=False, reason=unused) for name in names]


class _Tracer(fx.Tracer):
    """Looks into every module with children but PyTorch's own attention and recurrent ones."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        del module_qualified_name
        return isinstance(m, nn.Linear) or (m.__module__.startswith("torch.nn") and not isinstance(m, nn.Sequential))


def _layer(
    model: nn.Module, name: str, *, qualifies: bool, reason: str, assumed: bool = False, bias: str | None = None
) -> Layer:
    """A Linear module by its name, or a weight that ``functional.linear`` is called with."""
    module = dict(model.named_modules()).get(name)
    if not isinstance(module, nn.Linear):
        neurons, features = model.get_parameter(name).shape
        own, weight = plain(name).removesuffix(".weight"), plain(name)
        return Layer(own, weight, None if bias is None else plain(bias), neurons, features, qualifies, reason)
    prefix = plain(f"{name}." if name else "")
    return Layer(
        name=plain(name) or "(the model itself)",
        weight=f"{prefix}weight",
        bias=None if module.bias is None else f"{prefix}bias",
        neurons=module.out_features,
        features=module.in_features,
        qualifies=qualifies,
        reason=reason,
        assumed=assumed,
    )


def _by_graph(model: nn.Module, graph: fx.Graph) -> Iterable[tuple[str, Layer]]:
    uses: dict[str, list[fx.Node]] = {}
    biases: dict[str, str | None] = {}
    for node in graph.nodes:
        if node.op == "call_module" and isinstance(model.get_submodule(str(node.target)), nn.Linear):
            uses.setdefault(str(node.target), []).append(node)
        elif node.op == "call_function" and node.target is functional.linear:
            weight, bias = (_parameter(node, place, key) for place, key in ((1, "weight"), (2, "bias")))
            if weight is not None:
                uses.setdefault(weight, []).append(node)
                biases[weight] = bias
    for name, nodes in uses.items():
        verdicts = [_fate(model, node) for node in nodes]
        relus = [relu for relu, _ in verdicts if relu is not None]
        if len(relus) < len(nodes):
            reason = next(why for relu, why in verdicts if relu is None)
            yield name, _layer(model, name, qualifies=False, reason=reason, bias=biases.get(name))
            continue
        reason = verdicts[0][1] if len(nodes) == 1 else f"shared: used {len(nodes)} times, each time before a ReLU"
        layer = _layer(model, name, qualifies=True, reason=reason, bias=biases.get(name))
        following = _next_linear(model, relus[0], layer.neurons) if len(nodes) == 1 else None
        shared = following is not None and len(uses.get(following, [])) > 1
        several = sum(node.op == "placeholder" for node in graph.nodes) > 1
        direct = all(_from_input(model, node) for node in nodes)
        sees = ("one input of several" if several else "inputs") if direct else "features"
        layer = replace(layer, assumed=any("nearly" in why for _, why in verdicts))
        weight = plain(f"{following}.weight") if following is not None and not shared else None
        yield name, replace(layer, sees=sees, next=weight)


def _parameter(node: fx.Node, place: int, key: str) -> str | None:
    """The name of a parameter that a function is called with."""
    given = node.args[place] if len(node.args) > place else node.kwargs.get(key)
    return str(given.target) if isinstance(given, fx.Node) and given.op == "get_attr" else None


def _kind(model: nn.Module, node: fx.Node) -> tuple[str, str]:
    """What a node does to values: "pass", "drop", "relu", "output" or "other"; and its name in words."""
    if node.op == "output":
        return "output", "the model's output"
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        label = type(module).__name__
        if isinstance(module, nn.ReLU) or (isinstance(module, nn.LeakyReLU) and module.negative_slope == 0):
            return "relu", label
        if isinstance(module, nn.Threshold) and module.threshold == module.value == 0:
            return "relu", label
        if isinstance(module, NEARLY) and module.min_val == 0:
            return "nearly", label
        if isinstance(module, DROPPING) and module.p == 0:
            return "pass", label
        return ("pass" if isinstance(module, PASSING) else "drop" if isinstance(module, DROPPING) else "other"), label
    label = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", str(node.target))
    if node.target in RELU_FUNCTIONS or (node.op == "call_method" and label in ("relu", "relu_")):
        return "relu", label
    if label in ("clamp", "clamp_", "clamp_min", "clamp_min_", "clip"):
        low, high = (*node.args[1:], None, None)[:2]
        low, high = node.kwargs.get("min", low), node.kwargs.get("max", high)
        return ("other" if low != 0 else "relu" if high is None else "nearly"), label
    if node.target in DROPPING_FUNCTIONS:
        return "drop", label
    return ("pass" if label in RESHAPING else "other"), label


def _readers(node: fx.Node) -> list[fx.Node]:
    """Those who take the values of a node, not only its shape."""
    shape = {"size", "dim", "numel"}
    return [
        user
        for user in node.users
        if not (user.op == "call_method" and user.target in shape)
        and not (user.op == "call_function" and user.target is getattr)
    ]


def _fate(model: nn.Module, node: fx.Node) -> tuple[fx.Node | None, str]:
    """The ReLU that takes a Linear layer's output, and nobody else; or why there is none."""
    readers = _readers(node)
    if len(readers) > 1:
        return None, "its output goes several ways, not only to a ReLU"
    if not readers:
        return None, "its output is not used"
    what, label = _kind(model, readers[0])
    if what == "relu":
        return readers[0], "its output goes to ReLU"
    if what == "nearly":
        return readers[0], f"its output goes to {label}, which is nearly ReLU: a certificate decides"
    if what == "pass":
        return _fate(model, readers[0])
    if what == "output":
        return None, "its output is the model's: no ReLU follows"
    return None, f"its output goes to {label}, not to ReLU"


def _next_linear(model: nn.Module, relu: fx.Node, width: int) -> str | None:
    """The Linear layer that takes a ReLU's output of so many neurons, if it is the only one to."""
    node = relu
    for _ in range(16):
        readers = _readers(node)
        if len(readers) == 1 and readers[0].op == "call_module":
            module = model.get_submodule(str(readers[0].target))
            if isinstance(module, nn.Linear):
                return str(readers[0].target) if module.in_features == width else None
        if len(readers) != 1 or _kind(model, readers[0])[0] not in ("pass", "drop"):
            return None
        node = readers[0]
    return None


def _from_input(model: nn.Module, node: fx.Node) -> bool:
    """Whether a layer takes the model's input, reshaped at most."""
    source = node.args[0] if node.args else next(iter(node.kwargs.values()), None)
    if not isinstance(source, fx.Node):
        return False
    return source.op == "placeholder" or (_kind(model, source)[0] == "pass" and _from_input(model, source))


def _in_transformers(model: nn.Module) -> Iterable[tuple[str, Layer]]:
    """The feed-forward blocks of PyTorch's own transformer layers, which cannot be traced."""
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            prefix = f"{name}." if name else ""
            activation = module.activation
            relu = isinstance(activation, nn.ReLU) or activation in RELU_FUNCTIONS
            label = getattr(activation, "__name__", type(activation).__name__)
            reason = (
                "its output goes to ReLU; every token counts as a sample" if relu else f"its output goes to {label}"
            )
            first = _layer(model, f"{prefix}linear1", qualifies=relu, reason=reason)
            yield f"{prefix}linear1", replace(first, next=plain(f"{prefix}linear2.weight") if relu else None)
            skip = "its output goes to a skip connection, not to ReLU"
            yield f"{prefix}linear2", _layer(model, f"{prefix}linear2", qualifies=False, reason=skip)


def _by_definition(model: nn.Module) -> Iterable[tuple[str, Layer]]:
    """Linear layers in the order of their definition, where the model cannot be traced."""
    leaves = [(name, module) for name, module in model.named_modules() if not list(module.children())]
    linear = [index for index, (_, module) in enumerate(leaves) if isinstance(module, nn.Linear)]
    for place, index in enumerate(linear):
        name, module = leaves[index]
        after = leaves[index + 1][1] if index + 1 < len(leaves) else None
        following = linear[place + 1] if place + 1 < len(linear) else None
        activation = after is not None and type(after).__module__ == "torch.nn.modules.activation"
        other = activation and not isinstance(after, nn.ReLU | nn.MultiheadAttention | nn.Softmax | nn.LogSoftmax)
        if following is None and not isinstance(after, nn.ReLU):
            reason = "the last Linear layer: no ReLU was seen after it"
            yield name, _layer(model, name, qualifies=False, reason=reason)
        elif other:
            reason = f"{type(after).__name__} is defined after it, not ReLU (not traced)"
            yield name, _layer(model, name, qualifies=False, reason=reason)
        else:
            reason = "assumed: the model cannot be traced; a certificate proves the ReLU"
            layer = _layer(model, name, qualifies=True, reason=reason, assumed=True)
            if index == 0:  # the first module of all
                layer = replace(layer, sees="inputs")
            if following is not None:
                taker = leaves[following][1]
                fits = getattr(taker, "in_features", None) == getattr(module, "out_features", None)
                layer = replace(layer, next=plain(f"{leaves[following][0]}.weight") if fits else None)
            yield name, layer
