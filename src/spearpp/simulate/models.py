"""Networks to attack."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from spearpp.errors import OptionError


def mlp(
    features: int,
    hidden: Sequence[int],
    classes: int,
    *,
    bias: bool = True,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
) -> nn.Sequential:
    """A fully connected ReLU network with PyTorch's default initialisation, drawn from ``generator``.

    Weights and biases of a layer with n inputs are uniform in ±1/√n. The paper's network is
    ``mlp(3072, [m, m, m], 10)``.

    >>> [layer.weight.shape[0] for layer in mlp(8, [6, 5], 3) if hasattr(layer, "weight")]
    [6, 5, 3]
    """
    widths = [features, *hidden, classes]
    if min(widths) < 1 or not hidden:
        raise OptionError(f"an MLP of widths {widths}: at least one hidden layer, every width at least 1")
    generator = generator or torch.Generator().manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layer = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
        with torch.no_grad():
            for parameter in layer.parameters():
                drawn = torch.rand(parameter.shape, generator=generator, device=generator.device)
                parameter.copy_((2 * drawn - 1) / math.sqrt(inputs))
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])
