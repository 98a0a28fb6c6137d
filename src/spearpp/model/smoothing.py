"""Activations convolved with a normal distribution.

A search that starts with wide activations and sharpens them step by step (annealing) passes over the kinks of ReLU and
over the steep parts of other activations, where it would otherwise stay in local minima.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from spearpp.types import Float, Tensor

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(11)
"""Gauss-Hermite quadrature. 11 nodes are exact for polynomials up to degree 21."""
NAMES = (
    *("relu", "leaky_relu", "gelu", "silu", "elu", "selu", "celu", "softplus", "mish", "hardswish", "tanh", "sigmoid"),
    *("relu6", "hardtanh", "hardsigmoid", "softsign", "logsigmoid"),
)
"""Activations of ``torch.nn.functional`` that act on every entry on its own."""
FUNCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    torch.relu: functional.relu,
    torch.tanh: torch.tanh,
    torch.sigmoid: torch.sigmoid,
    **{getattr(functional, name): getattr(functional, name) for name in NAMES},
    **{name: getattr(torch, name) for name in ("relu", "tanh", "sigmoid")},
}
"""Functions and names of tensor methods that act on every entry on its own."""
NOT_ELEMENTWISE = (nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin, nn.GLU, nn.MultiheadAttention, nn.RReLU)
"""Modules of ``torch.nn.modules.activation`` that do not act on every entry on its own, or are random."""


def activation_of(target: Any) -> Callable[[Tensor], Tensor] | None:
    """Return an activation function that acts on every entry on its own, or None if the target is something else.

    Args:
        target: a module, a function, or the name of a tensor method.
    """
    if isinstance(target, nn.Module):
        elementwise = type(target).__module__ == "torch.nn.modules.activation"
        return target if elementwise and not isinstance(target, NOT_ELEMENTWISE) else None
    try:
        return FUNCTIONS.get(target)
    except TypeError:  # the target is not hashable
        return None


def smoothed(activation: Callable[[Tensor], Tensor], z: Tensor, width: float) -> Tensor:
    """Return E[φ(z + width · u)] for u from the standard normal distribution.

    >>> z = torch.tensor([-3.0, 0.0, 3.0])
    >>> bool(torch.allclose(smoothed(torch.tanh, z, 1e-3), torch.tanh(z), atol=1e-5))
    True
    >>> round(float(smoothed(nn.ReLU(), torch.zeros(1), 1.0)), 4)  # 1/√(2π)
    0.3989
    """
    if activation in (functional.relu, torch.relu) or isinstance(activation, nn.ReLU):
        return _relu(z, width)
    if activation is functional.leaky_relu or isinstance(activation, nn.LeakyReLU):
        slope = getattr(activation, "negative_slope", 0.01)
        return slope * z + (1 - slope) * _relu(z, width)
    if activation is functional.gelu or isinstance(activation, nn.GELU):
        # z Φ(z) convolved with a normal distribution: z Φ(z/s) + w²/s φ(z/s) with s² = 1 + w², by Stein's lemma
        scale = math.sqrt(1 + width * width)
        return z * torch.special.ndtr(z / scale) + width * width / scale * _density(z / scale)
    total = WEIGHTS.sum()
    terms = [
        float(weight / total) * activation(z + width * float(node)) for node, weight in zip(NODES, WEIGHTS, strict=True)
    ]
    return torch.stack(terms).sum(0)


def max_pooling_of(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> nn.MaxPool2d | None:
    """Return a module with the settings of a two-dimensional max-pooling, or None if the target is something else.

    Args:
        target: a module or a function.
        args: the positional arguments of the function after its input.
        kwargs: the keyword arguments of the function.
    """
    if target in (functional.max_pool2d, torch.max_pool2d):
        if len(args) > 4:  # the function and the module have their further arguments in another order
            return None
        try:
            target = nn.MaxPool2d(*args, **{name: each for name, each in kwargs.items() if name != "input"})
        except TypeError:
            return None
    if type(target) is not nn.MaxPool2d or target.return_indices or target.ceil_mode:
        return None
    return target


def smoothed_max_pool(z: Float[Tensor, "k c h w"], pooling: nn.MaxPool2d, temperature: float) -> Tensor:
    """Return Σ softmax(z / temperature) · z over every window. It tends to max-pooling as the temperature tends to 0.

    >>> z = torch.randn(1, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    >>> pooling = nn.MaxPool2d(3, 2, padding=1)
    >>> bool(torch.allclose(smoothed_max_pool(z, pooling, 1e-4), pooling(z), atol=1e-3))
    True
    """
    size, stride, padding, dilation = (
        (each, each) if isinstance(each, int) else tuple(each)
        for each in (pooling.kernel_size, pooling.stride, pooling.padding, pooling.dilation)
    )
    least = float(torch.finfo(z.dtype).min) / 4
    padded = functional.pad(z, (padding[1], padding[1], padding[0], padding[0]), value=least)
    height, width = (
        (padded.shape[2 + axis] - dilation[axis] * (size[axis] - 1) - 1) // stride[axis] + 1 for axis in (0, 1)
    )
    windows = torch.stack(
        [
            padded[
                :,
                :,
                row * dilation[0] : row * dilation[0] + stride[0] * (height - 1) + 1 : stride[0],
                column * dilation[1] : column * dilation[1] + stride[1] * (width - 1) + 1 : stride[1],
            ]
            for row in range(size[0])
            for column in range(size[1])
        ]
    )
    shares = (windows / temperature).softmax(0)
    return (shares * windows).sum(0)


def _relu(z: Tensor, width: float) -> Tensor:
    return z * torch.special.ndtr(z / width) + width * _density(z / width)


def _density(u: Tensor) -> Tensor:
    return torch.exp(-u * u / 2) / math.sqrt(2 * math.pi)
