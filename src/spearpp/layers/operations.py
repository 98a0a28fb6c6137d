"""What the operations of a traced model do to values."""

import torch
from torch import fx, nn
from torch.nn import functional

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


def kind_of(model: nn.Module, node: fx.Node) -> tuple[str, str]:
    """What a node does to values: "pass", "drop", "relu", "nearly" that, "output" or "other"; and its name in words."""
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
