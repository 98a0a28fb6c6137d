"""Vectors that a set of rows sends to zero, for many sets at once."""

import math
from functools import lru_cache

import numpy as np
import torch

from spearpp.inversion.problem import Problem
from spearpp.linalg import sphere
from spearpp.linalg.chunks import chunk_size
from spearpp.types import Bool, Float, Int, Tensor

_ITERATIONS = 8
_SQUARED = 1e-4
"""Distance of unit vectors down to which their products, which square it, tell it to eight digits."""
_MOST = 0.75
"""Share of the rows from which picking some is no less work than taking all."""


def kernel_vectors(
    rows: Float[Tensor, "sets r b"],
) -> tuple[Float[Tensor, "sets b"], Float[Tensor, "sets 2"]]:
    """The unit vector q with the least ‖A q‖ for each matrix A, and the two least singular values.

    By inverse iteration with two vectors on AᵀA: the first value tells whether there is a kernel at
    all, the second whether it has one dimension. Both are computed as ‖A v‖, so squaring A costs
    them no digits; the vector's error is that of AᵀA's eigenvector, so give float64.

    >>> import torch
    >>> q, values = kernel_vectors(torch.tensor([[[1.0, 1.0, 0.0], [0.0, 0.0, 2.0]]]).double())
    >>> (q / q[0, 0]).round(decimals=6).tolist()
    [[1.0, -1.0, 0.0]]
    >>> bool(values[0, 0] < 1e-12 < values[0, 1])
    True
    """
    sets, _, b = rows.shape
    if sets == 0 or b == 1:
        q = rows.new_ones(sets, b)
        least = torch.linalg.vector_norm(rows[:, :, 0], dim=1)
        return q, torch.stack([least, torch.full_like(least, torch.inf)], dim=1)
    block = two_smallest_eigenvectors(rows.mT @ rows)
    return block[:, :, 0], torch.linalg.vector_norm(rows @ block, dim=1)


def leverage(rows: Float[Tensor, "*sets r b"], kernels: Float[Tensor, "*sets b"]) -> Float[Tensor, "*sets r"]:
    """How much the kernel of each set depends on every single row, between 0 and 1.

    h = a (AᵀA)⁺ aᵀ for a row a. Without it the least singular value but that of the kernel q is still
    √(1 - h) times what it was; at h = 1 the row alone keeps the kernel from having one dimension more.

    >>> import torch
    >>> q = torch.tensor([[0.0, 0.0, 1.0]]).double()
    >>> twice = torch.tensor([[[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]]).double()
    >>> leverage(twice[:, :3], q).round(decimals=6).tolist()
    [[0.5, 0.5, 1.0]]
    """
    gram = rows.mT @ rows + kernels[..., None] * kernels[..., None, :]  # q counts for nothing, as A q = 0
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(torch.finfo(gram.dtype).eps * diagonal.sum(-1, keepdim=True).clamp_min(1e-290))
    factor = torch.linalg.cholesky_ex(gram)[0]
    reach = torch.linalg.solve_triangular(factor, rows.mT, upper=False)
    return torch.nan_to_num(reach.square().sum(-2), nan=1.0).clamp(0, 1)


def min_masked_residual(
    masks: Bool[Tensor, "sets m"],
    moving: Float[Tensor, "m d"],
    fixed: Float[Tensor, "m e"],
    pinned: tuple[Float[Tensor, "pins d"], Float[Tensor, "sets pins"]] | None = None,
) -> tuple[Float[Tensor, "sets d 2"], Float[Tensor, "sets 2"]]:
    """Where a masked subspace meets another: the unit x with the least ‖(I - F Fᵀ) S M x‖, for each mask S.

    Args:
        masks: S, which rows are kept.
        moving: M; with orthonormal columns, so that x has the norm of M x.
        fixed: F, with orthonormal columns.
        pinned: further rows that x should be orthogonal to, and their weights for each mask.

    Returns:
        The best x and the second best one orthogonal to it, and the two norms. If the second norm is
        zero too, x is not determined.

    >>> import torch
    >>> moving, fixed = torch.eye(3)[:, :2].double(), torch.tensor([[0.0], [1.0], [0.0]]).double()
    >>> x, norms = meet(torch.tensor([[True, True, False]]), moving, fixed)
    >>> x[0, :, 0].abs().round(decimals=6).tolist(), norms[0].round(decimals=6).tolist()
    ([0.0, 1.0], [0.0, 1.0])
    """
    found, norms = [], []
    size = chunk_size(moving.device, 8 * moving.numel())
    for part in torch.arange(len(masks), device=masks.device).split(size):
        kept = masks[part, :, None] * moving
        across = fixed.T @ kept
        extra = None if pinned is None else pinned[1][part, :, None] * pinned[0]
        if moving.shape[1] == 1:
            block = torch.stack([moving.new_ones(len(part), 1), moving.new_zeros(len(part), 1)], dim=2)
        else:
            gram = moving.T @ kept - across.mT @ across
            block = two_smallest_eigenvectors(gram if extra is None else gram + extra.mT @ extra)
        image = kept @ block
        left_over = torch.linalg.vector_norm(image - fixed @ (fixed.T @ image), dim=1)
        if extra is not None:
            left_over = torch.hypot(left_over, torch.linalg.vector_norm(extra @ block, dim=1))
        if moving.shape[1] == 1:
            left_over[:, 1] = torch.inf
        found.append(block)
        norms.append(left_over)
    if not found:
        return moving.new_zeros(0, moving.shape[1], 2), moving.new_zeros(0, 2)
    return torch.cat(found), torch.cat(norms)


def gather_weighted(rows: Float[Tensor, "*u m b"], weights: Float[Tensor, "*u sets m"]) -> Float[Tensor, "*u sets r b"]:
    """For each set the rows with a weight above zero, times it; the shorter sets are padded with zeros.

    >>> import torch
    >>> picked(torch.eye(3), torch.tensor([[0.0, 2.0, 0.0]])).tolist()
    [[[0.0, 2.0, 0.0]]]
    """
    most = max(1, int((weights > 0).sum(-1).max())) if weights.numel() else 0
    if most > _MOST * rows.shape[-2]:
        return weights[..., None] * rows[..., None, :, :]
    weight, places = weights.topk(most, dim=-1)
    return weight[..., None] * gather_rows(rows, places)


def gather_rows(rows: Float[Tensor, "*u m b"], places: Int[Tensor, "*u sets r"]) -> Float[Tensor, "*u sets r b"]:
    """The rows at those places, for each set."""
    if rows.ndim == 2:
        return rows[places]
    return torch.take_along_dim(rows[..., None, :, :], places[..., None], dim=-2)


def smallest_eigenvector(gram: Float[Tensor, "*sets b b"]) -> Float[Tensor, "*sets b"]:
    """The eigenvector with the least eigenvalue, by inverse iteration; ``gram`` is overwritten."""
    start = _starts(gram.shape[-1], gram.dtype, gram.device)[:, :1]
    return _largest(_inverse(gram), start) if gram.is_cuda else _least(_factor(gram), start)


def two_smallest_eigenvectors(gram: Float[Tensor, "*sets b b"]) -> Float[Tensor, "*sets b 2"]:
    """The two eigenvectors with the least eigenvalues, by inverse iteration; ``gram`` is overwritten."""
    start = _starts(gram.shape[-1], gram.dtype, gram.device)
    if gram.is_cuda:
        inverse = _inverse(gram)
        first = _largest(inverse, start[:, :1])
        beside = inverse - first[..., None] * (first[..., None, :] @ inverse)
        second = _largest(beside, sphere.tangent(first, start[:, 1].expand_as(first))[..., None])
        return torch.stack([first, sphere.retract(sphere.tangent(first, second))], dim=-1)
    factor = _factor(gram)
    first = _least(factor, start[:, :1])
    second = sphere.tangent(first, start[:, 1].expand_as(first))
    for _ in range(_ITERATIONS):
        second = torch.cholesky_solve(second[..., None], factor)[..., 0]
        second = sphere.retract(sphere.tangent(first, second))
    return torch.stack([first, second], dim=-1)


def _least(factor: Float[Tensor, "*sets b b"], start: Float[Tensor, "b 1"]) -> Float[Tensor, "*sets b"]:
    vectors = start.expand(*factor.shape[:-1], 1)
    for _ in range(_ITERATIONS):  # each grows them by 1e16 at most, so nothing overflows
        vectors = torch.cholesky_solve(vectors, factor)
    return sphere.retract(vectors[..., 0])


@lru_cache(maxsize=64)  # a GPU waits ten launches for them
def _starts(b: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "b 2"]:
    index = torch.arange(b, dtype=dtype, device=device)
    return torch.stack([1 + 0.5 * torch.cos(index), torch.sin(3 * index + 1)], dim=1)


@lru_cache(maxsize=8)
def _scaled_unit(b: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "b b"]:
    """√ε I."""
    return torch.finfo(dtype).eps ** 0.5 * torch.eye(b, dtype=dtype, device=device)


def _factor(gram: Float[Tensor, "*sets b b"]) -> Float[Tensor, "*sets b b"]:
    """Cholesky's factor of the Gram matrices, scaled to trace 1 and shifted by their rounding."""
    b, rounding = gram.shape[-1], torch.finfo(gram.dtype).eps
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    gram.div_(diagonal.sum(-1).clamp_min(1e-290)[..., None, None])
    diagonal.add_(rounding)
    factor, failed = torch.linalg.cholesky_ex(gram)
    if bool(failed.any()):  # rounding made it indefinite: shift by what is certainly enough
        gram[failed > 0] += b * rounding * torch.eye(b, dtype=gram.dtype, device=gram.device)
        factor = torch.linalg.cholesky_ex(gram)[0]
    return factor


def _inverse(gram: Float[Tensor, "*sets b b"]) -> Float[Tensor, "*sets b b"]:
    """ε (A / tr A + ε I)⁻¹, about 1 at most. A GPU squares it in less time than as many solves take to launch."""
    unit = _scaled_unit(gram.shape[-1], gram.dtype, gram.device).expand_as(gram)
    half = torch.linalg.solve_triangular(_factor(gram), unit, upper=False)
    return half.mT @ half


def _largest(matrix: Float[Tensor, "*sets b b"], start: Tensor) -> Float[Tensor, "*sets b"]:
    """M⁸ v as a unit vector: its eigenvector with the largest eigenvalue."""
    square = matrix @ matrix
    fourth = square @ square
    return sphere.retract((fourth @ (fourth @ start))[..., 0])


def lines(problem: Problem, rows: Float[Tensor, "sets r b"]) -> Float[Tensor, "found b"]:
    """The kernels of those sets of rows of L whose kernel is a line, up to the gradient's noise."""
    q, values = kernel_vectors(rows)
    allowed = problem.tolerance.kernel(rows.shape[1], q)
    return q[(values[:, 0] <= allowed) & (values[:, 1] > allowed)]


def random_subsets(sets: int, of: int, size: int, generator: torch.Generator) -> Int[Tensor, "sets size"]:
    """Subsets of {0, …, of-1} drawn uniformly without replacement, one a row."""
    keys = torch.rand(sets, of, generator=generator, device=generator.device)
    return keys.topk(size, dim=1, largest=False, sorted=False).indices


def independent(vectors: Float[Tensor, "k b"], least: Float[Tensor, "k"], always: int = 0) -> Int[Tensor, "kept"]:
    """Which vectors stand off from the span of the kept ones before them, in order.

    Args:
        vectors: unit vectors, one a row.
        least: the distance each must have from that span.
        always: so many of the first are kept without a question.

    >>> import torch
    >>> three = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8]]).double()
    >>> independent(three, torch.full((3,), 1e-6).double()).tolist()
    [0, 2]
    """
    # A host loop with small vectors: moving them there once beats waiting for a GPU at every one.
    rows, bounds = vectors.cpu(), least.cpu()
    k, b = rows.shape
    if k <= b and bool((distance_to_span(rows)[always:] > bounds[always:]).all()):  # the usual case needs no loop
        return torch.arange(k, device=vectors.device)
    known = torch.linalg.qr(rows[:always].T)[0].T[:always] if always else rows.new_zeros(0, b)
    for _ in range(2):  # twice is enough (Kahan)
        rows = rows - (rows @ known.T) @ known
    basis, kept = np.zeros((b, b)), list(range(always))
    for index, (row, bound) in enumerate(zip(rows.numpy()[always:], bounds.numpy()[always:], strict=True), always):
        if len(kept) == b:
            break
        before = basis[: len(kept) - always]
        rest = row - (before @ row) @ before
        rest = rest - (before @ rest) @ before
        size = math.sqrt(rest @ rest)
        if size > bound:
            basis[len(before)] = rest / size
            kept.append(index)
    return torch.tensor(kept, dtype=torch.long, device=vectors.device)


def distance_to_span(vectors: Float[Tensor, "k b"]) -> Float[Tensor, "k"]:
    """How far each vector is from the span of those before it; k is at most b.

    >>> import torch
    >>> standing_off(torch.tensor([[1.0, 0.0], [0.6, 0.8]]).double()).round(decimals=6).tolist()
    [1.0, 0.8]
    """
    factor, failed = torch.linalg.cholesky_ex(vectors @ vectors.T)
    away = factor.diagonal()
    if not len(away) or (not bool(failed) and bool(away.min() > _SQUARED)):
        return away
    return torch.linalg.qr(vectors.T)[1].diagonal().abs()


def complement(vectors: Float[Tensor, "k b"]) -> Float[Tensor, "b d"]:
    """An orthonormal basis of what is orthogonal to every one of these vectors; they are independent.

    >>> import torch
    >>> complement(torch.tensor([[0.0, 0.0, 2.0]]))[2].tolist()
    [0.0, 0.0]
    """
    k, b = vectors.shape
    if not k:
        return torch.eye(b, dtype=vectors.dtype, device=vectors.device)
    return torch.linalg.qr(vectors.T, mode="complete")[0][:, k:]
