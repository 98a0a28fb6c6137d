"""Layers of two checkpoints without a model: every matrix may be one."""

from spearpp.layers.layer import Layer
from spearpp.update import ClientUpdate
from spearpp.update.lazy import Outline, outlines


def of_checkpoint(update: ClientUpdate) -> list[Layer]:
    """All matrices in their order; the last is an output layer."""
    weights = outlines(update.weights)
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


def _following(weights: dict[str, Outline], name: str) -> str | None:
    """The name after this one, as a list in parameter order has the bias after the weight."""
    names = list(weights)
    index = names.index(name) + 1
    return names[index] if index < len(names) and weights[names[index]].ndim == 1 else None
