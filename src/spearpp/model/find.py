"""Find the Linear layers of a model: from the graph of its operations, or without tracing.

Without tracing, layers are found by the order of their definition, or inside PyTorch's transformer layers. Without a
model, every matrix of the update may be the weight of a Linear layer.
"""

from collections.abc import Iterable
from dataclasses import replace

from torch import fx, nn
from torch.nn import functional

from spearpp.model.layer import Layer, Sees, as_output, layer_of
from spearpp.model.operations import (
    DROPOUT,
    Behaviour,
    activations,
    behaviour,
    is_batch_norm,
    is_dropout,
    is_linear,
    is_reshape,
    label,
    module_of,
    readers,
)
from spearpp.model.rest import linear_names, nodes_after
from spearpp.update import ClientUpdate
from spearpp.update.lazy import TensorSpec, tensor_specs
from spearpp.update.names import plain


def by_graph(model: nn.Module, graph: fx.Graph) -> Iterable[tuple[str, Layer]]:
    """Yield every Linear layer that the graph uses.

    Args:
        model: the network.
        graph: the graph that ``Tracer`` returned for the network.

    Yields:
        The name of the module, or of the weight that ``functional.linear`` is called with; and the layer.
    """
    uses: dict[str, list[fx.Node]] = {}
    biases: dict[str, str | None] = {}
    for node in graph.nodes:
        if is_linear(module_of(model, node)):
            uses.setdefault(str(node.target), []).append(node)
        elif node.op == "call_function" and node.target is functional.linear:
            weight, bias = (_parameter(node, position, key) for position, key in ((1, "weight"), (2, "bias")))
            if weight is not None:
                uses.setdefault(weight, []).append(node)
                biases[weight] = bias
    several_inputs = sum(node.op == "placeholder" for node in graph.nodes) > 1
    for name, nodes in uses.items():
        sees = Sees.FEATURES
        if all(_from_input(model, node) for node in nodes):
            sees = Sees.ONE_INPUT if several_inputs else Sees.INPUTS
        layer = replace(layer_of(model, name, qualifies=False, reason="", bias=biases.get(name)), sees=sees)
        relus = [_relu_after(model, node, layer.neurons) for node in nodes]
        relu, reason, _ = next((each for each in relus if each[0] is None), relus[0])
        if relu is None:
            yield name, _by_equations(model, replace(layer, reason=reason), nodes)
            continue
        following, dropout = None, False
        if len(nodes) == 1:
            following, dropout = _next_linear(model, relu, layer.neurons)
        else:
            reason = f"shared: used {len(nodes)} times, each time before a ReLU"
        if following is not None and len(uses.get(following, [])) > 1:
            following = None
        weight = None if following is None else plain(f"{following}.weight")
        assumed = any(each for _, _, each in relus)
        yield name, replace(layer, qualifies=True, reason=reason, assumed=assumed, dropout=dropout, next=weight)


def _by_equations(model: nn.Module, layer: Layer, nodes: list[fx.Node]) -> Layer:
    """Return the layer, qualified if later Linear layers depend on it alone, so that their equations can be solved."""
    if len(nodes) != 1 or nodes[0].op != "call_module":
        return layer
    later, why = nodes_after(model, nodes[0])
    if later and later[-1].op == "output" and not why and not linear_names(model, later):
        return as_output(layer)
    if not linear_names(model, later):
        return replace(layer, reason=f"{layer.reason}; {why}") if "Dropout" in why else layer
    reason = f"{_destination(model, nodes[0])[0]}: the equations of the network are solved"
    if any(is_batch_norm(module_of(model, node)) for node in later):
        reason += ", which hold if BatchNorm is in evaluation mode"
    return replace(layer, qualifies=True, equations=True, reason=reason)


def _parameter(node: fx.Node, position: int, key: str) -> str | None:
    """Return the name of the parameter that a function receives as an argument, or None if it is not a parameter."""
    value = node.args[position] if len(node.args) > position else node.kwargs.get(key)
    return str(value.target) if isinstance(value, fx.Node) and value.op == "get_attr" else None


def _relu_after(model: nn.Module, linear: fx.Node, width: int) -> tuple[fx.Node | None, str, bool]:
    """Find the ReLU that takes the output of a Linear layer.

    Returns:
        The node of the ReLU, or None; the reason for this result; and whether the ReLU is only assumed, because the
        operation equals ReLU for small values only.
    """
    for node, acts_as in activations(model, linear, width):
        name = label(model, node)
        if acts_as is Behaviour.RELU:
            relu = "ReLU" if name.lower().rstrip("_") == "relu" else f"{name}, which acts as ReLU"
            return node, f"its output goes to {relu}", False
        if acts_as is Behaviour.NEARLY_RELU:
            reason = f"its output goes to {name}, which equals ReLU for small values: a certificate decides"
            return node, reason, True
    return None, "".join(_destination(model, linear)), False


def _destination(model: nn.Module, linear: fx.Node) -> tuple[str, str]:
    """Return in words what the output of a Linear layer goes to, and the words to add if the layer needs a ReLU."""
    node = linear
    while len(readers(node)) == 1 and is_reshape(model, readers(node)[0]):
        node = readers(node)[0]
    users = readers(node)
    if not users:
        return "its output is not used", ""
    if len(users) > 1:
        return "its output goes to several operations, not only to a ReLU", ""
    if users[0].op == "output":
        return "its output is the model's output", ": no ReLU follows"
    return f"its output goes to {label(model, users[0])}", ", not to ReLU"


def _next_linear(model: nn.Module, relu: fx.Node, width: int) -> tuple[str | None, bool]:
    """Find the Linear layer whose only input is a ReLU's output.

    Returns:
        The name of the Linear layer, or None; and whether Dropout is between the ReLU and the Linear layer.
    """
    node, dropout = relu, False
    while True:
        users = readers(node)
        dropout = dropout or any(is_dropout(model, user) for user in users)
        if len(users) != 1:
            return None, dropout
        node = users[0]
        module = module_of(model, node)
        if is_linear(module):
            return (str(node.target) if getattr(module, "in_features", None) == width else None), dropout
        if not (isinstance(module, DROPOUT) or is_dropout(model, node) or is_reshape(model, node)):
            return None, dropout


def _from_input(model: nn.Module, node: fx.Node) -> bool:
    """Return whether a layer takes the model's input, possibly after reshaping."""
    source = node.args[0] if node.args else next(iter(node.kwargs.values()), None)
    if not isinstance(source, fx.Node):
        return False
    return source.op == "placeholder" or (is_reshape(model, source) and _from_input(model, source))


def by_definition(model: nn.Module) -> Iterable[tuple[str, Layer]]:
    """Yield every Linear layer with its name, under the assumption that modules run in the order of definition."""
    leaves = [(name, module) for name, module in model.named_modules() if not list(module.children())]
    linear = [index for index, (_, module) in enumerate(leaves) if is_linear(module)]
    for position, index in enumerate(linear):
        name, module = leaves[index]
        after = leaves[index + 1][1] if index + 1 < len(leaves) else None
        following = linear[position + 1] if position + 1 < len(linear) else None
        sees = Sees.INPUTS if index == 0 else Sees.FEATURES  # the first module of the model receives its input
        is_activation = after is not None and type(after).__module__ == "torch.nn.modules.activation"
        # Before an attention or softmax module, ``forward`` may call a functional ReLU.
        relu_possible = isinstance(after, nn.ReLU | nn.MultiheadAttention | nn.Softmax | nn.LogSoftmax)
        if following is None and not isinstance(after, nn.ReLU):
            reason = "the last Linear layer: no ReLU is defined after it"
            last = layer_of(model, name, qualifies=False, reason=reason, assumed=True)
            yield name, replace(as_output(last), sees=sees)
        elif is_activation and not relu_possible:
            reason = f"{type(after).__name__} is defined after it, not ReLU (the model could not be traced)"
            yield name, replace(layer_of(model, name, qualifies=False, reason=reason), sees=sees)
        else:
            reason = "assumed: the model cannot be traced; a certificate proves the ReLU"
            layer = replace(layer_of(model, name, qualifies=True, reason=reason, assumed=True), sees=sees)
            if following is not None:
                next_name, next_module = leaves[following]
                fits = getattr(next_module, "in_features", None) == getattr(module, "out_features", None)
                layer = replace(layer, next=plain(f"{next_name}.weight") if fits else None)
            yield name, layer


def in_transformers(model: nn.Module) -> Iterable[tuple[str, Layer]]:
    """Yield the feed-forward layers of PyTorch's transformer layers, which cannot be traced, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            prefix = f"{name}." if name else ""
            activation = module.activation
            relu = behaviour(activation) is Behaviour.RELU
            activation_name = getattr(activation, "__name__", type(activation).__name__)
            dropout = module.dropout.p > 0 if isinstance(module.dropout, nn.Dropout) else False
            reason = f"its output goes to {'ReLU' if relu else activation_name}"
            if relu or not dropout:
                reason += "; every token counts as a sample"
            else:
                reason += "; the mask of Dropout is unknown"
            first = layer_of(model, f"{prefix}linear1", qualifies=relu or not dropout, reason=reason)
            following = plain(f"{prefix}linear2.weight")
            yield f"{prefix}linear1", replace(first, next=following if relu else None, equations=not relu, tokens=True)
            reason = "its output goes to a skip connection, not to ReLU"
            yield f"{prefix}linear2", layer_of(model, f"{prefix}linear2", qualifies=False, reason=reason)


def of_checkpoint(update: ClientUpdate) -> list[Layer]:
    """Return a layer for every matrix of the update, in order. The last matrix counts as the output layer."""
    weights = tensor_specs(update.weights)
    matrices = [name for name, spec in weights.items() if spec.ndim == 2]
    layers = []
    for index, name in enumerate(matrices):
        shape = weights[name].shape
        stem = name.removesuffix("weight")
        bias = f"{stem}bias" if name.endswith("weight") else _vector_after(weights, name)
        bias_fits = bias in weights and weights[bias].shape == shape[:1] if bias else False
        following = matrices[index + 1] if index + 1 < len(matrices) else None
        following_fits = following is not None and weights[following].shape[1] == shape[0]
        layer = Layer(
            name=stem.rstrip(".") or name,
            weight=name,
            bias=bias if bias_fits else None,
            neurons=shape[0],
            features=shape[1],
            qualifies=following is not None,
            reason="assumed to be Linear and ReLU: without a model, only a certificate can prove it"
            if following is not None
            else "the last matrix of the checkpoint: assumed to be the output layer, which no ReLU follows",
            sees=Sees.INPUTS if index == 0 and next(iter(weights)) == name else Sees.FEATURES,
            next=following if following_fits else None,
            assumed=True,
        )
        layers.append(as_output(layer) if following is None else layer)
    return layers


def _vector_after(weights: dict[str, TensorSpec], name: str) -> str | None:
    """Return the name of the next tensor if it is a vector: in a list of parameters, the bias follows the weight."""
    names = list(weights)
    index = names.index(name) + 1
    return names[index] if index < len(names) and weights[names[index]].ndim == 1 else None
