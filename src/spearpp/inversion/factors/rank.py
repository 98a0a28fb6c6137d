"""The rank of a gradient, which is the batch size: where its spectrum ends and noise begins."""

import math

import torch

from spearpp.types import Float, Tensor

CLEAR_GAP = 10.0
"""A ratio s_b / s_{b+1} that noise alone does not show (its own neighbours differ by less)."""
FLAT_TAIL = 3.0
"""How uneven the tail may be and still be noise: 1 for i.i.d. noise, up to 3.04 seen for rounding."""
IID_TAIL = 1.15
"""The same for noise that is i.i.d., as DP noise is; its singular values, too, may be off by this factor."""
ROUNDING = 8.0
"""How many times the rounding of its dtype a matrix may be off and still hold no more than rounding:
a client's sums round more often than once."""
STEP = 2.0
"""How far above rounding a sample must stand to count, where samples sink into it."""
FEWEST = 50
"""Singular values needed to tell strong noise from signal by their distribution."""


def numerical_rank(spectrum: Float[Tensor, "r"], shape: tuple[int, int], epsilon: float) -> int | None:
    """How many singular values stand above the noise; None if no rank below full can be read.

    Args:
        spectrum: singular values, falling.
        shape: rows and columns of the matrix.
        epsilon: relative spacing of the dtype it was stored in. Singular values under a hundredth
            of that count as equal: exact copies of a column go down to zero and mean nothing.

    For a noise matrix of p x q i.i.d. entries the largest singular value is close to
    σ (√p + √q) and the norm to σ √(p q), so for the right k the flatness

        t_k = s_{k+1} √(p q) / (‖s_{>k}‖ (√p + √q)),    p = rows - k, q = columns - k

    is 1, and it is larger while signal is left in the tail. The rank is the last k with a clear gap
    s_k / s_{k+1} and a flat tail, or one at the level of rounding: weak samples may follow on strong
    ones after a gap of their own. If there is none, weak samples may sink into the rounding one by one,
    as those do that a trained network is sure of: then the largest tail that is flat and no more than
    rounding begins with the noise, and what is twice as large counts. Else the noise is strong, and the
    rank is the least k ≤ r/2 for which s_k stands out by a quarter and the tail has the singular values of i.i.d. noise
    (Marchenko and Pastur). A full-rank gradient has no such tail.

    >>> import torch
    >>> numerical_rank(torch.tensor([3.0, 2.0, 1e-7, 9e-8, 8e-8]).double(), (5, 9), 1e-7)
    2
    """
    r = len(spectrum)
    if r == 0:
        return 0
    s = spectrum.double().cpu()  # a few hundred numbers and many questions
    s = s.clamp_min(0.01 * epsilon * float(s[0]))
    k = torch.arange(r, dtype=s.dtype)
    p, q = shape[0] - k, shape[1] - k
    tail, flatness, gap = _looks(s, shape, epsilon)
    if shape[1] == 1:  # all inputs are zero: one sample to the gradient
        return 1
    clear = torch.nonzero(gap >= CLEAR_GAP)
    if len(clear):
        return _with_faint(s, flatness, int(clear[-1]) + 1)
    rounded = tail / (p * q).sqrt() <= ROUNDING * epsilon / 12**0.5 * tail[0] / (shape[0] * shape[1]) ** 0.5
    sunk = torch.nonzero((flatness <= FLAT_TAIL) & rounded & (r - k >= FEWEST))
    if len(sunk) and sunk[0] > 0:
        return int((s >= STEP * s[sunk[0]]).sum())
    above = torch.cat([s.new_zeros(1), s[:-1]]) * flatness / s  # s_k over the edge of the noise
    strong = (flatness <= IID_TAIL) & (above >= 1.25) & (k <= r / 2) & (r - k >= FEWEST)
    for candidate in torch.nonzero(strong)[:, 0].tolist():
        if _is_noise(s[candidate:], shape[0] - candidate, shape[1] - candidate):
            return int(candidate)
    return None


def _with_faint(s: Float[Tensor, "r"], flatness: Float[Tensor, "r"], rank: int) -> int:
    """The rank beyond a clear gap: singular values of rounding's size count as samples if they make the tail uneven.

    A direction that nearly equal samples share may be as small as the rounding of the largest singular value and still
    stand above the rounding of its own entries. Left out, it would be an error of all other inputs.
    """
    flat = torch.nonzero(flatness[rank:] <= FLAT_TAIL)
    if not len(flat) or flat[0] == 0 or len(s) - rank - int(flat[0]) < FEWEST:
        return rank
    after = rank + int(flat[0])
    return after if s[after - 1] >= STEP * s[after] else rank


def clear_ranks(spectra: Float[Tensor, "u r"], shape: tuple[int, int], epsilon: float) -> list[int | None]:
    """``numerical_rank`` of many matrices of one shape, where a clear gap tells it; None for the others.

    >>> import torch
    >>> clear_ranks(torch.tensor([[3.0, 2.0, 1e-7, 9e-8, 8e-8], [3.0, 1e-7, 1e-7, 9e-8, 8e-8]]).double(), (5, 9), 1e-7)
    [2, 1]
    """
    s = spectra.double().cpu()
    s = torch.maximum(s, 0.01 * epsilon * s[:, :1])
    _, flatness, gap = _looks(s, shape, epsilon)
    clear = gap >= CLEAR_GAP
    last = s.shape[1] - 1 - clear.flip(1).int().argmax(1)
    told = clear.any(1) & (flatness.gather(1, last[:, None])[:, 0] <= FLAT_TAIL)
    return [rank if sure else None for rank, sure in zip(last.tolist(), told.tolist(), strict=True)]


def _looks(
    s: Float[Tensor, "*u r"], shape: tuple[int, int], epsilon: float
) -> tuple[Float[Tensor, "*u r"], Float[Tensor, "*u r"], Float[Tensor, "*u gaps"]]:
    """The norm of each tail, its flatness, and the gap before it where the rest may be noise, else zero."""
    r = s.shape[-1]
    k = torch.arange(r, dtype=s.dtype)
    p, q = shape[0] - k, shape[1] - k
    tail = s.square().flip(-1).cumsum(-1).flip(-1).sqrt()
    flatness = s * (p * q).sqrt() / (tail * (p.sqrt() + q.sqrt()))
    rounding = s <= max(epsilon, 100 * torch.finfo(torch.float64).eps) * s[..., :1]
    gap = s[..., :-1] / s[..., 1:]
    possible = (flatness[..., 1:] <= FLAT_TAIL) | rounding[..., 1:]
    # The last few singular values of a noise matrix fall towards zero by themselves.
    short = r - 1 - torch.arange(r - 1) < max(3, r // 50)
    return tail, flatness, torch.where(possible & ~(short & (gap < CLEAR_GAP**2)), gap, 0.0)


def _is_noise(tail: Float[Tensor, "t"], rows: int, columns: int) -> bool:
    """Whether singular values are those of a rows x columns matrix of i.i.d. noise, but for the ends.

    The squares of such a matrix's singular values, over σ² max(rows, columns), follow the
    Marchenko-Pastur law with ratio β; σ is taken from the tail's own norm.
    """
    small, large = min(rows, columns), max(rows, columns)
    beta = small / large
    low, high = (1 - beta**0.5) ** 2, (1 + beta**0.5) ** 2
    angle = torch.linspace(0, math.pi, 4001, dtype=tail.dtype, device=tail.device)
    square = (low + high) / 2 - (high - low) / 2 * torch.cos(angle)  # density √((x-low)(high-x)) / x, times dx
    mass = (torch.sin(angle).square() / square.clamp_min(1e-12)).cumsum(0)
    places = torch.linspace(0.9, 0.1, 9, dtype=tail.dtype, device=tail.device)
    expected = square[torch.searchsorted(mass / mass[-1], places).clamp_max(4000)].sqrt()
    sigma = torch.linalg.vector_norm(tail) / (rows * columns) ** 0.5
    seen = tail[((1 - places) * (len(tail) - 1)).round().long()] / (sigma * large**0.5)
    return bool((seen / expected - 1).abs().max() <= IID_TAIL - 1)
