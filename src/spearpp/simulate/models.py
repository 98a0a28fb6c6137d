"""Networks for simulated clients."""

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
    """Return a fully connected ReLU network with PyTorch's default initialisation.

    The weights and biases of a layer with n inputs are uniform in ±1/√n. The network of the SPEAR++ paper is
    ``mlp(3072, [m, m, m], 10)``.

    Args:
        features: number of inputs.
        hidden: number of neurons of every hidden layer.
        classes: number of outputs.
        bias: whether the layers have a bias.
        generator: random generator for the initialisation. None means a generator with seed 0.
        dtype: dtype of the parameters.

    Raises:
        OptionError: if there is no hidden layer, or a width is less than 1.

    >>> [layer.weight.shape[0] for layer in mlp(8, [6, 5], 3) if hasattr(layer, "weight")]
    [6, 5, 3]
    """
    widths = [features, *hidden, classes]
    if min(widths) < 1 or not hidden:
        raise OptionError(f"widths {widths}: an MLP needs at least one hidden layer, and widths of at least 1")
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
