"""Find layers without tracing: by the order of definition, inside PyTorch's transformer layers, or without any model.

Without a model, every matrix of the update may be the weight of a Linear layer.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from spearpp.model.following import ACTIVATIONS
from spearpp.model.layer import Layer, Sees, as_output, layer_of
from spearpp.model.operations import Behaviour, behaviour, is_linear
from spearpp.update import ClientUpdate
from spearpp.update.lazy import TensorSpec, tensor_specs
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


class AssumedNetwork(nn.Module):
    """A sequence of Linear layers with one activation function between them. The activation function is an assumption.

    Args:
        layers: the layers with their names, which are parameter names without ``.weight`` and ``.bias``.
        activation: the activation function.
    """

    def __init__(self, layers: list[tuple[str, nn.Linear]], activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.stems, self.activation = [stem for stem, _ in layers], activation
        for stem, layer in layers:
            module: nn.Module = self
            *path, last = stem.split(".")
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.add_module(last, layer)

    def forward(self, x: Any) -> Any:
        """Return the outputs, (batch, classes)."""
        *hidden, last = (self.get_submodule(stem) for stem in self.stems)
        for layer in hidden:
            x = self.activation(layer(x))
        return last(x)


def assumed_networks(update: ClientUpdate) -> list[AssumedNetwork]:
    """Return the fully connected networks that an update without a model may belong to, one for each common activation.

    The list is empty unless the update consists only of Linear layers with bias whose widths fit each other. Each
    network is an assumption. Recovered inputs prove it if recomputing the update from them reproduces the update.
    """
    weights = tensor_specs(update.weights)
    stems = [name.removesuffix(".weight") for name, spec in weights.items() if spec.ndim == 2]
    names = [name for stem in stems for name in (f"{stem}.weight", f"{stem}.bias")]
    if len(stems) < 2 or sorted(names) != sorted(weights) or not update.gradients.keys() >= set(names):
        return []
    shapes = [weights[f"{stem}.weight"].shape for stem in stems]
    if any(after[1] != before[0] for before, after in pairwise(shapes)):
        return []
    if any(weights[f"{stem}.bias"].shape != shape[:1] for stem, shape in zip(stems, shapes, strict=True)):
        return []
    prefixes = {stem.rsplit(".", depth)[0] for stem in stems for depth in range(1, stem.count(".") + 1)}
    if prefixes & set(stems):  # a Linear layer cannot contain another layer
        return []
    widths = [shapes[0][1], *(shape[0] for shape in shapes)]
    return [
        AssumedNetwork(
            [(stem, nn.Linear(*sizes)) for stem, sizes in zip(stems, pairwise(widths), strict=True)],
            getattr(functional, name),
        )
        for name in ACTIVATIONS
    ]
