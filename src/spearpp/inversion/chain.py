"""Signals of a chain: the rest of a network in which activations and Linear layers alternate.

With the inputs y_l = φ(z_{l-1}) of the later layers and their outputs z_l = W_l y_l, the signals d_l = dL/dz_l are

    d_{l-1} = φ'(z_{l-1}) W_lᵀ d_l.

These formulas and ``torch.autograd`` take a fraction of the time that ``torch.func`` needs to prepare its transforms.
"""

from collections.abc import Callable, Sequence

import torch

from spearpp.model.loss import Loss
from spearpp.types import Float, Int, Tensor


def slope(function: Callable[[Tensor], Tensor], argument: Tensor) -> Tensor:
    """Return the derivative of a function that acts on every entry, or on every row, on its own.

    >>> slope(torch.square, torch.tensor([3.0])).tolist()
    [6.0]
    """
    with torch.enable_grad():
        point = argument.detach().requires_grad_()
        return torch.autograd.grad(function(point).sum(), point)[0]


def slope_and_bend(function: Callable[[Tensor], Tensor], argument: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and second derivative of a function that acts on every entry on its own.

    >>> [each.tolist() for each in slope_and_bend(torch.square, torch.tensor([3.0]))]
    [[6.0], [2.0]]
    """
    with torch.enable_grad():
        point = argument.detach().requires_grad_()
        first = torch.autograd.grad(function(point).sum(), point, create_graph=True)[0]
        if not first.requires_grad:
            return first, torch.zeros_like(first)
        second = torch.autograd.grad(first.sum(), point, allow_unused=True, materialize_grads=True)[0]
    return first.detach(), second


def signals_of(
    loss: Loss,
    outputs: Float[Tensor, "k c"],
    labels: Int[Tensor, "k"],
    weights: Sequence[Tensor],
    slopes: Sequence[Tensor],
    deepest: int = 0,
) -> tuple[list[Tensor], dict[int, Tensor]]:
    """Return the signals of all layers, and W_{l+1}ᵀ d_{l+1} by layer, both down to the deepest layer.

    Args:
        loss: the loss of the client.
        outputs: the outputs of the network.
        labels: the label of each sample.
        weights: the weights of the later layers.
        slopes: φ'(z_l) before each of them.
        deepest: the first layer whose signals are needed. The signals of earlier layers are not computed.
    """
    signals = [outputs] * len(weights) + [slope(lambda each: loss.each(each, labels), outputs)]
    sent = {}
    for layer in range(len(weights) - 1, deepest - 1, -1):
        sent[layer] = signals[layer + 1] @ weights[layer]
        signals[layer] = slopes[layer] * sent[layer]
    return signals, sent
