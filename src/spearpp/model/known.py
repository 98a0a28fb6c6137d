"""Operations that may come before a Linear layer whose features are solved for the input of the model.

Convolutions, pooling, normalisation and the usual activations map different inputs to different features, if they have
enough outputs. Other operations may not: the absolute value maps an input and its negative to the same features. Known
operations can have this property too, if they combine two values that the same weights computed: the sum of
relu(conv(x)) and relu(conv(x.flip(3))) is the same for a picture and its mirror image.
"""

from collections.abc import Iterator
from itertools import combinations

from torch import fx, nn

from spearpp.model.operations import RESHAPING, SHAPE_METHODS, label
from spearpp.model.smoothing import NAMES, activation_of

KNOWN_MODULES = (
    *("activation", "batchnorm", "channelshuffle", "conv", "dropout", "flatten", "fold", "instancenorm", "linear"),
    *("normalization", "padding", "pixelshuffle", "pooling", "rnn", "sparse", "transformer", "upsampling"),
)
"""Files of ``torch.nn.modules`` whose modules may be part of a front end, except ``NOT_KNOWN``."""
NOT_KNOWN = (nn.Bilinear, nn.LPPool1d, nn.LPPool2d, nn.LPPool3d)
"""Modules that may give the same features for an input and its negative."""
KNOWN = {
    *("add", "iadd", "sub", "isub", "neg", "sum", "mean", "cumsum", "cat", "concat", "stack", "chunk", "split"),
    *("getitem", "permute", "transpose", "t", "T", "mT", "data", "expand", "repeat", "pad", "flip", "roll", "unfold"),
    *("conv1d", "conv2d", "conv3d", "linear", "interpolate", "pixel_shuffle", "narrow", "movedim", "type_as"),
    *("batch_norm", "layer_norm", "group_norm", "instance_norm", "softmax", "scaled_dot_product_attention"),
    *("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "amax", "clamp"),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "clamp_min", "dropout", *NAMES, *RESHAPING),
}
"""Functions, methods and attributes that may be part of a front end, without the underscore of operations in place."""
PRODUCTS = ("mul", "imul", "truediv", "itruediv", "div", "matmul", "bmm", "einsum")
"""Functions and methods that may be part of a front end if only one argument depends on the input."""


LINEAR_MODULES = {
    *("batchnorm", "channelshuffle", "conv", "dropout", "flatten", "fold", "linear", "padding", "pixelshuffle"),
    "upsampling",
}
"""Files of ``torch.nn.modules`` whose modules are linear in evaluation mode, up to a constant."""
NOT_LINEAR = {
    *("layer_norm", "group_norm", "instance_norm", "softmax", "scaled_dot_product_attention", "amax", "clamp"),
    *("max_pool1d", "max_pool2d", "max_pool3d", "adaptive_max_pool2d", "clamp_min", *NAMES),
}
"""Functions and methods of a front end that are not linear."""
JOINING = ("cat", "concat", "stack")
"""Functions that put values side by side."""
REDUCING = ("amax", "sum", "mean")
"""Functions that may combine values that were side by side."""
CONSTANT = {*SHAPE_METHODS, "shape", "ndim", "dtype", "device"}
"""Methods and attributes of a tensor that do not depend on its values."""


def first_unknown(model: nn.Module, nodes: list[fx.Node]) -> fx.Node | None:
    """Return the first operation that is not known, or None. Operations on shapes and parameters alone do not count."""
    for node, values in _data_nodes(model, nodes):
        name = _name(model, node)
        if node.op == "call_module":
            module = model.get_submodule(str(node.target))
            package, _, file = type(module).__module__.rpartition(".")
            if package != "torch.nn.modules" or file not in KNOWN_MODULES or isinstance(module, NOT_KNOWN):
                return node
        elif name not in KNOWN and activation_of(node.target) is None and not (name in PRODUCTS and len(values) == 1):
            return node
    return None


def first_exchangeable(model: nn.Module, nodes: list[fx.Node]) -> fx.Node | None:
    """Return the first operation that combines two values that the same weights computed in different ways, or None.

    Values that differ only in linear operations do not count: the rank of the Jacobian shows what these leave open.
    """
    reduces = any(_name(model, node) in REDUCING for node in nodes)
    weights: dict[fx.Node, frozenset[object]] = {}
    bends: dict[fx.Node, frozenset[object]] = {}
    nothing: frozenset[object] = frozenset()
    for node, values in _data_nodes(model, nodes):
        if _name(model, node) not in JOINING or reduces:
            for one, other in combinations(values, 2):
                same = weights.get(one, nothing) == weights.get(other, nothing)
                if same and bends.get(one, nothing) != bends.get(other, nothing):
                    return node
        own = {str(each.target) for each in node.all_input_nodes if each.op == "get_attr"}
        module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        used = own if module is None or not any(True for _ in module.parameters()) else {id(module)}
        weights[node] = nothing.union(used, *(weights.get(each, nothing) for each in values))
        bent = nothing if _is_linear(model, node) else {node.name}
        bends[node] = nothing.union(bent, *(bends.get(each, nothing) for each in values))
    return None


def _data_nodes(model: nn.Module, nodes: list[fx.Node]) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Yield every operation that depends on values of the input, with its arguments that do."""
    constant: set[fx.Node] = set()
    for node in nodes:
        sources: list[fx.Node] = []
        fx.map_arg((node.args, node.kwargs), sources.append)
        values = [each for each in sources if each.op != "get_attr" and each not in constant]
        if not values or _name(model, node) in CONSTANT:
            constant.add(node)
        else:
            yield node, values


def _is_linear(model: nn.Module, node: fx.Node) -> bool:
    """Return whether a known operation is linear in its arguments, up to a constant."""
    if node.op != "call_module":
        return _name(model, node) not in NOT_LINEAR
    module = model.get_submodule(str(node.target))
    averages = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)
    return type(module).__module__.rpartition(".")[2] in LINEAR_MODULES or isinstance(module, averages)


def _name(model: nn.Module, node: fx.Node) -> str:
    """Return the name of an operation or attribute, without the underscore of operations in place."""
    return str(node.args[1]) if node.target is getattr else label(model, node).rstrip("_")
