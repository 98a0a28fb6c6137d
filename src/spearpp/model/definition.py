"""Find layers of a model that cannot be traced: by order of definition, and inside PyTorch's transformer layers."""

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from spearpp.model.layer import Layer, Sees, as_output, layer_of
from spearpp.model.operations import Behaviour, behaviour, is_linear
from spearpp.update.names import plain


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
            label = getattr(activation, "__name__", type(activation).__name__)
            dropout = module.dropout.p > 0 if isinstance(module.dropout, nn.Dropout) else False
            reason = f"its output goes to {'ReLU' if relu else label}"
            if relu or not dropout:
                reason += "; every token counts as a sample"
            else:
                reason += "; the mask of Dropout is unknown"
            first = layer_of(model, f"{prefix}linear1", qualifies=relu or not dropout, reason=reason)
            following = plain(f"{prefix}linear2.weight")
            yield f"{prefix}linear1", replace(first, next=following if relu else None, equations=not relu, tokens=True)
            reason = "its output goes to a skip connection, not to ReLU"
            yield f"{prefix}linear2", layer_of(model, f"{prefix}linear2", qualifies=False, reason=reason)
