"""What a client computes and the server sees."""

from typing import NamedTuple

import torch
from torch import nn

from spearpp.errors import OptionError
from spearpp.shapes import Float, Tensor
from spearpp.simulate.data import Batch


class LayerGradient(NamedTuple):
    """What the server sees of one Linear layer, in the order ``spearpp.invert`` takes it."""

    grad_weight: Float[Tensor, "m n"]
    grad_bias: Float[Tensor, "m"] | None
    weight: Float[Tensor, "m n"]
    bias: Float[Tensor, "m"] | None

    def to(self, target: torch.dtype | torch.device | str) -> "LayerGradient":
        """The same in another wire precision or on another device."""
        return LayerGradient(
            grad_weight=self.grad_weight.to(target),
            grad_bias=None if self.grad_bias is None else self.grad_bias.to(target),
            weight=self.weight.to(target),
            bias=None if self.bias is None else self.bias.to(target),
        )


def fedsgd(model: nn.Module, batch: Batch, *, layer: int = 0) -> LayerGradient:
    """One FedSGD round: the gradient of the mean cross-entropy over the batch, at one Linear layer.

    Args:
        model: the network; the batch is cast to its dtype and device.
        batch: inputs and labels.
        layer: which of the model's Linear layers, counted from 0.

    >>> import torch
    >>> from spearpp.simulate import mlp, random_batch
    >>> fedsgd(mlp(8, [5], 10), random_batch(4, features=8)).grad_weight.shape
    torch.Size([5, 8])
    """
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not -len(linear) <= layer < len(linear):
        raise OptionError(f"layer={layer}: the model has {len(linear)} Linear layers")
    seen = linear[layer]
    inputs = batch.inputs.to(seen.weight)
    outputs = model(inputs)
    if int(batch.labels.max()) >= outputs.shape[1]:
        raise OptionError(f"the batch has label {int(batch.labels.max())}, the model {outputs.shape[1]} outputs")
    loss = nn.functional.cross_entropy(outputs, batch.labels.to(inputs.device))
    parameters = [seen.weight] if seen.bias is None else [seen.weight, seen.bias]
    gradients = torch.autograd.grad(loss, parameters)
    bias = None if seen.bias is None else seen.bias.detach().clone()
    return LayerGradient(
        grad_weight=gradients[0],
        grad_bias=gradients[1] if len(gradients) > 1 else None,
        weight=seen.weight.detach().clone(),
        bias=bias,
    )
