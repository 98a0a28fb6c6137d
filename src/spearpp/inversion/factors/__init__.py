"""The low-rank structure of a gradient: its factors, its rank (the batch size) and its noise.

Ĝ = D X̂ᵀ has rank b. Its truncated singular value decomposition gives L = U_b, with orthonormal columns, and
R = Σ_b V_bᵀ. There is exactly one matrix Q with D = L Q and X̂ᵀ = Q⁻¹ R.

The observed gradient is Ĝ + E, where E is noise. Since L = (D X̂ᵀ + E) V_b Σ_b⁻¹, a true direction q_i satisfies
L q_i = d_i + E V_b Σ_b⁻¹ q_i exactly. Entry k of L q_i therefore has noise with standard deviation σ_k ‖Σ_b⁻¹ q_i‖,
where σ_k is the standard deviation of row k of E. The part of the gradient outside the b leading singular directions is
only noise, and σ_k is estimated from it. Rounding to any float format, noise for differential privacy and the drift of
local training are all described by this one number for each row.
"""

from functools import partial

import torch

from spearpp.errors import RankError
from spearpp.inversion.factors.factors import Factors, not_zero, row_noise, squared_residuals
from spearpp.inversion.factors.rank import has_clear_gap
from spearpp.inversion.factors.triplets import by_gram, by_sketch, ranked
from spearpp.inversion.observation import Observation
from spearpp.types import Bool, Float, Tensor

__all__ = ["Factors", "decompose"]


def decompose(seen: Observation, batch_size: int | None = None) -> Factors:
    """Factor a gradient into its leading singular triplets, in float64.

    Three methods are tried, the fastest first: ``by_gram``, ``by_sketch`` and a complete decomposition. The first
    method that can guarantee its precision determines the result. ``batch_size`` is the number of samples in the batch,
    if it is known. It is used only if the singular values do not show a clear rank.

    Raises:
        RankError: if the gradient has full rank, or if its rank is not clear and the batch size is unknown or too
            large.

    >>> import torch
    >>> from spearpp.inversion.observation import observe
    >>> generator = torch.Generator().manual_seed(0)
    >>> gradient = torch.rand(30, 4, generator=generator) @ torch.rand(4, 50, generator=generator)
    >>> factors = decompose(observe(gradient, None, torch.zeros(30, 50), None))
    >>> factors.batch_size
    4
    >>> bool(torch.allclose(factors.left @ factors.right, gradient.double(), atol=1e-5))
    True
    """
    gradient, epsilon = seen.gradient, seen.gradient_epsilon
    live, used = not_zero(gradient)
    all_rows, all_columns = bool(live.all()), bool(used.all())
    core = gradient if all_rows else gradient[live]
    core = core if all_columns else core[:, used]
    u, s, vt, rank = (
        by_gram(core, epsilon, batch_size)
        or by_sketch(core, epsilon, batch_size)
        or ranked(core, partial(torch.linalg.svd, full_matrices=False), epsilon)
    )
    b = _number_of_factors(rank, batch_size, s, seen)
    left, right, norms = u[:, :b], s[:b, None] * vt[:b], torch.linalg.vector_norm(core, dim=1)
    squares = squared_residuals(core, left, right)
    noise = row_noise((live.sum(), used.sum()), left, s, squares, norms, epsilon)
    if not all_rows:
        left, noise, norms = (_scatter_rows(each, live) for each in (left, noise, norms))
    if not all_columns:
        right = _scatter_rows(right.T, used).T
    return Factors(
        left=left.contiguous(),
        right=right.contiguous(),
        singular_values=s[:b],
        spectrum=s,
        row_noise=noise,
        live=live,
        row_norms=norms,
        outside=squares.sum().sqrt(),
    )


def _scatter_rows(rows: Float[Tensor, "some ..."], where: Bool[Tensor, "all"]) -> Float[Tensor, "all ..."]:
    """Return a tensor with these rows where ``where`` is true, and zeros elsewhere."""
    scattered = rows.new_zeros(len(where), *rows.shape[1:])
    scattered[where] = rows
    return scattered


def _number_of_factors(rank: int | None, batch_size: int | None, spectrum: Tensor, seen: Observation) -> int:
    """Return the number of samples that the gradient shows: its rank if this is clear, else the known batch size.

    A clear rank may be smaller than the batch size: samples may repeat, activate no neuron, or lie below the noise.
    """
    rows, columns = seen.gradient.shape
    full = min(rows, columns)
    if batch_size is not None and batch_size < 1:
        raise RankError(f"batch_size={batch_size}: a batch has at least one sample")
    if rank is not None and (batch_size is None or has_clear_gap(spectrum, rank)):
        return rank
    if batch_size is None:
        raise RankError(
            f"rank {len(spectrum)} fills the ({rows}, {columns}) gradient: its singular values have no gap between "
            "samples and noise. Either the batch has more samples than this layer can show, or noise hides the gap. "
            "If you know the batch size, pass it to spearpp.invert(batch_size=)"
        )
    if batch_size >= full:
        raise RankError(
            f"batch_size={batch_size}: a ({rows}, {columns}) gradient allows the recovery of at most {full - 1} samples"
        )
    float64_rounding = torch.finfo(torch.float64).eps * max(rows, columns)
    return min(batch_size, int((spectrum > float64_rounding * spectrum[:1].sum()).sum()))
