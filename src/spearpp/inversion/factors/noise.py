"""The noise of every row of a gradient, read off what its leading singular triplets leave over."""

import torch

from spearpp.linalg.chunks import chunk_size
from spearpp.types import Bool, Float, Int, Tensor


def not_zero(gradient: Float[Tensor, "*u m columns"]) -> tuple[Bool[Tensor, "*u m"], Bool[Tensor, "*u columns"]]:
    """Rows and columns that are not zero."""
    entries = gradient != 0
    return entries.any(-1), entries.any(-2)


def left_over(core: Tensor, u: Tensor, right: Tensor) -> Float[Tensor, "rows"]:
    """The squared norm of each row of Ĝ - L R, some rows at a time."""
    size = chunk_size(core.device, core.element_size() * max(1, core.shape[1]))
    parts = zip(core.split(size), u.split(size), strict=True)
    return torch.cat([(part - some @ right).square().sum(1) for part, some in parts])


def row_noise(
    sizes: tuple[Int[Tensor, "*u"], Int[Tensor, "*u"]],
    u: Float[Tensor, "*u rows b"],
    s: Float[Tensor, "*u r"],
    squares: Float[Tensor, "*u rows"],
    norms: Float[Tensor, "*u rows"],
    epsilon: float,
) -> Float[Tensor, "*u rows"]:
    """σ_k from the squared norm of row k of the residual, drawn towards the mean where that has few degrees of freedom.

    Never below the rounding of the dtype that the gradient arrived in, uniform within half a
    spacing and so of standard deviation ε/√12 relative to the entry.
    """
    rows, columns = (each.double()[..., None] for each in sizes)
    b, prior = u.shape[-1], 8.0
    outside = squares.sum(-1, keepdim=True) / ((rows - b) * (columns - b)).clamp_min(1)
    freedom = (columns - b) * (1 - u.square().sum(-1)).clamp_min(0)
    measured = ((squares + prior * outside) / (freedom + prior)).sqrt()
    rounding = epsilon / 12**0.5 * norms / columns.clamp_min(1).sqrt()
    arithmetic = torch.finfo(torch.float64).eps * s[..., :1] / torch.minimum(rows, columns).clamp_min(1).sqrt()
    return torch.maximum(torch.maximum(measured, rounding), arithmetic)
