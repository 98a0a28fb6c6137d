"""The networks that an update without a model may belong to."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from spearpp.model.following import ACTIVATIONS
from spearpp.update import ClientUpdate
from spearpp.update.lazy import tensor_specs


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
