"""Layers of a model that can be traced: who takes whose output."""

from collections.abc import Iterable
from dataclasses import replace

from torch import fx, nn
from torch.nn import functional

from spearpp.layers.layer import Layer, layer_of
from spearpp.layers.operations import kind_of
from spearpp.update.names import plain


class Tracer(fx.Tracer):
    """Looks into every module with children but PyTorch's own attention and recurrent ones."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a call of the module is one operation."""
        del module_qualified_name
        return isinstance(m, nn.Linear) or (m.__module__.startswith("torch.nn") and not isinstance(m, nn.Sequential))


def by_graph(model: nn.Module, graph: fx.Graph) -> Iterable[tuple[str, Layer]]:
    """Every Linear layer in use, by the name of its module or of its weight."""
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
            yield name, layer_of(model, name, qualifies=False, reason=reason, bias=biases.get(name))
            continue
        reason = verdicts[0][1] if len(nodes) == 1 else f"shared: used {len(nodes)} times, each time before a ReLU"
        layer = layer_of(model, name, qualifies=True, reason=reason, bias=biases.get(name))
        following = _next_linear(model, relus[0], layer.neurons) if len(nodes) == 1 else None
        shared = following is not None and len(uses.get(following, [])) > 1
        several = sum(node.op == "placeholder" for node in graph.nodes) > 1
        direct = all(_from_input(model, node) for node in nodes)
        sees = ("one input of several" if several else "inputs") if direct else "features"
        layer = replace(layer, assumed=any(kind_of(model, relu)[0] == "nearly" for relu in relus))
        weight = plain(f"{following}.weight") if following is not None and not shared else None
        yield name, replace(layer, sees=sees, next=weight)


def _parameter(node: fx.Node, place: int, key: str) -> str | None:
    """The name of a parameter that a function is called with."""
    given = node.args[place] if len(node.args) > place else node.kwargs.get(key)
    return str(given.target) if isinstance(given, fx.Node) and given.op == "get_attr" else None


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
    what, label = kind_of(model, readers[0])
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
        if len(readers) != 1 or kind_of(model, readers[0])[0] not in ("pass", "drop"):
            return None
        node = readers[0]
    return None


def _from_input(model: nn.Module, node: fx.Node) -> bool:
    """Whether a layer takes the model's input, reshaped at most."""
    source = node.args[0] if node.args else next(iter(node.kwargs.values()), None)
    if not isinstance(source, fx.Node):
        return False
    return source.op == "placeholder" or (kind_of(model, source)[0] == "pass" and _from_input(model, source))
