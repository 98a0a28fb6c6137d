"""Measure an update: its number format, the sizes of its entries, and the rank, noise and weight decay of a layer."""

from dataclasses import dataclass

import torch

from spearpp.inversion.factors.rank import ROUNDING, numerical_rank
from spearpp.linalg.chunks import MIN_GRAM_ENTRIES_FOR_THREADS, single_thread_if_small
from spearpp.types import Float, Tensor
from spearpp.update import ClientUpdate
from spearpp.update.lazy import NUMBERS_PER_BLOCK, Named, blocks, tensor_specs

SAMPLED_ENTRIES = 200_000
"""Number of entries of a gradient that are examined for its number format. A design choice: 200,000 entries show each
of 256 quantisation levels many times, and examining them takes milliseconds."""
MIN_ENTRIES = 100
"""Smallest number of nonzero entries for which the number format is examined. A design choice: the percentiles of fewer
entries are unreliable."""
HALF_TYPES = {torch.bfloat16: ("bfloat16", "4e-3"), torch.float16: ("float16", "5e-4")}
"""Names and relative rounding errors of the 16-bit formats: 2⁻⁸ and 2⁻¹¹. bfloat16 is first, because most of its values
are float16 values too."""
FULL_RANK_SHARE = 0.75
"""A gradient has full rank if its rank is at least this share of the number of its nonzero rows or columns, whichever
is smaller. Measured: 0.85 after two steps of AdamW, whose weight decay moves the weights of dead neurons too, and 0.78
after 20 steps of Adam on digits, whose constant pixels give proportional columns."""
SUBSET_SHAPE = (512, 2048)
"""Numbers of rows and columns from which the spectrum is computed first. Up to twice as many are used. Measured: with
this subset the check of a network with 9.8 million parameters takes 0.35 s on 2 CPU cores (``docs/lab/notebook.md``,
Audits)."""
MAX_UNEXPLAINED = 0.2
"""Largest share of the tail of the spectrum that weight decay may leave unexplained. A design choice: noise leaves a
share of nearly 1, and weight decay leaves only rounding and weak noise."""


def sizes_at(values: Float[Tensor, "sampled"], *levels: float) -> list[float] | None:
    """Return quantiles of the magnitudes of the entries that are not zero, or None if there are too few entries."""
    size = values[values != 0].abs()
    if len(size) < MIN_ENTRIES:
        return None
    return torch.quantile(size[:: max(1, len(size) // 10_000)], torch.tensor(levels, device=size.device)).tolist()


def half_precision(values: Float[Tensor, "sampled"]) -> tuple[str, str] | None:
    """Return name and relative rounding error of the 16-bit format that holds all values, or None."""
    if not bool(values.any()):
        return None
    return next((what for dtype, what in HALF_TYPES.items() if bool((values.to(dtype).float() == values).all())), None)


def sample(tensors: Named, name: str) -> Float[Tensor, "sampled"]:
    """Return evenly spaced entries of a tensor, in float32."""
    spec = tensor_specs(tensors)[name]
    step = max(1, spec.numel() // SAMPLED_ENTRIES)
    # The result is allocated first: small tensors that are allocated between blocks would keep the blocks' memory.
    values = torch.empty(-(-spec.numel() // step), device=spec.device)
    position, filled = 0, 0
    for block in blocks(tensors, name):
        entries = block.flatten()[-position % step :: step]
        values[filled : filled + len(entries)] = entries
        position, filled = position + block.numel(), filled + len(entries)
    return values


def share_of_zero_rows_and_columns(tensors: Named, name: str) -> float:
    """Return the share of a tensor in rows and columns of zeros, which come from dead neurons and black pixels."""
    shape = tensor_specs(tensors)[name].shape
    rows, columns = _nonzero_rows_and_columns(tensors, name)
    return 1 - rows * columns / max(1, shape.numel())


def _nonzero_rows_and_columns(tensors: Named, name: str) -> tuple[int, int]:
    """Return the number of rows and of columns of a tensor that are not zero throughout."""
    rows, columns = [], []
    for block in blocks(tensors, name):
        matrix = block.flatten(1) if block.ndim > 1 else block.reshape(-1, 1)
        rows.append(matrix.any(1))
        columns.append(matrix.any(0))
    return int(torch.cat(rows).sum()), int(torch.stack(columns).any(0).sum())


def share_of_weights(update: ClientUpdate, name: str) -> tuple[float, float]:
    """Return c of the best fit c W to one tensor of the update, and the correlation of this tensor with W.

    For weights and deltas, the update is scaled back to the change of the weights, before - after.
    """
    sent, weight = sample(update.gradients, name).double() * update.scale, sample(update.weights, name).double()
    product, square = float(sent @ weight.to(sent)), float(weight @ weight)
    size = float(torch.linalg.vector_norm(sent)) * square**0.5
    return (product / square, product / size) if size > 0 else (0.0, 0.0)


def has_full_rank(gradients: Named, name: str, rank: int | None) -> bool:
    """Return whether a gradient has full rank, without its rows and columns that are zero throughout."""
    return rank is None or rank >= FULL_RANK_SHARE * min(_nonzero_rows_and_columns(gradients, name))


@dataclass(frozen=True)
class Spectrum:
    """What the singular values of one layer's gradient show."""

    rank: int | None
    """Number of samples above the noise. None if the rank is full."""
    noise: float
    """Standard deviation of the noise of an entry, relative to the root mean square of all entries."""
    decay: float
    """λ if the gradient is the sum of a matrix of low rank and λ W, which is weight decay. Otherwise 0."""


def quick_spectrum(gradients: Named, weights: Named, name: str, bias: str | None = None) -> Spectrum:
    """Return rank, noise and weight decay of a gradient, from the eigenvalues of its Gram matrix.

    The Gram matrix loses half of the digits of float64, and float32 has no more digits than the remaining half. For a
    large gradient, every second or third row and column is enough: this part has the same rank, unless the part has
    full rank. The gradient of the bias is one more column of the matrix, as in the inversion.
    """
    shape = tensor_specs(gradients)[name].shape
    row_step, column_step = (max(1, size // most) for size, most in zip(shape, SUBSET_SHAPE, strict=True))
    column = None if bias is None else gradients[bias]
    sent, weight = (_every_kth(each, name, row_step, column_step) for each in (gradients, weights))
    found = _spectrum(sent, weight, None if column is None else column[::row_step])
    enough = row_step == column_step == 1 or found.rank is not None or found.decay > 0
    return found if enough else _spectrum(gradients[name], weights[name], column)


def _every_kth(tensors: Named, name: str, row_step: int, column_step: int) -> Float[Tensor, "rows columns"]:
    """Return every k-th row and column of a matrix, to estimate its spectrum cheaply."""
    spec = tensor_specs(tensors)[name]
    height, width = spec.shape
    values = torch.empty(-(-height // row_step), -(-width // column_step), dtype=spec.dtype, device=spec.device)
    position, filled = 0, 0
    for block in blocks(tensors, name):
        part = block[-position % row_step :: row_step, ::column_step]
        values[filled : filled + len(part)] = part
        position, filled = position + len(block), filled + len(part)
    return values


def _spectrum(
    gradient: Float[Tensor, "m n"], weight: Float[Tensor, "m n"], bias: Float[Tensor, "m"] | None = None
) -> Spectrum:
    """Return rank, noise and weight decay of one gradient in memory. The weight decay is that of the weight alone."""
    whole = gradient if bias is None else torch.cat([gradient, bias[:, None].to(gradient)], dim=1)
    wide = whole.shape[0] <= whole.shape[1]
    core = whole.double() if wide else whole.double().T
    epsilon = max(torch.finfo(gradient.dtype).eps, torch.finfo(torch.float32).eps)
    with single_thread_if_small(core.shape[0] ** 2, core.device, MIN_GRAM_ENTRIES_FOR_THREADS):
        gram = core @ core.T
        values = torch.linalg.eigvalsh(gram).clamp_min(0).sqrt().flip(0)
    rank = numerical_rank(values, (core.shape[0], core.shape[1]), epsilon)
    k = len(values) // 2 if rank is None else rank
    rounding = ROUNDING * epsilon * torch.linalg.vector_norm(values)
    if (
        torch.linalg.vector_norm(values[k:]) > rounding
        and 0 < k <= len(values) - max(8, len(values) // 8)
        and bool(weight.any())
    ):
        own, other = (each.double() if wide else each.double().T for each in (gradient, weight))
        _, vectors = torch.linalg.eigh(gram if bias is None else own @ own.T)
        leading = torch.linalg.qr(own.T @ vectors[:, -k:])[0]
        decay, unexplained = _decay(own, other, vectors[:, :-k], leading)
        if unexplained < MAX_UNEXPLAINED and decay > 0:
            return Spectrum(rank, 0.0, decay)
    size = torch.linalg.vector_norm(values)
    tail_size = torch.linalg.vector_norm(values[rank:]) if rank is not None else size
    freedom = (max(1, core.shape[0] - (rank or 0)) * max(1, core.shape[1] - (rank or 0))) ** 0.5
    noise = float(tail_size / freedom / (size / core.numel() ** 0.5).clamp_min(torch.finfo(size.dtype).tiny))
    return Spectrum(rank, noise, 0.0)


def _decay(
    core: Float[Tensor, "m n"], weight: Float[Tensor, "m n"], tail: Float[Tensor, "m t"], leading: Float[Tensor, "n k"]
) -> tuple[float, float]:
    """Return the λ that fits best, and the share of the tail that λ W does not explain.

    Outside of the leading singular directions on both sides, only λ W and noise remain. The products are computed for a
    few rows at a time, to save memory.
    """
    product, weight_square, tail_square = 0.0, 0.0, 0.0
    for some in tail.T.split(max(1, NUMBERS_PER_BLOCK // core.shape[1])):
        rest, weight_rest = some @ core, some @ weight
        weight_rest -= (weight_rest @ leading) @ leading.T
        product += float((rest * weight_rest).sum())
        weight_square += float(weight_rest.square().sum())
        tail_square += float(rest.square().sum())
    if not weight_square or not tail_square:
        return 0.0, 1.0
    decay = product / weight_square
    return decay, max(0.0, 1 - product * decay / tail_square) ** 0.5
