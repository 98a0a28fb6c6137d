"""Choose how a search solves its equations: with the matrix JᵀJ of every point, or by conjugate gradients."""

from typing import NamedTuple

import torch

from spearpp.inversion.residuals import MAX_RECORDED_WORK, Residuals
from spearpp.linalg import sphere
from spearpp.linalg.least_squares import Options, levenberg_marquardt, truncated_newton
from spearpp.types import Float, Int, Tensor

MIN_UNKNOWNS_FOR_PRODUCTS = 80
"""Number of unknowns from which on conjugate gradients are considered. Measured on a CPU: a search with 99 unknowns and
1000 neurons takes two thirds of the time, one with 89 unknowns and 200 neurons the same time."""
PRECONDITIONER_POINTS = 8
"""Number of points whose mean JᵀJ preconditions all others. Measured: with 40 points
the condition number is 0.8 times as large."""
MAX_CONDITION = 100.0
"""Largest condition number of JᵀJ, after preconditioning, for conjugate gradients. Measured: with 80 a start takes 120
products in all, and with 770 most starts are not done after 300."""
POWER_ITERATIONS = 10
"""Number of power iterations for the largest eigenvalue. Design choice: a limit needs one digit."""


class Ends(NamedTuple):
    """Where a descent ended."""

    points: Float[Tensor, "k u"]
    squared: Float[Tensor, "k"]
    """Squared residuals."""
    steps: int
    """Number of steps, summed over the points."""
    matrices: bool
    """Whether the matrices JᵀJ were computed, and not only products with them."""


def descend(
    equations: Residuals,
    t: Float[Tensor, "k u"],
    labels: Int[Tensor, "k"],
    weights: Float[Tensor, "k s"] | None,
    options: Options,
    *,
    most: int | None = None,
) -> Ends:
    """Minimise the residuals of many points.

    Where it is faster, a GPU records the steps of random starts. If conjugate gradients turn out not to work, only the
    first ``most`` points descend; None for all of them.
    """

    def chosen(which: Tensor) -> tuple[Tensor, Tensor | None]:
        return labels[which], None if weights is None else weights[which]

    def squared(points: Tensor, which: Tensor) -> Tensor:
        return equations.squared(points, *chosen(which))

    recorded = t.is_cuda and equations.multiplications(*t.shape) <= MAX_RECORDED_WORK
    dense = recorded or t.shape[1] < MIN_UNKNOWNS_FOR_PRODUCTS
    factor = None if dense else _preconditioner(equations, t, labels, weights)
    if factor is None:
        t = t if dense else t[:most]
        found = levenberg_marquardt(
            squared,
            lambda points, which: equations.normal_equations(points, *chosen(which)),
            t,
            options,
            recorded=options.replaceable and equations.is_small(t),
        )
        return Ends(*found, matrices=True)
    before = equations.basis
    equations.basis = torch.linalg.solve_triangular(factor, before.T, upper=False).T.contiguous()
    try:
        ends, error, total = truncated_newton(
            squared,
            lambda points, which: equations.products(points, *chosen(which)),
            t @ factor,
            options,
        )
    finally:
        equations.basis = before
    points = torch.linalg.solve_triangular(factor.T, ends.T, upper=True).T.contiguous()
    return Ends(points, error, total, matrices=False)


def _preconditioner(
    equations: Residuals, t: Tensor, labels: Tensor, weights: Tensor | None
) -> Float[Tensor, "u u"] | None:
    """Return the Cholesky factor L of the mean JᵀJ of a few points; None if JᵀJ differs too much from it.

    In the coordinates Lᵀt this mean is the identity. One point stands for all when JᵀJ is compared with the mean.
    """
    few = slice(PRECONDITIONER_POINTS)
    products = equations.normal_equations(t[few], labels[few], None if weights is None else weights[few])[1]
    factor, failed = torch.linalg.cholesky_ex(products.mean(0))
    half = torch.linalg.solve_triangular(factor, products[0], upper=False)
    alike = torch.linalg.solve_triangular(factor, half.T, upper=False)
    if int(failed) or not bool(torch.isfinite(alike).all()):
        return None
    vector = torch.ones_like(alike[0])
    for _ in range(POWER_ITERATIONS):
        vector = sphere.retract(alike @ vector)
    # Every eigenvalue is above this bound if the matrix minus the bound is positive definite.
    bound = torch.linalg.vector_norm(alike @ vector) / MAX_CONDITION
    return None if int(torch.linalg.cholesky_ex(alike - bound * torch.eye(len(alike)).to(alike))[1]) else factor
