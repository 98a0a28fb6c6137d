"""Questions about singular values and eigenvalues that a Cholesky factor answers in most cases."""

import torch

from spearpp.types import Float, Tensor


def rank_above(matrix: Float[Tensor, "n e"], threshold: float) -> int:
    """Return the number of singular values above a threshold.

    If AᵀA, or A Aᵀ if it is smaller, minus the squared threshold has a Cholesky factor, all of them are. A margin
    covers rounding errors.

    >>> rank_above(torch.diag(torch.tensor([3.0, 2.0, 1e-3])), 0.1)
    2
    >>> rank_above(torch.eye(2), 1e200)
    0
    """
    product = matrix.T @ matrix if matrix.shape[0] >= matrix.shape[1] else matrix @ matrix.T
    margin = torch.finfo(product.dtype).eps * len(product) * float(product.diagonal().sum())
    product.diagonal().sub_(threshold * threshold + margin)  # ** would raise an error where the square is inf
    if int(torch.linalg.cholesky_ex(product)[1]) == 0:
        return len(product)
    return int((torch.linalg.svdvals(matrix) > threshold).sum())


def trace_of_inverse(matrices: Float[Tensor, "k u u"]) -> Float[Tensor, "k"]:
    """Return the trace of the inverse of positive semidefinite matrices; inf if one is singular up to rounding.

    The smallest eigenvalue of a positive definite matrix is at least the reciprocal of the trace of its inverse, and
    the largest one is at most its trace. Eigenvalues are computed only where these bounds do not decide.

    >>> trace_of_inverse(torch.diag_embed(torch.tensor([[2.0, 4.0], [1.0, 0.0]]))).tolist()
    [0.75, inf]
    """
    matrices = torch.where(torch.isfinite(matrices).flatten(1).all(1)[:, None, None], matrices, 0.0)
    rounding = torch.finfo(matrices.dtype).eps * matrices.shape[1]
    factors, failed = torch.linalg.cholesky_ex(matrices)
    identity = torch.eye(matrices.shape[1], dtype=matrices.dtype, device=matrices.device)
    found = torch.linalg.solve_triangular(factors, identity.expand_as(factors), upper=False).square().sum((1, 2))
    clear = (failed == 0) & (1 / found > rounding * matrices.diagonal(dim1=1, dim2=2).sum(1))
    rows = torch.nonzero(~clear)[:, 0]
    if len(rows):
        values = torch.linalg.eigvalsh(matrices[rows])
        sums = (1 / values.clamp_min(torch.finfo(values.dtype).tiny)).sum(1)
        found[rows] = torch.where(values[:, 0] > rounding * values[:, -1], sums, torch.inf)
    return found
