"""What a client computes and the server sees."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, overload

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


@overload
def fedsgd(model: nn.Module, batch: Batch, *, layer: int = 0) -> LayerGradient: ...
@overload
def fedsgd(model: nn.Module, batch: Batch, *, layer: None) -> list[LayerGradient]: ...
def fedsgd(model: nn.Module, batch: Batch, *, layer: int | None = 0) -> LayerGradient | list[LayerGradient]:
    """One FedSGD round: the gradient of the mean cross-entropy over the batch, at one Linear layer.

    Args:
        model: the network; the batch is cast to its dtype and device.
        batch: inputs and labels.
        layer: which of the model's Linear layers, counted from 0; None for a list of all.

    >>> import torch
    >>> from spearpp.simulate import mlp, random_batch
    >>> fedsgd(mlp(8, [5], 10), random_batch(4, features=8)).grad_weight.shape
    torch.Size([5, 8])
    """
    layers = _linear(model)
    gradients = torch.autograd.grad(_loss(model, batch), _parameters(layers))
    return _one_or_all(_layer_gradients(layers, gradients), layer)


@overload
def fedavg(
    model: nn.Module,
    batch: Batch,
    *,
    epochs: int,
    mini_batch: int,
    rate: float,
    layer: int = 0,
    generator: torch.Generator | None = None,
) -> LayerGradient: ...
@overload
def fedavg(
    model: nn.Module,
    batch: Batch,
    *,
    epochs: int,
    mini_batch: int,
    rate: float,
    layer: None,
    generator: torch.Generator | None = None,
) -> list[LayerGradient]: ...
def fedavg(
    model: nn.Module,
    batch: Batch,
    *,
    epochs: int,
    mini_batch: int,
    rate: float,
    layer: int | None = 0,
    generator: torch.Generator | None = None,
) -> LayerGradient | list[LayerGradient]:
    """FedAvg: SGD over shuffled mini-batches; the update, weights before minus after, over rate and epochs.

    The sum of all gradients over their number of epochs is close to the gradient of the summed
    mini-batch losses at the weights sent, and drifts from it as the weights move.

    >>> from spearpp.simulate import mlp, random_batch
    >>> model, batch = mlp(8, [5], 10), random_batch(4, features=8)
    >>> one = fedavg(model, batch, epochs=1, mini_batch=4, rate=0.1)
    >>> bool((one.grad_weight - fedsgd(model, batch).grad_weight).abs().max() < 1e-6)
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
    return _one_or_all(_layer_gradients(before, [(old - new).detach() / (rate * epochs) for old, new in moved]), layer)


@overload
def dp_sgd(
    model: nn.Module,
    batch: Batch,
    *,
    clip: float,
    noise: float,
    layer: int = 0,
    generator: torch.Generator | None = None,
) -> LayerGradient: ...
@overload
def dp_sgd(
    model: nn.Module,
    batch: Batch,
    *,
    clip: float,
    noise: float,
    layer: None,
    generator: torch.Generator | None = None,
) -> list[LayerGradient]: ...
def dp_sgd(
    model: nn.Module,
    batch: Batch,
    *,
    clip: float,
    noise: float,
    layer: int | None = 0,
    generator: torch.Generator | None = None,
) -> LayerGradient | list[LayerGradient]:
    """DP-SGD as the paper's table has it: per-sample gradients clipped to norm C, averaged, plus N(0, σ²).

    The norm is of a sample's whole gradient. σ is added to each entry of the mean.

    >>> from spearpp.simulate import mlp, random_batch
    >>> model, batch = mlp(8, [5], 10), random_batch(4, features=8)
    >>> free = dp_sgd(model, batch, clip=1e9, noise=0.0)
    >>> bool((free.grad_weight - fedsgd(model, batch).grad_weight).abs().max() < 1e-6)
    True
    """
    if not clip > 0 or noise < 0:
        raise OptionError(f"clip={clip}, noise={noise}: the clipping norm is positive, the noise not negative")
    generator = generator or torch.Generator().manual_seed(0)
    layers = _linear(model)
    everything = [parameter for parameter in model.parameters() if parameter.requires_grad]
    total = [torch.zeros_like(parameter) for parameter in _parameters(layers)]
    for row in range(len(batch.inputs)):
        one = replace(batch, inputs=batch.inputs[row : row + 1], labels=batch.labels[row : row + 1])
        loss = _loss(model, one)
        norm = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(g) for g in torch.autograd.grad(loss, everything, retain_graph=True)])
        )
        share = min(1.0, clip / max(float(norm), 1e-30)) / len(batch.inputs)
        for part, gradient in zip(total, torch.autograd.grad(loss, _parameters(layers)), strict=True):
            part += share * gradient
    drawn = [torch.randn(part.shape, generator=generator, device=generator.device).to(part) for part in total]
    noisy = [part + noise * extra for part, extra in zip(total, drawn, strict=True)]
    return _one_or_all(_layer_gradients(layers, noisy), layer)


def _linear(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def _one_or_all(layers: list[LayerGradient], layer: int | None) -> LayerGradient | list[LayerGradient]:
    if layer is None:
        return layers
    if not -len(layers) <= layer < len(layers):
        raise OptionError(f"layer={layer}: the model has {len(layers)} Linear layers")
    return layers[layer]


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
