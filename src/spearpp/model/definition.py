"""Layers of what cannot be traced: by the order of definition, and inside PyTorch's own transformers."""

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from spearpp.model.layer import Layer, layer_of
from spearpp.model.operations import Behaviour, behaviour, is_linear
from spearpp.update.names import plain


def by_definition(model: nn.Module) -> Iterable[tuple[str, Layer]]:
    """Linear layers in the order of their definition, where the model cannot be traced."""
    leaves = [(name, module) for name, module in model.named_modules() if not list(module.children())]
    linear = [index for index, (_, module) in enumerate(leaves) if is_linear(module)]
    for place, index in enumerate(linear):
        name, module = leaves[index]
        after = leaves[index + 1][1] if index + 1 < len(leaves) else None
        following = linear[place + 1] if place + 1 < len(linear) else None
        activation = after is not None and type(after).__module__ == "torch.nn.modules.activation"
        other = activation and not isinstance(after, nn.ReLU | nn.MultiheadAttention | nn.Softmax | nn.LogSoftmax)
        if following is None and not isinstance(after, nn.ReLU):
            reason = "the last Linear layer: no ReLU was seen after it"
            yield name, layer_of(model, name, qualifies=False, reason=reason)
        elif other:
            reason = f"{type(after).__name__} is defined after it, not ReLU (not traced)"
            yield name, layer_of(model, name, qualifies=False, reason=reason)
        else:
            reason = "assumed: the model cannot be traced; a certificate proves the ReLU"
            layer = layer_of(model, name, qualifies=True, reason=reason, assumed=True)
            if index == 0:  # the first module of all
                layer = replace(layer, sees="inputs")
            if following is not None:
                taker = leaves[following][1]
                fits = getattr(taker, "in_features", None) == getattr(module, "out_features", None)
                layer = replace(layer, next=plain(f"{leaves[following][0]}.weight") if fits else None)
            yield name, layer


def in_transformers(model: nn.Module) -> Iterable[tuple[str, Layer]]:
    """The feed-forward blocks of PyTorch's own transformer layers, which cannot be traced."""
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            prefix = f"{name}." if name else ""
            activation = module.activation
            relu = behaviour(activation) is Behaviour.RELU
            label = getattr(activation, "__name__", type(activation).__name__)
            reason = (
                "its output goes to ReLU; every token counts as a sample" if relu else f"its output goes to {label}"
            )
            first = layer_of(model, f"{prefix}linear1", qualifies=relu, reason=reason)
            yield f"{prefix}linear1", replace(first, next=plain(f"{prefix}linear2.weight") if relu else None)
            skip = "its output goes to a skip connection, not to ReLU"
            yield f"{prefix}linear2", layer_of(model, f"{prefix}linear2", qualifies=False, reason=skip)
