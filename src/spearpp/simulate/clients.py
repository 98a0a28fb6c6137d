"""What a client computes and the server sees."""

import copy
from collections.abc import Sequence
from dataclasses import replace
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


def fedsgd(model: nn.Module, batch: Batch) -> list[LayerGradient]:
    """One FedSGD round: the gradient of the mean cross-entropy over the batch, at every Linear layer in turn.

    Args:
        model: the network; the batch is cast to its dtype and device.
        batch: inputs and labels.

    >>> import torch
    >>> from spearpp.simulate import mlp, random_batch
    >>> fedsgd(mlp(8, [5], 10), random_batch(4, features=8))[0].grad_weight.shape
    torch.Size([5, 8])
    """
    layers = _linear(model)
    gradients = torch.autograd.grad(_loss(model, batch), _parameters(layers))
    return _layer_gradients(layers, gradients)


def fedavg(
    model: nn.Module,
    batch: Batch,
    *,
    epochs: int,
    mini_batch: int,
    rate: float,
    generator: torch.Generator | None = None,
) -> list[LayerGradient]:
    """FedAvg: SGD over shuffled mini-batches; the update, weights before minus after, over rate and epochs.

    The sum of all gradients over their number of epochs is close to the gradient of the summed
    mini-batch losses at the weights sent, and drifts from it as the weights move.

    >>> from spearpp.simulate import mlp, random_batch
    >>> model, batch = mlp(8, [5], 10), random_batch(4, features=8)
    >>> one = fedavg(model, batch, epochs=1, mini_batch=4, rate=0.1)[0]
    >>> bool((one.grad_weight - fedsgd(model, batch)[0].grad_weight).abs().max() < 1e-6)
    True
    """
    if epochs < 1 or mini_batch < 1 or not rate > 0:
        raise OptionError(f"epochs={epochs}, mini_batch={mini_batch}, rate={rate}: each must be positive")
    generator = generator or torch.Generator().manual_seed(0)
    before = _linear(model)
    local = copy.deepcopy(model)
    optimiser = torch.optim.SGD(local.parameters(), lr=rate)
    for _ in range(epochs):
        for rows in torch.randperm(len(batch.inputs), generator=generator).split(mini_batch):
            optimiser.zero_grad()
            _loss(local, replace(batch, inputs=batch.inputs[rows], labels=batch.labels[rows])).backward()
            optimiser.step()
    moved = zip(_parameters(before), _parameters(_linear(local)), strict=True)
    return _layer_gradients(before, [(old - new).detach() / (rate * epochs) for old, new in moved])


def dp_sgd(
    model: nn.Module,
    batch: Batch,
    *,
    clip: float,
    noise: float,
    generator: torch.Generator | None = None,
) -> list[LayerGradient]:
    """DP-SGD as the paper's table has it: per-sample gradients clipped to norm C, averaged, plus N(0, σ²).

    The norm is of a sample's whole gradient. σ is added to each entry of the mean.

    >>> from spearpp.simulate import mlp, random_batch
    >>> model, batch = mlp(8, [5], 10), random_batch(4, features=8)
    >>> free = dp_sgd(model, batch, clip=1e9, noise=0.0)[0]
    >>> bool((free.grad_weight - fedsgd(model, batch)[0].grad_weight).abs().max() < 1e-6)
    True
    """
    if not clip > 0 or noise < 0:
        raise OptionError(f"clip={clip}, noise={noise}: the clipping norm is positive, the noise not negative")
    generator = generator or torch.Generator().manual_seed(0)
    layers = _linear(model)
    everything: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    total = {parameter: torch.zeros_like(parameter) for parameter in everything}
    for row in range(len(batch.inputs)):
        one = replace(batch, inputs=batch.inputs[row : row + 1], labels=batch.labels[row : row + 1])
        gradients = torch.autograd.grad(_loss(model, one), everything)
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part) for part in gradients]))
        share = (clip / norm.clamp_min(1e-30)).clamp_max(1.0) / len(batch.inputs)
        for part, gradient in zip(total.values(), gradients, strict=True):
            part += share * gradient
    clipped = [total[parameter] for parameter in _parameters(layers)]
    drawn = [torch.randn(part.shape, generator=generator, device=generator.device).to(part) for part in clipped]
    return _layer_gradients(layers, [part + noise * extra for part, extra in zip(clipped, drawn, strict=True)])


def _linear(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def _parameters(layers: list[nn.Linear]) -> list[Tensor]:
    return [parameter for layer in layers for parameter in (layer.weight, layer.bias) if parameter is not None]


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    if not 0 < len(batch.inputs) == len(batch.labels):
        raise OptionError(f"a batch of {len(batch.inputs)} inputs and {len(batch.labels)} labels")
    inputs = batch.inputs.to(next(model.parameters()))
    try:
        outputs = model(inputs)
    except RuntimeError as error:
        raise OptionError(f"the model does not take inputs of shape {tuple(inputs.shape)}: {error}") from error
    if not 0 <= int(batch.labels.min()) <= int(batch.labels.max()) < outputs.shape[1]:
        seen = f"{int(batch.labels.min())} to {int(batch.labels.max())}"
        raise OptionError(f"the batch has labels {seen}, the model {outputs.shape[1]} outputs")
    return nn.functional.cross_entropy(outputs, batch.labels.to(inputs.device))


def _layer_gradients(layers: list[nn.Linear], gradients: Sequence[Tensor]) -> list[LayerGradient]:
    left = iter(gradients)
    return [
        LayerGradient(
            grad_weight=next(left),
            grad_bias=None if layer.bias is None else next(left),
            weight=layer.weight.detach().clone(),
            bias=None if layer.bias is None else layer.bias.detach().clone(),
        )
        for layer in layers
    ]
