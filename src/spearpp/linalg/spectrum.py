"""Questions about singular values and eigenvalues that a Cholesky factor answers in most cases."""

import torch

from spearpp.types import Float, Tensor


def rank_above(matrix: Float[Tensor, "n e"], threshold: float) -> int:
    """Return the number of singular values above a threshold.

    If AᵀA (or A Aᵀ if it is smaller) minus the squared threshold is positive definite, all singular values are above
    the threshold. A Cholesky factor proves this. A margin covers rounding errors.

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


def trace_and_largest_of_inverse(matrices: Float[Tensor, "k u u"]) -> tuple[Float[Tensor, "k"], Float[Tensor, "k"]]:
    """Return the trace of the inverse C of positive semidefinite matrices, and a bound on the largest eigenvalue of C.

    Both are inf if a matrix is singular up to rounding. The smallest eigenvalue of a positive definite matrix is at
    least the reciprocal of the trace of its inverse, and the largest one is at most its trace. Eigenvalues are computed
    only where these bounds do not decide.

    >>> trace, largest = trace_and_largest_of_inverse(torch.diag_embed(torch.tensor([[2.0, 4.0], [1.0, 0.0]])))
    >>> trace.tolist(), [round(float(each), 3) for each in largest]
    ([0.75, inf], [0.5, inf])
    """
    matrices = torch.where(torch.isfinite(matrices).flatten(1).all(1)[:, None, None], matrices, 0.0)
    rounding = torch.finfo(matrices.dtype).eps * matrices.shape[1]
    factors, failed = torch.linalg.cholesky_ex(matrices)
    identity = torch.eye(matrices.shape[1], dtype=matrices.dtype, device=matrices.device)
    roots = torch.linalg.solve_triangular(factors, identity.expand_as(factors), upper=False)
    trace = roots.square().sum((1, 2))
    largest = trace * _largest_of_unit_trace(roots / trace.sqrt()[:, None, None])
    clear = (failed == 0) & (1 / trace > rounding * matrices.diagonal(dim1=1, dim2=2).sum(1))
    rows = torch.nonzero(~clear)[:, 0]
    if len(rows):
        values = torch.linalg.eigvalsh(matrices[rows])
        regular, values = values[:, 0] > rounding * values[:, -1], values.clamp_min(torch.finfo(values.dtype).tiny)
        trace[rows] = torch.where(regular, (1 / values).sum(1), torch.inf)
        largest[rows] = torch.where(regular, 1 / values[:, 0], torch.inf)
    return trace, largest


def trace_and_largest(roots: Float[Tensor, "k u n"]) -> tuple[Float[Tensor, "k"], Float[Tensor, "k"]]:
    """Return the trace of A Aᵀ, and a bound on its largest eigenvalue.

    >>> trace, largest = trace_and_largest(torch.tensor([[[2.0, 0.0], [0.0, 1.0]]]))
    >>> float(trace), round(float(largest), 3)
    (5.0, 4.0)
    """
    trace = roots.square().sum((1, 2))
    units = roots / trace.sqrt().clamp_min(torch.finfo(roots.dtype).tiny)[:, None, None]
    return trace, trace * _largest_of_unit_trace(units)


def _largest_of_unit_trace(roots: Float[Tensor, "k u n"]) -> Float[Tensor, "k"]:
    """Return a bound on the largest eigenvalue of M = A Aᵀ, whose trace is 1: the 64th root of the trace of M⁶⁴.

    It exceeds the eigenvalue by a factor of at most u^(1/64), which is 1.13 for u = 2000. AᵀA has the same eigenvalues.
    """
    power = roots @ roots.mT if roots.shape[1] <= roots.shape[2] else roots.mT @ roots
    for _ in range(5):
        power = power @ power
    return torch.linalg.matrix_norm(power) ** (1 / 32)
