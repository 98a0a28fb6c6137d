"""Operations that may come before a Linear layer whose features are solved for the input of the model.

Convolutions, pooling, normalisation and the usual activations keep different inputs apart, as far as they have enough
outputs. Other operations may not: the absolute value gives an input and its negative the same features.
"""

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
    *("getitem", "permute", "transpose", "t", "expand", "repeat", "pad", "flip", "roll", "unfold", "movedim"),
    *("conv1d", "conv2d", "conv3d", "linear", "interpolate", "pixel_shuffle", "narrow", "type_as", *RESHAPING),
    *("batch_norm", "layer_norm", "group_norm", "instance_norm", "softmax", "scaled_dot_product_attention"),
    *("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "amax", "clamp"),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "clamp_min", "dropout", *NAMES),
}
"""Functions and methods that may be part of a front end, without the underscore of operations in place."""
PRODUCTS = ("mul", "imul", "truediv", "itruediv", "div", "matmul", "bmm", "einsum")
"""Functions and methods that may be part of a front end if only one argument depends on the input."""


def first_unknown(model: nn.Module, nodes: list[fx.Node]) -> fx.Node | None:
    """Return the first operation that is not known, or None. Operations on shapes and parameters alone do not count."""
    constant: set[fx.Node] = set()
    for node in nodes:
        sources: list[fx.Node] = []
        fx.map_arg((node.args, node.kwargs), sources.append)
        values = [each for each in sources if each.op != "get_attr" and each not in constant]
        name = label(model, node).rstrip("_")
        if not values or name in SHAPE_METHODS or node.target is getattr:
            constant.add(node)
        elif node.op == "call_module":
            module = model.get_submodule(str(node.target))
            package, _, file = type(module).__module__.rpartition(".")
            if package != "torch.nn.modules" or file not in KNOWN_MODULES or isinstance(module, NOT_KNOWN):
                return node
        elif name not in KNOWN and activation_of(node.target) is None and not (name in PRODUCTS and len(values) == 1):
            return node
    return None
