"""Leading singular triplets faster than by a complete decomposition, where they can be vouched for."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from spearpp.inversion.factors.rank import ROUNDING, numerical_rank
from spearpp.linalg.chunks import chunk_size
from spearpp.types import Float, Tensor

SKETCH = 128
"""Columns of the first sketch of a large matrix."""
COARSE = 1e-10
"""Relative spacing of a dtype from which its own rounding exceeds what squaring loses."""
STEEP = 1e-4
"""Least singular value over the largest down to which a Gram matrix is exact enough."""
SOUND = 1e-10
"""How far the products of a basis may be from those of an orthonormal one."""
MARGIN = 16
"""Columns a sketch must have beyond the rank."""


class Leading(NamedTuple):
    """The leading singular triplets of a matrix."""

    u: Float[Tensor, "rows k"]
    s: Float[Tensor, "r"]
    """All singular values; those beyond the first few hundred by their root mean square."""
    vt: Float[Tensor, "k columns"]
    rank: int | None
    """``numerical_rank`` of the matrix."""


Triplets = tuple[Float[Tensor, "*u rows k"], Float[Tensor, "*u r"], Float[Tensor, "*u k columns"]]
"""Left vectors, singular values, right vectors."""


def by_gram(core: Float[Tensor, "rows columns"], epsilon: float, batch_size: int | None = None) -> Leading | None:
    """Leading singular triplets from eigenvectors of a Gram matrix; None where that is not exact enough.

    With B = Yᵀ Ĝ for an orthonormal Y, the eigenvectors of B Bᵀ are those of Ĝ Ĝᵀ within span(Y). Squaring costs
    digits: u_i is turned by at most ε₆₄ (s_1 / s_i)², a hundred-thousandth of what the rounding of a float32
    gradient turns it by, ε₃₂ s_1 / s_i, down to s_i = 1e-4 s_1. The values are taken as ‖uᵀĜ‖, which is not squared.

    Y is a sketch, the range of Ĝ Ĝᵀ orth(Ĝ Ω) for k random columns (the same every time), where what is left outside it
    is no more than rounding; k doubles until it holds the rank, and from half of the matrix on all of it is taken.
    """
    if epsilon < COARSE or min(core.shape) < 2:
        return None

    def improve(basis: Tensor) -> Tensor:
        return torch.linalg.qr(core @ (core.T @ basis))[0]

    found = _sketched(core, epsilon, batch_size, improve, by_eigenvectors) or ranked(core, by_eigenvectors, epsilon)
    b = max(found.rank or 0, batch_size or 0)
    exact_enough = 0 < b < len(found.vt) and bool(found.s[b - 1] >= STEEP * found.s[0])
    return found if exact_enough else None


def by_sketch(core: Float[Tensor, "rows columns"], epsilon: float, batch_size: int | None = None) -> Leading | None:
    """The same to all digits, by a randomised range finder; None if it cannot tell.

    An orthonormal basis of k random combinations of the columns, improved by two power steps (Halko,
    Martinsson and Tropp 2011), holds all signal if what is left outside is no more than the rounding
    of the dtype the matrix came in. Then the other singular values are noise, and their root mean
    square is all that is needed of them. Otherwise k doubles, and from half of the matrix on a
    complete decomposition is no slower. The combinations are the same every time.
    """

    def improve(basis: Tensor) -> Tensor:
        for _ in range(2):
            basis = torch.linalg.qr(core @ torch.linalg.qr(core.T @ basis)[0])[0]
        return basis

    return _sketched(core, epsilon, batch_size, improve, _by_triangle)


def ranked(core: Float[Tensor, "rows columns"], solve: Callable[[Tensor], Triplets], epsilon: float) -> Leading:
    """All triplets, and the rank."""
    u, s, vt = solve(core)
    return Leading(u, s, vt, numerical_rank(s, (core.shape[0], core.shape[1]), epsilon))


def _sketched(
    core: Float[Tensor, "rows columns"],
    epsilon: float,
    batch_size: int | None,
    improve: Callable[[Tensor], Tensor],
    solve: Callable[[Tensor], Triplets],
) -> Leading | None:
    """The triplets within the span of k random combinations of the columns, where nothing but rounding lies outside it.

    Args:
        core: Ĝ without zero rows and columns.
        epsilon: relative spacing of the dtype it came in.
        batch_size: b, if it is known.
        improve: from an orthonormal basis of those combinations to one that is nearer to the leading left vectors.
        solve: all triplets of a wide matrix.
    """
    rows, columns = core.shape
    small = min(rows, columns)
    rounding = (ROUNDING * epsilon) ** 2 / 12 * _squares(core)
    k = SKETCH if batch_size is None else max(SKETCH, 2 ** (batch_size + MARGIN).bit_length())
    while k <= small // 2:
        draw = torch.Generator(core.device).manual_seed(0)
        probes = torch.randn(columns, k, generator=draw, dtype=core.dtype, device=core.device)
        basis = improve(torch.linalg.qr(core @ probes)[0])
        inside = basis.T @ core
        u, s, vt = solve(inside)
        outside = _squares(core, basis, inside)
        s = torch.cat([s, (outside / (small - k)).sqrt().expand(small - k)])
        rank = numerical_rank(s, (rows, columns), epsilon)
        if rank is not None and rank + MARGIN <= k:
            return Leading(basis @ u, s, vt, rank) if bool(outside <= rounding) else None
        k *= 2
    return None


def _squares(core: Float[Tensor, "rows columns"], left: Tensor | None = None, right: Tensor | None = None) -> Tensor:
    """‖Ĝ‖² or ‖Ĝ - L R‖², some rows at a time: a matrix of that size more may not fit."""
    at_a_time = chunk_size(core.device, core.element_size() * max(1, core.shape[1]))
    if left is None or right is None:
        return torch.stack([part.square().sum() for part in core.split(at_a_time)]).sum()
    parts = zip(core.split(at_a_time), left.split(at_a_time), strict=True)
    return torch.stack([(part - some @ right).square().sum() for part, some in parts]).sum()


def by_eigenvectors(inside: Float[Tensor, "*u rows columns"]) -> Triplets:
    """Left vectors of B from B Bᵀ, or from BᵀB where that is smaller, the largest first."""
    rows, columns = inside.shape[-2:]
    if rows <= columns:
        u = torch.linalg.eigh(inside @ inside.mT)[1].flip(-1)
    else:
        u = torch.linalg.qr(inside @ torch.linalg.eigh(inside.mT @ inside)[1].flip(-1))[0]
    rotated = u.mT @ inside
    s, order = torch.linalg.vector_norm(rotated, dim=-1).sort(dim=-1, descending=True, stable=True)
    u = torch.take_along_dim(u, order[..., None, :], dim=-1)
    rotated = torch.take_along_dim(rotated, order[..., None], dim=-2)
    return u, s, rotated / s.clamp_min(torch.finfo(s.dtype).tiny)[..., None]


def _by_triangle(inside: Float[Tensor, "rows columns"]) -> Triplets:
    """The decomposition of B by that of the small triangle in Bᵀ = Q T."""
    across, triangle = torch.linalg.qr(inside.T)
    u, s, vt = torch.linalg.svd(triangle.T)
    return u, s, vt @ across.T


def within(
    matrices: Float[Tensor, "u rows columns"], k: int
) -> tuple[Float[Tensor, "u rows k"], Float[Tensor, "u k"], Float[Tensor, "u k columns"], Float[Tensor, "u"]]:
    """Triplets of many matrices within k random combinations of their columns, and the squared norm of what is outside.

    As ``by_gram``: the combinations are those of Ĝ Ĝᵀ orth(Ĝ Ω), the same for all. A matrix whose rank is below k to
    all digits has no such basis: the norm is then infinite, and nothing else means anything.
    """
    draw = torch.Generator(matrices.device).manual_seed(0)
    probes = torch.randn(matrices.shape[2], k, generator=draw, dtype=matrices.dtype, device=matrices.device)
    basis = orthonormal(matrices @ probes)
    basis = orthonormal(matrices @ (matrices.mT @ basis))
    unit = torch.eye(k, dtype=basis.dtype, device=basis.device)
    sound = torch.linalg.matrix_norm(basis.mT @ basis - unit) < SOUND  # not if it is NaN
    others = torch.eye(basis.shape[1], k, dtype=basis.dtype, device=basis.device)
    basis = torch.where(sound[:, None, None], basis, others)
    inside = basis.mT @ matrices
    u, s, vt = by_eigenvectors(inside)
    outside = (matrices - basis @ inside).square().sum((1, 2))
    return basis @ u, s, vt, torch.where(sound, outside, torch.inf)


def orthonormal(vectors: Float[Tensor, "u rows k"]) -> Float[Tensor, "u rows k"]:
    """An orthonormal basis of the columns, by shifted Cholesky factors three times (Fukaya and others 2020).

    A GPU has these for many matrices at once, and no Householder factors.
    """
    for shift in (1e-11, 1e-15, 0.0):
        gram = vectors.mT @ vectors
        diagonal = gram.diagonal(dim1=1, dim2=2)
        diagonal.add_(shift * diagonal.sum(1, keepdim=True))
        factor = torch.linalg.cholesky_ex(gram)[0]
        vectors = torch.linalg.solve_triangular(factor.mT, vectors, upper=True, left=False)
    return vectors
