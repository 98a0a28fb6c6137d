"""Layers of two checkpoints without a model: every matrix may be one."""

from collections.abc import Callable
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional

from spearpp.model.layer import Layer
from spearpp.update import ClientUpdate
from spearpp.update.lazy import TensorSpec, tensor_specs


def of_checkpoint(update: ClientUpdate) -> list[Layer]:
    """All matrices in their order; the last is an output layer."""
    weights = tensor_specs(update.weights)
    matrices = [name for name, weight in weights.items() if weight.ndim == 2]
    layers = []
    for index, name in enumerate(matrices):
        weight = weights[name]
        stem = name.removesuffix("weight")
        bias = f"{stem}bias" if name.endswith("weight") else _following(weights, name)
        fits = bias in weights and weights[bias].shape == weight.shape[:1] if bias else False
        after = matrices[index + 1] if index + 1 < len(matrices) else None
        takes = after is not None and weights[after].shape[1] == weight.shape[0]
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
                sees="inputs" if index == 0 and next(iter(weights)) == name else "features",
                next=after if takes else None,
                assumed=True,
            )
        )
    return layers


def _following(weights: dict[str, TensorSpec], name: str) -> str | None:
    """The name after this one, as a list in parameter order has the bias after the weight."""
    names = list(weights)
    index = names.index(name) + 1
    return names[index] if index < len(names) and weights[names[index]].ndim == 1 else None


class AssumedNetwork(nn.Module):
    """Linear layers with an activation between them, under the names that a checkpoint has for its parameters."""

    def __init__(self, stems: list[str], widths: list[int], activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.stems, self.activation = stems, activation
        for stem, (inputs, outputs) in zip(stems, pairwise(widths), strict=True):
            module: nn.Module = self
            *path, last = stem.split(".")
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.add_module(last, nn.Linear(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Outputs, (batch, classes)."""
        *hidden, last = (self.get_submodule(stem) for stem in self.stems)
        for layer in hidden:
            x = self.activation(layer(x))
        return last(x)


ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    functional.relu,
    functional.gelu,
    functional.silu,
    functional.tanh,
    functional.sigmoid,
    functional.leaky_relu,
    functional.elu,
)
"""Activations that a checkpoint is tried with, the most frequent first."""


def assumed_networks(update: ClientUpdate) -> list[AssumedNetwork]:
    """The networks that a checkpoint may be of: all of it Linear layers with bias that feed each other; else none.

    They are guesses. An input that explains its part of the update when it is replayed through one proves the guess.
    """
    weights = tensor_specs(update.weights)
    stems = [name.removesuffix(".weight") for name, each in weights.items() if each.ndim == 2]
    names = [name for stem in stems for name in (f"{stem}.weight", f"{stem}.bias")]
    if len(stems) < 2 or sorted(names) != sorted(weights) or not update.gradients.keys() >= set(names):
        return []
    shapes = [weights[f"{stem}.weight"].shape for stem in stems]
    if any(after[1] != before[0] for before, after in pairwise(shapes)):
        return []
    if any(weights[f"{stem}.bias"].shape != shape[:1] for stem, shape in zip(stems, shapes, strict=True)):
        return []
    prefixes = {stem.rsplit(".", depth)[0] for stem in stems for depth in range(1, stem.count(".") + 1)}
    if prefixes & set(stems):
        return []
    widths = [shapes[0][1], *(shape[0] for shape in shapes)]
    return [AssumedNetwork(stems, widths, activation) for activation in ACTIVATIONS]
