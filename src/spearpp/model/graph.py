"""Layers of a model that can be traced: which operation uses whose output."""

from collections.abc import Iterable
from dataclasses import replace

from torch import fx, nn
from torch.nn import functional

from spearpp.model.layer import Layer, layer_of
from spearpp.model.operations import Behaviour, activations, is_dropout, is_linear, is_reshape, label, readers
from spearpp.update.names import plain


class Tracer(fx.Tracer):
    """Traces into every module except PyTorch's own; a Linear layer with a forward of its own is traced into too."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a call of the module is one operation."""
        del module_qualified_name
        return is_linear(m) or (m.__module__.startswith("torch.nn") and not isinstance(m, nn.Sequential))


def by_graph(model: nn.Module, graph: fx.Graph) -> Iterable[tuple[str, Layer]]:
    """Every Linear layer in use, by the name of its module or of its weight."""
    uses: dict[str, list[fx.Node]] = {}
    biases: dict[str, str | None] = {}
    for node in graph.nodes:
        if node.op == "call_module" and is_linear(model.get_submodule(str(node.target))):
            uses.setdefault(str(node.target), []).append(node)
        elif node.op == "call_function" and node.target is functional.linear:
            weight, bias = (_parameter(node, place, key) for place, key in ((1, "weight"), (2, "bias")))
            if weight is not None:
                uses.setdefault(weight, []).append(node)
                biases[weight] = bias
    several = sum(node.op == "placeholder" for node in graph.nodes) > 1
    for name, nodes in uses.items():
        direct = all(_from_input(model, node) for node in nodes)
        sees = ("one input of several" if several else "inputs") if direct else "features"
        layer = replace(layer_of(model, name, qualifies=False, reason="", bias=biases.get(name)), sees=sees)
        ways = [_activation(model, node, layer.neurons) for node in nodes]
        reason = next((why for found, why, _ in ways if found is None), None)
        if reason is not None:
            yield name, replace(layer, reason=reason)
            continue
        reason = ways[0][1] if len(nodes) == 1 else f"shared: used {len(nodes)} times, each time before a ReLU"
        found = ways[0][0]
        following, dropped = (None, False)
        if len(nodes) == 1 and found is not None:
            following, dropped = _next_linear(model, found, layer.neurons)
        shared = following is not None and len(uses.get(following, [])) > 1
        yield (
            name,
            replace(
                layer,
                qualifies=True,
                reason=reason,
                assumed=any(nearly for _, _, nearly in ways),
                dropout=dropped,
                next=plain(f"{following}.weight") if following is not None and not shared else None,
            ),
        )


def _parameter(node: fx.Node, place: int, key: str) -> str | None:
    """The name of a parameter that a function is called with."""
    given = node.args[place] if len(node.args) > place else node.kwargs.get(key)
    return str(given.target) if isinstance(given, fx.Node) and given.op == "get_attr" else None


def _activation(model: nn.Module, linear: fx.Node, width: int) -> tuple[fx.Node | None, str, bool]:
    """The node of the ReLU that takes a Linear layer's output, why it is one or why there is none, and if "nearly"."""
    if not readers(linear):
        return None, "its output is not used", False
    for each in activations(model, linear, width):
        words = label(model, each.node)
        if each.behaviour is Behaviour.RELU:
            named = "ReLU" if words.lower().rstrip("_") == "relu" else f"{words}, which acts as ReLU"
            return each.node, f"its output goes to {named}", False
        if each.behaviour is Behaviour.NEARLY_RELU:
            return each.node, f"its output goes to {words}, which is nearly ReLU: a certificate decides", True
    first = linear
    while len(readers(first)) == 1 and is_reshape(model, readers(first)[0]):
        first = readers(first)[0]
    users = readers(first)
    if len(users) > 1:
        return None, "its output goes several ways, not only to a ReLU", False
    if users and users[0].op == "output":
        return None, "its output is the model's: no ReLU follows", False
    return (
        None,
        f"its output goes to {label(model, users[0])}, not to ReLU" if users else "its output is not used",
        False,
    )


def _next_linear(model: nn.Module, relu: fx.Node, width: int) -> tuple[str | None, bool]:
    """The Linear layer that takes a ReLU's output and nothing else, and whether Dropout is between them."""
    node, dropped = relu, False
    for _ in range(16):
        users = readers(node)
        if any(is_dropout(model, user) for user in users):
            dropped = True
        if len(users) == 1 and users[0].op == "call_module":
            module = model.get_submodule(str(users[0].target))
            if is_linear(module):
                return (str(users[0].target) if module.in_features == width else None), dropped
        if len(users) != 1 or not (is_reshape(model, users[0]) or _drops(model, users[0])):
            return None, dropped
        node = users[0]
    return None, dropped


def _drops(model: nn.Module, node: fx.Node) -> bool:
    """Whether a node is Dropout, be it with probability zero."""
    if node.op == "call_module":
        return isinstance(model.get_submodule(str(node.target)), nn.Dropout | nn.AlphaDropout)
    return is_dropout(model, node)


def _from_input(model: nn.Module, node: fx.Node) -> bool:
    """Whether a layer takes the model's input, reshaped at most."""
    source = node.args[0] if node.args else next(iter(node.kwargs.values()), None)
    if not isinstance(source, fx.Node):
        return False
    return source.op == "placeholder" or (is_reshape(model, source) and _from_input(model, source))
