"""Null spaces and smallest eigenvectors of many small matrices at once."""

import math
from functools import lru_cache

import numpy as np
import torch

from spearpp.linalg import sphere
from spearpp.linalg.chunks import chunk_size
from spearpp.linalg.time_limit import check_time
from spearpp.types import Bool, Float, Int, Tensor

_ITERATIONS = 8
"""Inverse iterations for each eigenvector. Measured: fewer iterations for the second eigenvector lost one certificate
in 1,100 (docs/lab/notebook.md)."""
MIN_GRAM_DISTANCE = 1e-4
"""Smallest distance between a unit vector and a subspace that a Gram matrix yields to eight digits. Derived: a Gram
matrix holds the square of the distance, 1e-8, and float64 has 16 digits."""
MAX_ORTHOGONAL_NORM = 1e-10
"""Largest norm of BᵀC for a complement C that counts as orthogonal to B. Design choice: far below the rounding of
float32, and far above that of float64."""
_GATHER_SHARE = 0.75
"""Largest share of the rows for which gathering them is less work than using all rows. Design choice."""


def kernel_vectors(
    rows: Float[Tensor, "sets r b"],
) -> tuple[Float[Tensor, "sets b"], Float[Tensor, "sets 2"]]:
    """Find the unit vector q with the smallest ‖A q‖ for each matrix A, and the two smallest singular values.

    The function uses inverse iteration with two vectors on AᵀA. A has a kernel if the first singular value is zero, and
    the kernel has one dimension if the second one is not. Both values are computed as ‖A v‖, so they lose no digits by
    squaring A. The error of q is that of an eigenvector of AᵀA, so the rows should be float64.

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
        smallest = torch.linalg.vector_norm(rows[:, :, 0], dim=1)
        return q, torch.stack([smallest, torch.full_like(smallest, torch.inf)], dim=1)
    block = two_smallest_eigenvectors(rows.mT @ rows)
    return block[:, :, 0], torch.linalg.vector_norm(rows @ block, dim=1)


def leverage(rows: Float[Tensor, "sets r b"], kernels: Float[Tensor, "sets b"]) -> Float[Tensor, "sets r"]:
    """Compute how much the kernel of each matrix A depends on every single row, between 0 and 1.

    The leverage of a row a is h = a (AᵀA)⁺ aᵀ. Let σ be the smallest singular value of A apart from the zero of its
    kernel, the unit vector q. Without the row a, this singular value is still at least √(1 - h) σ. At h = 1 the kernel
    would gain a dimension without the row.

    >>> import torch
    >>> q = torch.tensor([[0.0, 0.0, 1.0]]).double()
    >>> twice = torch.tensor([[[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]]).double()
    >>> leverage(twice[:, :3], q).round(decimals=6).tolist()
    [[0.5, 0.5, 1.0]]
    """
    gram = rows.mT @ rows + kernels[:, :, None] * kernels[:, None, :]  # A q = 0, so adding q qᵀ changes no leverage
    diagonal = gram.diagonal(dim1=1, dim2=2)
    diagonal.add_(torch.finfo(gram.dtype).eps * diagonal.sum(1, keepdim=True).clamp_min(1e-290))
    factor = torch.linalg.cholesky_ex(gram)[0]
    reach = torch.linalg.solve_triangular(factor, rows.mT, upper=False)
    return torch.nan_to_num(reach.square().sum(1), nan=1.0).clamp(0, 1)


def min_masked_residual(
    masks: Bool[Tensor, "sets m"],
    moving: Float[Tensor, "m d"],
    fixed: Float[Tensor, "m e"],
    pinned: tuple[Float[Tensor, "pins d"], Float[Tensor, "sets pins"]] | None = None,
) -> tuple[Float[Tensor, "sets d 2"], Float[Tensor, "sets 2"]]:
    """Find the unit x with the smallest ‖(I - F Fᵀ) S M x‖, for each mask S.

    At zero, the masked vector S M x of the subspace span(M) lies in the subspace span(F).

    Args:
        masks: S. True keeps a row.
        moving: M, with orthonormal columns, so that x has the norm of M x.
        fixed: F, with orthonormal columns.
        pinned: further rows to which x should be orthogonal, and their weights for each mask.

    Returns:
        The best x and the second best x orthogonal to it, and the two norms. If the second norm is also zero, x is not
        determined.

    >>> import torch
    >>> moving, fixed = torch.eye(3)[:, :2].double(), torch.tensor([[0.0], [1.0], [0.0]]).double()
    >>> x, norms = min_masked_residual(torch.tensor([[True, True, False]]), moving, fixed)
    >>> x[0, :, 0].abs().round(decimals=6).tolist(), norms[0].round(decimals=6).tolist()
    ([0.0, 1.0], [0.0, 1.0])
    """
    found, norms = [], []
    size = chunk_size(moving.device, 8 * moving.numel())
    for part in torch.arange(len(masks), device=masks.device).split(size):
        check_time()
        kept = masks[part, :, None] * moving
        across = fixed.T @ kept
        extra = None if pinned is None else pinned[1][part, :, None] * pinned[0]
        if moving.shape[1] == 1:
            block = torch.stack([moving.new_ones(len(part), 1), moving.new_zeros(len(part), 1)], dim=2)
        else:
            gram = moving.T @ kept - across.mT @ across
            block = two_smallest_eigenvectors(gram if extra is None else gram + extra.mT @ extra)
        image = kept @ block
        residual = torch.linalg.vector_norm(image - fixed @ (fixed.T @ image), dim=1)
        if extra is not None:
            residual = torch.hypot(residual, torch.linalg.vector_norm(extra @ block, dim=1))
        if moving.shape[1] == 1:
            residual[:, 1] = torch.inf
        found.append(block)
        norms.append(residual)
    if not found:
        return moving.new_zeros(0, moving.shape[1], 2), moving.new_zeros(0, 2)
    return torch.cat(found), torch.cat(norms)


def gather_weighted(rows: Float[Tensor, "m b"], weights: Float[Tensor, "sets m"]) -> Float[Tensor, "sets r b"]:
    """Gather, for each set, the rows with a positive weight, multiplied by their weights.

    Sets with fewer rows are padded with zeros. If most rows have a weight, all rows are returned.

    >>> import torch
    >>> gather_weighted(torch.eye(3), torch.tensor([[0.0, 2.0, 0.0]])).tolist()
    [[[0.0, 2.0, 0.0]]]
    """
    largest_set = max(1, int((weights > 0).sum(1).max())) if weights.numel() else 0
    if largest_set > _GATHER_SHARE * len(rows):
        return weights[:, :, None] * rows
    weight, places = weights.topk(largest_set, dim=1)
    return weight[:, :, None] * rows[places]


def smallest_eigenvector(gram: Float[Tensor, "sets b b"]) -> Float[Tensor, "sets b"]:
    """Find the eigenvector with the smallest eigenvalue by inverse iteration. ``gram`` is overwritten."""
    start = _starts(gram.shape[2], gram.dtype, gram.device)[:, :1]
    return _largest(_inverse(gram), start) if gram.is_cuda else _inverse_iteration(_factor(gram), start)


def two_smallest_eigenvectors(gram: Float[Tensor, "sets b b"]) -> Float[Tensor, "sets b 2"]:
    """Find the two eigenvectors with the smallest eigenvalues by inverse iteration. ``gram`` is overwritten."""
    start = _starts(gram.shape[2], gram.dtype, gram.device)
    if gram.is_cuda:
        inverse = _inverse(gram)
        first = _largest(inverse, start[:, :1])
        deflated = inverse - first[:, :, None] * (first[:, None] @ inverse)
        second = _largest(deflated, sphere.tangent(first, start[:, 1].expand_as(first))[:, :, None])
        return torch.stack([first, sphere.retract(sphere.tangent(first, second))], dim=2)
    factor = _factor(gram)
    first = _inverse_iteration(factor, start[:, :1])
    second = sphere.tangent(first, start[:, 1].expand_as(first))
    for _ in range(_ITERATIONS):
        check_time()
        second = torch.cholesky_solve(second[:, :, None], factor)[:, :, 0]
        second = sphere.retract(sphere.tangent(first, second))
    return torch.stack([first, second], dim=2)


def _inverse_iteration(factor: Float[Tensor, "sets b b"], start: Float[Tensor, "b 1"]) -> Float[Tensor, "sets b"]:
    """Find the eigenvector with the smallest eigenvalue of the matrices with these Cholesky factors."""
    vectors = start.expand(len(factor), -1, 1)
    for _ in range(_ITERATIONS):  # each solve grows the vectors at most by 1e16, so they do not overflow
        check_time()
        vectors = torch.cholesky_solve(vectors, factor)
    return sphere.retract(vectors[:, :, 0])


@lru_cache(maxsize=64)  # on a GPU these vectors cost ten kernel launches
def _starts(b: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "b 2"]:
    """Return two fixed start vectors of inverse iteration."""
    index = torch.arange(b, dtype=dtype, device=device)
    return torch.stack([1 + 0.5 * torch.cos(index), torch.sin(3 * index + 1)], dim=1)


@lru_cache(maxsize=8)
def _scaled_unit(b: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "b b"]:
    """Return √ε I, where ε is the rounding unit of the dtype."""
    return torch.finfo(dtype).eps ** 0.5 * torch.eye(b, dtype=dtype, device=device)


def _factor(gram: Float[Tensor, "sets b b"]) -> Float[Tensor, "sets b b"]:
    """Return the Cholesky factors of the Gram matrices, scaled to trace 1 and shifted by the rounding unit."""
    b, rounding = gram.shape[2], torch.finfo(gram.dtype).eps
    diagonal = gram.diagonal(dim1=1, dim2=2)
    gram.div_(diagonal.sum(1).clamp_min(1e-290)[:, None, None])
    diagonal.add_(rounding)
    factor, failed = torch.linalg.cholesky_ex(gram)
    shift = b * rounding
    while bool(failed.any()) and shift < 1:  # rounding made a matrix indefinite: shift it until it is not
        gram[failed > 0] += shift * torch.eye(b, dtype=gram.dtype, device=gram.device)
        factor, failed = torch.linalg.cholesky_ex(gram)
        shift *= 16
    return factor


def _inverse(gram: Float[Tensor, "sets b b"]) -> Float[Tensor, "sets b b"]:
    """Return ε (A / tr A + ε I)⁻¹, whose largest eigenvalue is at most about 1.

    On a GPU, squaring this matrix takes less time than launching the equivalent number of solves.
    """
    unit = _scaled_unit(gram.shape[2], gram.dtype, gram.device).expand_as(gram)
    half = torch.linalg.solve_triangular(_factor(gram), unit, upper=False)
    return half.mT @ half


def _largest(matrix: Float[Tensor, "sets b b"], start: Tensor) -> Float[Tensor, "sets b"]:
    """Return M⁸ v as a unit vector. It approximates the eigenvector with the largest eigenvalue."""
    square = matrix @ matrix
    fourth = square @ square
    return sphere.retract((fourth @ (fourth @ start))[:, :, 0])


def random_subsets(sets: int, of: int, size: int, generator: torch.Generator) -> Int[Tensor, "sets size"]:
    """Sample subsets of {0, …, of-1} uniformly without replacement. Each row of the result is one subset."""
    keys = torch.rand(sets, of, generator=generator, device=generator.device)
    return keys.topk(size, dim=1, largest=False, sorted=False).indices


def independent(
    vectors: Float[Tensor, "k b"], least: Float[Tensor, "k"] | float, known: Float[Tensor, "known b"] | None = None
) -> Int[Tensor, "kept"]:
    """Select vectors one by one, each if it is far enough from the span of the vectors selected before it.

    Args:
        vectors: unit vectors, one per row.
        least: minimum distance of each vector from that span.
        known: independent vectors that count as selected before all others.

    Returns:
        The indices of the selected vectors, in order.

    >>> import torch
    >>> three = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8]]).double()
    >>> independent(three, 1e-6).tolist()
    [0, 2]
    """
    # This loop runs on the host: one transfer is faster than waiting for a GPU at every vector.
    rows = (vectors if known is None else torch.cat([known, vectors])).cpu()
    bounds = torch.full_like(rows[: len(vectors), 0], least) if isinstance(least, float) else least.cpu()
    first, b = len(rows) - len(vectors), rows.shape[1]
    if len(rows) <= b and bool((distance_to_span(rows)[first:] > bounds).all()):
        return torch.arange(len(vectors), device=vectors.device)  # usually all vectors are selected
    leading = torch.linalg.qr(rows[:first].T)[0].T[:first] if first else rows.new_zeros(0, b)
    for _ in range(2):  # orthogonalising twice is enough (Kahan)
        rows = rows - (rows @ leading.T) @ leading
    basis, kept = np.zeros((b, b)), list[int]()
    for index, (row, bound) in enumerate(zip(rows.numpy()[first:], bounds.numpy(), strict=True)):
        if first + len(kept) == b:
            break
        before = basis[: len(kept)]
        remainder = row - (before @ row) @ before
        remainder = remainder - (before @ remainder) @ before
        distance = math.sqrt(remainder @ remainder)
        if distance > bound:
            basis[len(kept)] = remainder / distance
            kept.append(index)
    return torch.tensor(kept, dtype=torch.long, device=vectors.device)


def distance_to_span(vectors: Float[Tensor, "k b"]) -> Float[Tensor, "k"]:
    """Compute the distance of each vector from the span of the vectors before it; k is at most b.

    >>> import torch
    >>> distance_to_span(torch.tensor([[1.0, 0.0], [0.6, 0.8]]).double()).round(decimals=6).tolist()
    [1.0, 0.8]
    """
    factor, failed = torch.linalg.cholesky_ex(vectors @ vectors.T)
    distances = factor.diagonal()
    if not len(distances) or (not bool(failed) and bool(distances.min() > MIN_GRAM_DISTANCE)):
        return distances
    return torch.linalg.qr(vectors.T)[1].diagonal().abs()


def complement(vectors: Float[Tensor, "k b"]) -> Float[Tensor, "b d"]:
    """Return an orthonormal basis of the vectors orthogonal to all given vectors, which must be independent.

    >>> import torch
    >>> complement(torch.tensor([[0.0, 0.0, 2.0]]))[2].tolist()
    [0.0, 0.0]
    """
    k, b = vectors.shape
    if not k:
        return torch.eye(b, dtype=vectors.dtype, device=vectors.device)
    return torch.linalg.qr(vectors.T, mode="complete")[0][:, k:]


def complement_of_basis(basis: Float[Tensor, "d b"]) -> Float[Tensor, "d _"]:
    """Return an orthonormal basis of the vectors orthogonal to the columns of a basis, which must be orthonormal.

    Let E be the first b columns of the identity, B₁ the first b rows of the basis B, and B₂ its other rows. The matrix

        I - (B + E) (I + B₁ᵀ)⁻¹ (B + E)ᵀ

    is orthogonal, and its first b columns are -B. Its other columns are the result. They take fewer operations than
    Householder reflections. The signs of the columns of B are chosen such that I + B₁ᵀ is far from singular in most
    cases. Householder reflections are used if it is not.

    >>> import torch
    >>> complement_of_basis(torch.tensor([[0.6], [0.8]]).double()).abs().round(decimals=6).tolist()
    [[0.8], [0.6]]
    """
    b = basis.shape[1]
    top = torch.where(basis.diagonal() < 0, -basis, basis)
    top.diagonal().add_(1)
    reflected = -top @ torch.linalg.solve_ex(top[:b].T, top[b:].T)[0]
    reflected[b:].diagonal().add_(1)
    if bool(torch.linalg.matrix_norm(basis.T @ reflected) <= MAX_ORTHOGONAL_NORM):
        return reflected
    return complement(basis.T)
