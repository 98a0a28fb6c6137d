"""The low-rank structure of a gradient: factors, rank (the batch size) and noise floor.

Ĝ = D X̂ᵀ has rank b. Its truncated singular value decomposition gives L = U_b, with orthonormal
columns, and R = Σ_b V_bᵀ; there is one Q with D = L Q and X̂ᵀ = Q⁻¹ R.

What is observed is Ĝ + E. Since L = (D X̂ᵀ + E) V_b Σ_b⁻¹, the true direction q_i gives
L q_i = d_i + E V_b Σ_b⁻¹ q_i exactly, so entry k carries noise of standard deviation
σ_k ‖Σ_b⁻¹ q_i‖, where σ_k is that of row k of E. The part of Ĝ outside the b leading singular
directions is nothing but noise and tells σ_k: rounding of any float format, DP noise and the
drift of local training all arrive here as one number a row.
"""

from functools import partial

import torch

from spearpp.errors import RankError
from spearpp.inversion.factors.batched import SameRank, decompose_many
from spearpp.inversion.factors.factors import Factors
from spearpp.inversion.factors.noise import left_over, not_zero, row_noise
from spearpp.inversion.factors.rank import CLEAR_GAP
from spearpp.inversion.factors.triplets import by_gram, by_sketch, ranked
from spearpp.inversion.observation import Observation
from spearpp.types import Bool, Float, Tensor

__all__ = ["Factors", "SameRank", "decompose", "decompose_many"]


def decompose(seen: Observation, batch_size: int | None = None) -> Factors:
    """Factor a gradient into its leading singular triplets, in float64.

    The fastest of three ways that can vouch for its result: ``by_gram``, ``by_sketch``, a complete decomposition.

    Args:
        seen: the layer.
        batch_size: b, or None to read it off the spectrum.

    Raises:
        RankError: if the rank fills the matrix, cannot be read, or is below the batch size given.

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
    b = _agreed_rank(rank, batch_size, s, seen)
    left, right, norms = u[:, :b], s[:b, None] * vt[:b], torch.linalg.vector_norm(core, dim=1)
    squares = left_over(core, left, right)
    noise = row_noise((live.sum(), used.sum()), left, s, squares, norms, epsilon)
    if not all_rows:
        left, noise, norms = (_with_zeros(each, live) for each in (left, noise, norms))
    if not all_columns:
        right = _with_zeros(right.T, used).T
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


def _with_zeros(rows: Float[Tensor, "some ..."], where: Bool[Tensor, "all"]) -> Float[Tensor, "all ..."]:
    """These rows where they belong, and zeros elsewhere."""
    whole = rows.new_zeros(len(where), *rows.shape[1:])
    whole[where] = rows
    return whole


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
