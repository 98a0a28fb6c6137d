"""Leading singular triplets of a matrix, computed faster than by a complete decomposition.

The functions ``by_gram`` and ``by_sketch`` return None if they cannot guarantee that the result is accurate enough.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from spearpp.inversion.factors.factors import squared_residuals
from spearpp.inversion.factors.rank import ROUNDING, numerical_rank
from spearpp.types import Float, Tensor

FIRST_SKETCH = 128
"""Number of columns of the first sketch of a large matrix. Design choice: it holds batches of up to 112
samples. Matrices with fewer than 256 rows or columns are decomposed without a sketch, which takes little time."""
MIN_GRAM_EPSILON = 1e-10
"""Smallest machine epsilon of a dtype for which Gram matrices are used. Derived: the rounding of such a dtype (float32
and coarser) exceeds the error that squaring a matrix causes in float64."""
MIN_GRAM_RATIO = 1e-6
"""Smallest ratio s_b / s_1 for which Gram matrices are used. Derived: a Gram matrix turns u_b by at most
ε₆₄ (s_1 / s_b)² = 2e-4, and the rounding of a float32 gradient turns u_b by ε₃₂ s_1 / s_b = 0.1. Measured with GELU,
b = 450 and m = 1000: s_b / s_1 is 3e-5 at the third layer, where the two angles are 5e-8 and 5e-4."""
SKETCH_MARGIN = 16
"""Number of columns that a sketch must have beyond the rank. Design choice: Halko, Martinsson and Tropp (2011)
recommend 5 to 10 for a randomised range finder."""


class Leading(NamedTuple):
    """The leading singular triplets of a matrix."""

    u: Float[Tensor, "rows k"]
    s: Float[Tensor, "r"]
    """All singular values. Values outside a sketch are replaced by their root mean square."""
    vt: Float[Tensor, "k columns"]
    rank: int | None
    """The ``numerical_rank`` of the matrix."""


Triplets = tuple[Float[Tensor, "rows k"], Float[Tensor, "r"], Float[Tensor, "k columns"]]
"""Left singular vectors, singular values and right singular vectors."""


def by_gram(core: Float[Tensor, "rows columns"], epsilon: float, batch_size: int | None = None) -> Leading | None:
    """Return leading singular triplets from the eigenvectors of a Gram matrix; None if they are not exact enough.

    For an orthonormal Y and B = YᵀĜ, the eigenvectors of B Bᵀ are those of Ĝ Ĝᵀ within span(Y). Squaring costs
    precision: u_i is turned by at most ε₆₄ (s_1 / s_i)². Down to s_i = 1e-6 s_1 this is at most a five-hundredth of
    the angle ε₃₂ s_1 / s_i by which the rounding of a float32 gradient turns u_i. The singular values are computed as
    ‖uᵀĜ‖, which squares nothing.

    Y is a sketch: the range of Ĝ Ĝᵀ orth(Ĝ Ω), where Ω has k random columns from a fixed seed. The sketch is used if
    the part of Ĝ outside span(Y) is no larger than rounding. k doubles until the sketch contains the rank. If k exceeds
    half of the matrix, the Gram matrix of the whole matrix is used.

    Args:
        core: Ĝ without its zero rows and columns.
        epsilon: machine epsilon of the dtype in which the gradient was passed.
        batch_size: b, if it is known.
    """
    if epsilon < MIN_GRAM_EPSILON or min(core.shape) < 2:
        return None

    def improve(basis: Tensor) -> Tensor:
        return torch.linalg.qr(core @ (core.T @ basis))[0]

    found = _sketched(core, epsilon, batch_size, improve, by_eigenvectors) or ranked(core, by_eigenvectors, epsilon)
    b = max(found.rank or 0, batch_size or 0)
    exact_enough = 0 < b < len(found.vt) and bool(found.s[b - 1] >= MIN_GRAM_RATIO * found.s[0])
    return found if exact_enough else None


def by_sketch(core: Float[Tensor, "rows columns"], epsilon: float, batch_size: int | None = None) -> Leading | None:
    """Return leading singular triplets to full precision by a randomised range finder; None if it is not conclusive.

    The sketch is an orthonormal basis of k random combinations of the columns, improved by two power steps (Halko,
    Martinsson and Tropp 2011). The sketch contains all signal if the part of the matrix outside it is no larger than
    the rounding of the dtype in which the matrix was passed. The remaining singular values are then noise, of which
    only the root mean square is needed. Otherwise k doubles. If k exceeds half of the matrix, a complete decomposition
    is no slower, and the result is None. The random combinations come from a fixed seed. The arguments are those of
    ``by_gram``.
    """

    def improve(basis: Tensor) -> Tensor:
        for _ in range(2):
            basis = torch.linalg.qr(core @ torch.linalg.qr(core.T @ basis)[0])[0]
        return basis

    return _sketched(core, epsilon, batch_size, improve, _by_triangle)


def ranked(core: Float[Tensor, "rows columns"], solve: Callable[[Tensor], Triplets], epsilon: float) -> Leading:
    """Return all singular triplets that ``solve`` computes, and the rank."""
    u, s, vt = solve(core)
    return Leading(u, s, vt, numerical_rank(s, (core.shape[0], core.shape[1]), epsilon))


def _sketched(
    core: Float[Tensor, "rows columns"],
    epsilon: float,
    batch_size: int | None,
    improve: Callable[[Tensor], Tensor],
    solve: Callable[[Tensor], Triplets],
) -> Leading | None:
    """Return the triplets within the span of k random combinations of the columns; None if signal lies outside it.

    ``improve`` turns an orthonormal basis towards the leading left singular vectors, and ``solve`` returns all singular
    triplets of a wide matrix. The other arguments are those of ``by_gram``.
    """
    rows, columns = core.shape
    small = min(rows, columns)
    rounding = (ROUNDING * epsilon) ** 2 / 12 * torch.linalg.matrix_norm(core).square()
    k = FIRST_SKETCH if batch_size is None else max(FIRST_SKETCH, 2 ** (batch_size + SKETCH_MARGIN).bit_length())
    while k <= small // 2:
        generator = torch.Generator(core.device).manual_seed(0)
        probes = torch.randn(columns, k, generator=generator, dtype=core.dtype, device=core.device)
        basis = improve(torch.linalg.qr(core @ probes)[0])
        inside = basis.T @ core
        u, s, vt = solve(inside)
        outside = squared_residuals(core, basis, inside).sum()
        s = torch.cat([s, (outside / (small - k)).sqrt().expand(small - k)])
        rank = numerical_rank(s, (rows, columns), epsilon)
        if rank is not None and rank + SKETCH_MARGIN <= k:
            return Leading(basis @ u, s, vt, rank) if bool(outside <= rounding) else None
        k *= 2
    return None


def by_eigenvectors(inside: Float[Tensor, "rows columns"]) -> Triplets:
    """Return the singular triplets of B from the eigenvectors of B Bᵀ, or of BᵀB if that is smaller; largest first."""
    rows, columns = inside.shape
    if rows <= columns:
        u = torch.linalg.eigh(inside @ inside.T)[1].flip(1)
    else:
        u = torch.linalg.qr(inside @ torch.linalg.eigh(inside.T @ inside)[1].flip(1))[0]
    rotated = u.T @ inside
    s, order = torch.linalg.vector_norm(rotated, dim=1).sort(descending=True, stable=True)
    return u[:, order], s, rotated[order] / s.clamp_min(torch.finfo(s.dtype).tiny)[:, None]


def _by_triangle(inside: Float[Tensor, "rows columns"]) -> Triplets:
    """Return the singular triplets of a wide matrix B from those of the small triangular factor T in Bᵀ = Q T."""
    basis, triangle = torch.linalg.qr(inside.T)
    u, s, vt = torch.linalg.svd(triangle.T)
    return u, s, vt @ basis.T
