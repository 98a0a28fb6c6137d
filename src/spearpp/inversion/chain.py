"""Signals of a chain: the rest of a network in which activations and Linear layers alternate.

With the inputs y_l = φ(z_{l-1}) of the later layers and their outputs z_l = W_l y_l, the signals d_l = dℒ/dz_l are

    d_{l-1} = φ'(z_{l-1}) W_lᵀ d_l.

These formulas and ``torch.autograd`` take a fraction of the time that ``torch.func`` needs to prepare its transforms.
"""

from collections.abc import Callable, Sequence

import torch

from spearpp.types import Float, Tensor

Step = tuple[Tensor, Callable[[Tensor], Tensor]]
"""An argument [k, n], and a function that acts on each of its entries, or on each of its rows, on its own."""


def first_derivatives(steps: Sequence[Step]) -> list[Tensor]:
    """Return the derivative of each function at its argument.

    All functions share one call of ``torch.autograd``: on a GPU, a call takes longer than what it computes.

    >>> steps = [(torch.tensor([3.0]), torch.square), (torch.tensor([0.0]), torch.exp)]
    >>> [each.tolist() for each in first_derivatives(steps)]
    [[6.0], [1.0]]
    """
    with torch.enable_grad():
        return list(_first(*_values(steps), again=False))


def first_and_second_derivatives(steps: Sequence[Step]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the first and second derivatives of functions that act on every entry on its own.

    >>> steps = [(torch.tensor([3.0]), torch.square), (torch.tensor([2.0]), torch.relu)]
    >>> first, second = first_and_second_derivatives(steps)
    >>> [each.tolist() for each in (*first, *second)]
    [[6.0], [1.0], [2.0], [0.0]]
    """
    with torch.enable_grad():
        points, values = _values(steps)
        first = _first(points, values, again=True)
        curved = [each for each in first if each.requires_grad]
        if not curved:
            second = [torch.zeros_like(each) for each in first]
        else:
            second = list(torch.autograd.grad(curved, points, _ones(curved), allow_unused=True, materialize_grads=True))
    return [each.detach() for each in first], second


def _values(steps: Sequence[Step]) -> tuple[list[Tensor], list[Tensor]]:
    points = [argument.detach().requires_grad_() for argument, _ in steps]
    return points, [function(point) for point, (_, function) in zip(points, steps, strict=True)]


def _first(points: list[Tensor], values: list[Tensor], *, again: bool) -> tuple[Tensor, ...]:
    return torch.autograd.grad(values, points, _ones(values), create_graph=again)


def _ones(values: Sequence[Tensor]) -> list[Tensor]:
    """Return ones of the shape of each tensor, which share one number in memory."""
    one = values[0].new_ones(())
    return [one.expand_as(each) for each in values]


def signals_of(
    last: Float[Tensor, "k c"],
    weights: Sequence[Tensor],
    slopes: Sequence[Tensor],
    earliest: int = 0,
) -> tuple[list[Tensor], dict[int, Tensor]]:
    """Return the signals of all layers, and W_{l+1}ᵀ d_{l+1} by layer, both down to the earliest layer.

    Args:
        last: the signals of the outputs of the network.
        weights: the weights of the later layers.
        slopes: φ'(z_l) before each of them.
        earliest: the first layer whose signals are needed. The signals of earlier layers are not computed.
    """
    signals = [last] * (len(weights) + 1)
    sent = {}
    for layer in range(len(weights) - 1, earliest - 1, -1):
        sent[layer] = signals[layer + 1] @ weights[layer]
        signals[layer] = slopes[layer] * sent[layer]
    return signals, sent
