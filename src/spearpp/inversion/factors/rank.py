"""The rank of a gradient, which is the batch size: how many singular values are above the noise."""

import math

import torch

from spearpp.types import Float, Tensor

CLEAR_GAP = 10.0
"""Smallest ratio s_b / s_{b+1} of a clear gap. Measured on 60 combinations of size, dtype and noise: neighbouring
singular values of noise differ by less (``docs/lab/notebook.md``, "Reading the batch size")."""
FLAT_TAIL = 3.0
"""Largest flatness of singular values that are noise. Measured on the same 60 combinations: 1 for i.i.d. noise, and up
to 3.04 for rounding. A tail at the level of rounding may follow a clear gap whatever its flatness."""
IID_TAIL = 1.15
"""Largest flatness of i.i.d. noise, such as the noise of differential privacy. Also the largest factor by which a
singular value of i.i.d. noise may differ from the expected value. Measured on the same 60 combinations."""
ROUNDING = 8.0
"""Largest noise that is only rounding, as a multiple of the rounding error of the dtype. Measured: 2.8 to 3.5 for
float32, because the sums of a client round more than once (``docs/lab/notebook.md``, "The sketch")."""
ABOVE_ROUNDING = 2.0
"""Smallest ratio of the singular value of a sample and the largest singular value of rounding noise, if there is no
clear gap between them. Design choice: the input of a weaker sample would be mostly noise."""
ABOVE_NOISE = 1.25
"""Smallest ratio of the singular value of a sample and the edge of i.i.d. noise. Design choice: larger than
``IID_TAIL``, the factor by which noise itself may exceed the edge."""
MIN_TAIL = 50
"""Smallest number of singular values whose distribution can be compared with that of noise. Design choice: nine deciles
of fewer values are too uncertain."""
MIN_SINGULAR_VALUE = 0.01
"""Singular values below this multiple of ε s_1 are raised to it. Design choice: values far below rounding, as of exact
copies of a column, would otherwise form gaps. The limit is never below the rounding of float64, ε₆₄ s_1, because a
decomposition cannot resolve smaller values."""


def numerical_rank(spectrum: Float[Tensor, "r"], shape: tuple[int, int], epsilon: float) -> int | None:
    """Return the number of singular values above the noise; None if no rank below full can be determined.

    For a matrix of p x q i.i.d. noise, the largest singular value is close to σ (√p + √q) and the norm is close to
    σ √(p q). For the right rank k, the flatness of the tail

        t_k = s_{k+1} √(p q) / (‖s_{>k}‖ (√p + √q)),    p = rows - k, q = columns - k

    is therefore 1. It is larger if the tail still contains signal. The rank is determined by the first rule that
    applies:

    1. **Clear gap.** The last k with a gap s_k / s_{k+1} of at least ``CLEAR_GAP`` and a tail that is flat or at the
       level of rounding. The last one counts, because weak samples may follow after strong ones with a gap between
       them.
    2. **Samples that reach down to rounding**, as for a network that fits its data. The noise begins with the longest
       tail that is flat and no larger than rounding. Singular values of at least ``ABOVE_ROUNDING`` times the first
       value of this tail count as samples.
    3. **Strong noise.** The smallest k ≤ r/2 for which s_k exceeds the edge of the noise by ``ABOVE_NOISE``, and the
       tail has the distribution of i.i.d. noise (the Marchenko-Pastur law).

    A gradient of full rank satisfies none of these rules. The singular values are those of a matrix of this shape,
    largest first, and ε is the machine epsilon of the dtype in which the matrix was stored.

    >>> import torch
    >>> numerical_rank(torch.tensor([3.0, 2.0, 1e-7, 9e-8, 8e-8]).double(), (5, 9), 1e-7)
    2
    """
    r = len(spectrum)
    if r == 0:
        return 0
    s = spectrum.double().cpu()  # Many small operations on a few hundred numbers are faster on the CPU.
    s = s.clamp_min(max(MIN_SINGULAR_VALUE * epsilon, torch.finfo(torch.float64).eps) * float(s[0]))
    k = torch.arange(r, dtype=s.dtype)
    p, q = shape[0] - k, shape[1] - k
    tail, flatness, gap = _tail_statistics(s, shape, epsilon)
    if shape[1] == 1:  # Only the bias has a gradient: all inputs are zero and count as one sample.
        return 1
    clear = torch.nonzero(gap >= CLEAR_GAP)
    if len(clear):
        return _with_weak_samples(s, flatness, int(clear[-1]) + 1)
    only_rounding = tail / (p * q).sqrt() <= ROUNDING * epsilon / 12**0.5 * tail[0] / (shape[0] * shape[1]) ** 0.5
    rounding_tails = torch.nonzero((flatness <= FLAT_TAIL) & only_rounding & (r - k >= MIN_TAIL))
    if len(rounding_tails) and rounding_tails[0] > 0:
        return int((s >= ABOVE_ROUNDING * s[rounding_tails[0]]).sum())
    above = torch.cat([s.new_zeros(1), s[:-1]]) * flatness / s  # s_k divided by the edge of the noise
    possible = (flatness <= IID_TAIL) & (above >= ABOVE_NOISE) & (k <= r / 2) & (r - k >= MIN_TAIL)
    for candidate in torch.nonzero(possible)[:, 0].tolist():
        if _is_iid_noise(s[candidate:], shape[0] - candidate, shape[1] - candidate):
            return int(candidate)
    return None


def has_clear_gap(spectrum: Float[Tensor, "r"], rank: int) -> bool:
    """Return whether the singular values have a clear gap after the first ``rank`` values, which must be fewer than r.

    >>> import torch
    >>> has_clear_gap(torch.tensor([3.0, 2.0, 1e-7]), 2), has_clear_gap(torch.tensor([3.0, 2.0, 1e-7]), 1)
    (True, False)
    """
    return rank == 0 or bool(spectrum[rank - 1] >= CLEAR_GAP * spectrum[rank])


def _with_weak_samples(s: Float[Tensor, "r"], flatness: Float[Tensor, "r"], rank: int) -> int:
    """Return the rank after a clear gap, including weak samples: singular values that make the tail uneven.

    The difference of two nearly equal samples can have a singular value as small as the rounding of the largest
    singular value, and still be above the rounding of its own entries. Without it, all other inputs would have an
    error.
    """
    flat = torch.nonzero(flatness[rank:] <= FLAT_TAIL)
    if not len(flat) or flat[0] == 0 or len(s) - rank - int(flat[0]) < MIN_TAIL:
        return rank
    end = rank + int(flat[0])
    return end if s[end - 1] >= ABOVE_ROUNDING * s[end] else rank


def _tail_statistics(
    s: Float[Tensor, "r"], shape: tuple[int, int], epsilon: float
) -> tuple[Float[Tensor, "r"], Float[Tensor, "r"], Float[Tensor, "gaps"]]:
    """Return the norm of each tail s_{>k}, its flatness t_k, and the gap before it.

    The gap is zero if the tail cannot be noise, because the tail is neither flat nor at the level of rounding.
    """
    r = len(s)
    k = torch.arange(r, dtype=s.dtype)
    p, q = shape[0] - k, shape[1] - k
    tail = s.square().flip(0).cumsum(0).flip(0).sqrt()
    flatness = s * (p * q).sqrt() / (tail * (p.sqrt() + q.sqrt()))
    rounding = s <= max(epsilon, 100 * torch.finfo(torch.float64).eps) * s[0]
    gap = s[:-1] / s[1:]
    possible = (flatness[1:] <= FLAT_TAIL) | rounding[1:]
    # The last few singular values of a noise matrix are close to zero. Gaps between them count only if they are wide.
    short = r - 1 - torch.arange(r - 1) < max(3, r // 50)
    return tail, flatness, torch.where(possible & ~(short & (gap < CLEAR_GAP**2)), gap, 0.0)


def _is_iid_noise(tail: Float[Tensor, "t"], rows: int, columns: int) -> bool:
    """Return whether the deciles of singular values are those of a rows x columns matrix of i.i.d. noise.

    The squared singular values of such a matrix, divided by σ² max(rows, columns), follow the Marchenko-Pastur law with
    ratio β = min(rows, columns) / max(rows, columns). σ is computed from the norm of the tail.
    """
    small, large = min(rows, columns), max(rows, columns)
    beta = small / large
    low, high = (1 - beta**0.5) ** 2, (1 + beta**0.5) ** 2
    angle = torch.linspace(0, math.pi, 4001, dtype=tail.dtype, device=tail.device)
    square = (low + high) / 2 - (high - low) / 2 * torch.cos(angle)  # density √((x-low)(high-x)) / x, times dx
    mass = (torch.sin(angle).square() / square.clamp_min(1e-12)).cumsum(0)
    quantiles = torch.linspace(0.9, 0.1, 9, dtype=tail.dtype, device=tail.device)
    expected = square[torch.searchsorted(mass / mass[-1], quantiles).clamp_max(4000)].sqrt()
    sigma = torch.linalg.vector_norm(tail) / (rows * columns) ** 0.5
    observed = tail[((1 - quantiles) * (len(tail) - 1)).round().long()] / (sigma * large**0.5)
    return bool((observed / expected - 1).abs().max() <= IID_TAIL - 1)
