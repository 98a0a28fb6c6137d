"""The low-rank structure of a gradient: factors, rank (the batch size) and noise floor.

Ĝ = D X̂ᵀ has rank b. Its truncated singular value decomposition gives L = U_b, with orthonormal
columns, and R = Σ_b V_bᵀ; there is one Q with D = L Q and X̂ᵀ = Q⁻¹ R.

What is observed is Ĝ + E. Since L = (D X̂ᵀ + E) V_b Σ_b⁻¹, the true direction q_i gives
L q_i = d_i + E V_b Σ_b⁻¹ q_i exactly, so entry k carries noise of standard deviation
σ_k ‖Σ_b⁻¹ q_i‖, where σ_k is that of row k of E. The part of Ĝ outside the b leading singular
directions is nothing but noise and tells σ_k: rounding of any float format, DP noise and the
drift of local training all arrive here as one number a row.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from spearpp.errors import RankError
from spearpp.observation import Observation
from spearpp.shapes import Bool, Float, Tensor

CLEAR_GAP = 10.0
"""A ratio s_b / s_{b+1} that noise alone does not show (its own neighbours differ by less)."""
FLAT_TAIL = 3.0
"""How uneven the tail may be and still be noise: 1 for i.i.d. noise, up to 3.04 seen for rounding."""
IID_TAIL = 1.15
"""The same for noise that is i.i.d., as DP noise is; its singular values, too, may be off by this factor."""
SKETCH = 128
"""Columns of the first sketch of a large matrix."""
COARSE = 1e-10
"""Relative spacing of a dtype from which its own rounding exceeds what squaring loses."""
STEEP = 1e-4
"""Least singular value over the largest down to which a Gram matrix is exact enough."""
MARGIN = 16
"""Columns a sketch must have beyond the rank."""
ROUNDING = 8.0
"""How many times the rounding of its dtype a matrix may be off and still hold no more than rounding:
a client's sums round more often than once."""
STEP = 2.0
"""How far above rounding a sample must stand to count, where samples sink into it."""
FEWEST = 50
"""Singular values needed to tell strong noise from signal by their distribution."""


@dataclass(frozen=True)
class Factors:
    """Ĝ ≈ L R with the noise that was left over."""

    left: Float[Tensor, "m b"]
    """L = U_b; rows of neurons whose gradient is zero are zero."""
    right: Float[Tensor, "b columns"]
    """R = Σ_b V_bᵀ."""
    singular_values: Float[Tensor, "b"]
    """The diagonal of Σ_b."""
    spectrum: Float[Tensor, "r"]
    """All singular values of Ĝ without its zero rows and columns; of a large matrix whose noise is
    rounding, those beyond the first few hundred are given by their root mean square."""
    row_noise: Float[Tensor, "m"]
    """σ_k, the standard deviation of the noise in row k of Ĝ."""
    live: Bool[Tensor, "m"]
    """Neurons with a gradient; the others fired for no sample and say nothing."""

    @property
    def batch_size(self) -> int:
        """b, the number of factors."""
        return self.left.shape[1]

    @property
    def live_neurons(self) -> int:
        """The number of rows that carry information."""
        return int(self.live.sum())


def decompose(seen: Observation, batch_size: int | None = None) -> Factors:
    """Factor a gradient into its leading singular triplets, in float64.

    The fastest of three ways that can vouch for its result: ``by_gram``, ``by_sketch``, a complete decomposition.

    Args:
        seen: the layer.
        batch_size: b, or None to read it off the spectrum.

    Raises:
        RankError: if the rank fills the matrix, cannot be read, or is below the batch size given.

    >>> import torch
    >>> from spearpp.observation import observe
    >>> generator = torch.Generator().manual_seed(0)
    >>> gradient = torch.rand(30, 4, generator=generator) @ torch.rand(4, 50, generator=generator)
    >>> factors = decompose(observe(gradient, None, torch.zeros(30, 50), None))
    >>> factors.batch_size
    4
    >>> bool(torch.allclose(factors.left @ factors.right, gradient.double(), atol=1e-5))
    True
    """
    gradient = seen.gradient
    live, used = (gradient != 0).any(1), (gradient != 0).any(0)
    core = gradient[live][:, used]
    u, s, vt = (
        by_gram(core, seen.gradient_epsilon, batch_size)
        or by_sketch(core, seen.gradient_epsilon, batch_size)
        or torch.linalg.svd(core, full_matrices=False)
    )
    rank = numerical_rank(s, (core.shape[0], core.shape[1]), seen.gradient_epsilon)
    b = _agreed_rank(rank, batch_size, s, seen)
    left = gradient.new_zeros(gradient.shape[0], b)
    left[live] = u[:, :b]
    right = gradient.new_zeros(b, gradient.shape[1])
    right[:, used] = s[:b, None] * vt[:b]
    noise = gradient.new_zeros(gradient.shape[0])
    noise[live] = _row_noise(core, u[:, :b], s, s[:b, None] * vt[:b], seen.gradient_epsilon)
    return Factors(left=left, right=right, singular_values=s[:b], spectrum=s, row_noise=noise, live=live)


Triplets = tuple[Float[Tensor, "rows k"], Float[Tensor, "r"], Float[Tensor, "k columns"]]


def by_gram(core: Float[Tensor, "rows columns"], epsilon: float, batch_size: int | None = None) -> Triplets | None:
    """Leading singular triplets from eigenvectors of a Gram matrix; None where that is not exact enough.

    With B = Yᵀ Ĝ for an orthonormal Y, the eigenvectors of B Bᵀ are those of Ĝ Ĝᵀ within span(Y). Squaring costs
    digits: u_i is turned by at most ε₆₄ (s_1 / s_i)², a hundred-thousandth of what the rounding of a float32
    gradient turns it by, ε₃₂ s_1 / s_i, down to s_i = 1e-4 s_1. The values are taken as ‖uᵀĜ‖, which is not squared.

    Y is a sketch, the range of Ĝ Ĝᵀ orth(Ĝ Ω) for k random columns (the same every time), where what is left outside it
    is no more than rounding; k doubles until it holds the rank, and from half of the matrix on all of it is taken.
    """
    rows, columns = core.shape
    if epsilon < COARSE or min(rows, columns) < 2:
        return None
    mean_square = core.square().mean()
    for basis in _bases(core, batch_size):
        inside = core if basis is None else basis.T @ core
        outside = mean_square.new_zeros(()) if basis is None else (core - basis @ inside).square().sum()
        found = _eigen(inside)
        u, s, vt = found if basis is None else (basis @ found[0], found[1], found[2])
        rest = (outside / max(1, min(rows, columns) - len(s))).sqrt().expand(min(rows, columns) - len(s))
        s = torch.cat([s, rest])
        rank = numerical_rank(s, (rows, columns), epsilon)
        if basis is not None and (
            rank is None
            or rank + MARGIN > basis.shape[1]
            or bool(outside / core.numel() > (ROUNDING * epsilon) ** 2 / 12 * mean_square)
        ):
            continue
        b = max(rank or 0, batch_size or 0)
        if b == 0 or b >= len(vt) or bool(s[b - 1] < STEEP * s[0]):
            return None
        return u, s, vt
    return None


def _bases(core: Tensor, batch_size: int | None) -> Iterator[Tensor | None]:
    """Larger and larger orthonormal bases of the leading columns; at last None, for all of them."""
    rows, columns = core.shape
    k = SKETCH if batch_size is None else max(SKETCH, 2 ** (batch_size + MARGIN).bit_length())
    while k <= min(rows, columns) // 2:
        draw = torch.Generator(core.device).manual_seed(0)
        probes = torch.randn(columns, k, generator=draw, dtype=core.dtype, device=core.device)
        basis = torch.linalg.qr(core @ probes)[0]
        yield torch.linalg.qr(core @ (core.T @ basis))[0]
        k *= 2
    yield None


def _eigen(inside: Float[Tensor, "rows columns"]) -> Triplets:
    """Left vectors of B from B Bᵀ, or from BᵀB where that is smaller, the largest first."""
    rows, columns = inside.shape
    if rows <= columns:
        u = torch.linalg.eigh(inside @ inside.T)[1].flip(1)
    else:
        u = torch.linalg.qr(inside @ torch.linalg.eigh(inside.T @ inside)[1].flip(1))[0]
    rotated = u.T @ inside
    s, order = torch.linalg.vector_norm(rotated, dim=1).sort(descending=True, stable=True)
    tiny = torch.finfo(s.dtype).tiny
    return u[:, order], s, rotated[order] / s.clamp_min(tiny)[:, None]


def by_sketch(core: Float[Tensor, "rows columns"], epsilon: float, batch_size: int | None = None) -> Triplets | None:
    """The same to all digits, by a randomised range finder; None if it cannot tell.

    An orthonormal basis of k random combinations of the columns, improved by two power steps (Halko,
    Martinsson and Tropp 2011), holds all signal if what is left outside is no more than the rounding
    of the dtype the matrix came in. Then the other singular values are noise, and their root mean
    square is all that is needed of them. Otherwise k doubles, and from half of the matrix on a
    complete decomposition is no slower. The combinations are the same every time.
    """
    rows, columns = core.shape
    small = min(rows, columns)
    k = SKETCH if batch_size is None else max(SKETCH, 2 ** (batch_size + MARGIN).bit_length())
    mean_square = core.square().mean()
    while k <= small // 2:
        draw = torch.Generator(core.device).manual_seed(0)
        basis = torch.linalg.qr(core @ torch.randn(columns, k, generator=draw, dtype=core.dtype, device=core.device))[0]
        for _ in range(2):
            basis = torch.linalg.qr(core @ torch.linalg.qr(core.T @ basis)[0])[0]
        inside = basis.T @ core
        across, triangle = torch.linalg.qr(inside.T)
        u, s, vt = torch.linalg.svd(triangle.T)
        outside = (core - basis @ inside).square().sum()
        rest = (outside / (small - k)).sqrt().expand(small - k)
        rank = numerical_rank(torch.cat([s, rest]), (rows, columns), epsilon)
        if rank is not None and rank + MARGIN <= k:
            if bool(outside / core.numel() <= (ROUNDING * epsilon) ** 2 / 12 * mean_square):
                return basis @ u, torch.cat([s, rest]), vt @ across.T
            return None
        k *= 2
    return None


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
    s = spectrum.double().clamp_min(0.01 * epsilon * float(spectrum[0]))
    k = torch.arange(r, device=s.device, dtype=s.dtype)
    p, q = shape[0] - k, shape[1] - k
    tail = s.square().flip(0).cumsum(0).flip(0).sqrt()
    flatness = s * (p * q).sqrt() / (tail * (p.sqrt() + q.sqrt()))
    rounding = s <= max(epsilon, 100 * torch.finfo(torch.float64).eps) * s[0]
    gap = s[:-1] / s[1:]
    possible = (flatness[1:] <= FLAT_TAIL) | rounding[1:]
    # The last few singular values of a noise matrix fall towards zero by themselves.
    short = r - 1 - torch.arange(r - 1, device=s.device) < max(3, r // 50)
    gap = torch.where(possible & ~(short & (gap < CLEAR_GAP**2)), gap, 0.0)
    if shape[1] == 1:  # all inputs are zero: one sample to the gradient
        return 1
    clear = torch.nonzero(gap >= CLEAR_GAP)
    if len(clear):
        return int(clear[-1]) + 1
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


def _agreed_rank(rank: int | None, batch_size: int | None, spectrum: Tensor, seen: Observation) -> int:
    rows, columns = seen.gradient.shape
    full = min(rows, columns)
    if batch_size is None:
        if rank is not None:
            return rank
        raise RankError(
            f"rank {len(spectrum)} fills the ({rows}, {columns}) gradient: no gap in its spectrum tells samples from "
            "noise. Either the batch has more samples than this layer can hold, or the noise hides it; "
            "pass batch_size= if you know it"
        )
    if batch_size < 1:
        raise RankError(f"batch_size={batch_size}: a batch has at least one sample")
    if batch_size >= full:
        raise RankError(
            f"batch_size={batch_size}, but a ({rows}, {columns}) gradient can hold at most {full - 1} samples "
            "and still show which they are"
        )
    floor = torch.finfo(torch.float64).eps * max(rows, columns)
    visible = int((spectrum > floor * spectrum[:1].sum()).sum())
    if batch_size > visible or (rank is not None and batch_size > rank and _clear(spectrum, rank)):
        rank = visible if rank is None else rank
        raise RankError(
            f"batch_size={batch_size}, but the gradient has rank {rank}: the other {batch_size - rank} samples repeat "
            f"one in the batch, fire no neuron or lie below the noise. Pass batch_size={rank} or leave it out"
        )
    return batch_size


def _clear(spectrum: Tensor, rank: int) -> bool:
    return rank == 0 or bool(spectrum[rank - 1] >= CLEAR_GAP * spectrum[rank])


def _row_noise(core: Tensor, u: Tensor, s: Tensor, right: Tensor, epsilon: float) -> Float[Tensor, "rows"]:
    """σ_k from row k of the residual, drawn towards the mean where a row has few degrees of freedom.

    Never below the rounding of the dtype that the gradient arrived in, uniform within half a
    spacing and so of standard deviation ε/√12 relative to the entry.
    """
    rows, columns = core.shape
    b = u.shape[1]
    outside = torch.linalg.vector_norm(s[b:]) / max(1.0, (rows - b) * (columns - b)) ** 0.5
    leverage = u.square().sum(1)
    freedom = (columns - b) * (1 - leverage).clamp_min(0)
    prior = 8.0
    squares = (core - u @ right).square().sum(1)
    measured = ((squares + prior * outside**2) / (freedom + prior)).sqrt()
    rounding = epsilon / 12**0.5 * core.square().mean(1).sqrt()
    arithmetic = torch.finfo(torch.float64).eps * s[:1].sum() / max(1, min(rows, columns)) ** 0.5
    return torch.maximum(torch.maximum(measured, rounding), arithmetic)
