"""The arguments of ``spearpp.invert`` for every Linear layer of a simulated client."""

from typing import NamedTuple

import torch
from torch import nn

from spearpp.simulate.batch import Batch
from spearpp.simulate.clients import FedSGD
from spearpp.types import Float, Tensor
from spearpp.update import ClientUpdate


class LayerGradient(NamedTuple):
    """What the server sees of one Linear layer, in the order of the arguments of ``spearpp.invert``."""

    grad_weight: Float[Tensor, "m n"]
    grad_bias: Float[Tensor, "m"] | None
    weight: Float[Tensor, "m n"]
    bias: Float[Tensor, "m"] | None

    def to(self, target: torch.dtype | torch.device | str) -> "LayerGradient":
        """Return the layer with another dtype or on another device."""
        return LayerGradient(
            grad_weight=self.grad_weight.to(target),
            grad_bias=None if self.grad_bias is None else self.grad_bias.to(target),
            weight=self.weight.to(target),
            bias=None if self.bias is None else self.bias.to(target),
        )


def linear_layers(model: nn.Module, update: ClientUpdate) -> list[LayerGradient]:
    """Return gradient and parameters of every Linear layer of a model, in the order of definition."""
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            prefix = f"{name}." if name else ""
            bias = None if module.bias is None else f"{prefix}bias"
            layers.append(LayerGradient(*update.layer(f"{prefix}weight", bias)))
    return layers


def fedsgd(model: nn.Module, batch: Batch) -> list[LayerGradient]:
    """Simulate a FedSGD round and return every Linear layer: the gradient of the mean cross-entropy over the batch.

    >>> import torch
    >>> from spearpp.simulate import mlp, random_batch
    >>> fedsgd(mlp(8, [5], 10), random_batch(4, features=8))[0].grad_weight.shape
    torch.Size([5, 8])
    """
    return linear_layers(model, FedSGD()(model, batch))
