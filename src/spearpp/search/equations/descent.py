"""Choose how a search solves its equations: with the matrix JᵀJ of every point, or by conjugate gradients."""

import torch

from spearpp.inversion.residuals import Residuals
from spearpp.linalg.least_squares import levenberg_marquardt, truncated_newton
from spearpp.types import Float, Int, Tensor

WIDE = 80
"""Number of unknowns from which on conjugate gradients are considered. Measured on a CPU: a search with 99 unknowns and
1000 neurons takes two thirds of the time, one with 89 unknowns and 200 neurons the same time."""
LARGE = 5e12
"""Number of multiplications for the matrices JᵀJ from which on a GPU uses conjugate gradients. Measured on an H200:
with 1.4e12 (b = 450, m = 1000) the matrices take 0.6 of the time. With 2e13 (240 starts, b = 400, m = 4000) only
conjugate gradients were measured alone on a GPU."""
SAMPLED = 8
"""Number of points whose mean JᵀJ preconditions all others. Measured: with 40 points
the condition number is 0.8 times as large."""
WELL_CONDITIONED = 300.0
"""Largest condition number of JᵀJ, after preconditioning, for conjugate gradients. Measured: with 80 a start takes 120
products in all, and with 770 most starts are not done after 300."""


def descend(
    equations: Residuals,
    t: Float[Tensor, "k u"],
    labels: Int[Tensor, "k"],
    weights: Float[Tensor, "k s"] | None = None,
    *,
    steps: int,
    damping: float,
    tolerance: float = 0.0,
    patience: int,
    left: float = 0.0,
    recorded: bool = False,
) -> tuple[Float[Tensor, "k u"], Float[Tensor, "k"], int]:
    """Minimise the residuals of many points. Return the end points, their squared residuals, and the number of steps.

    The options are those of ``levenberg_marquardt``. ``recorded`` is followed only where it is faster.
    """

    def chosen(which: Tensor) -> tuple[Tensor, Tensor | None]:
        return labels[which], None if weights is None else weights[which]

    def squared(points: Tensor, which: Tensor) -> Tensor:
        return equations.squared(points, *chosen(which))

    dense = t.shape[1] < WIDE or (t.is_cuda and equations.multiplications(*t.shape) < LARGE)
    factor = None if dense else _preconditioner(equations, t, labels, weights)
    if factor is None:
        return levenberg_marquardt(
            squared,
            lambda points, which: equations.normal_equations(points, *chosen(which)),
            t,
            steps=steps,
            damping=damping,
            tolerance=tolerance,
            patience=patience,
            left=left,
            recorded=recorded and equations.is_small(t),
        )
    before = equations.basis
    equations.basis = torch.linalg.solve_triangular(factor, before.T, upper=False).T.contiguous()
    try:
        ends, error, total = truncated_newton(
            squared,
            lambda points, which: equations.products(points, *chosen(which)),
            t @ factor,
            steps=steps,
            damping=damping,
            tolerance=tolerance,
            patience=patience,
            left=left,
        )
    finally:
        equations.basis = before
    return torch.linalg.solve_triangular(factor.T, ends.T, upper=True).T.contiguous(), error, total


def _preconditioner(
    equations: Residuals, t: Tensor, labels: Tensor, weights: Tensor | None
) -> Float[Tensor, "u u"] | None:
    """Return the Cholesky factor L of the mean JᵀJ of a few points; None if JᵀJ differs too much from it.

    In the coordinates Lᵀt this mean is the identity. One point stands for all when JᵀJ is compared with the mean.
    """
    few = slice(SAMPLED)
    products = equations.normal_equations(t[few], labels[few], None if weights is None else weights[few])[1]
    factor, failed = torch.linalg.cholesky_ex(products.mean(0))
    half = torch.linalg.solve_triangular(factor, products[0], upper=False)
    alike = torch.linalg.solve_triangular(factor, half.T, upper=False)
    if int(failed) or not bool(torch.isfinite(alike).all()):
        return None
    values = torch.linalg.eigvalsh(alike)
    return factor if float(values[-1]) <= WELL_CONDITIONED * float(values[0]) else None
