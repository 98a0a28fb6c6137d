"""Levenberg-Marquardt for many starting points at once, each with its own damping."""

from collections.abc import Callable

import torch

from spearpp.linalg.recording import repeat
from spearpp.linalg.time_limit import check_time
from spearpp.types import Float, Int, Tensor

SHRINK, GROW = 0.3, 5.0
"""Factors of the damping after a step that lowers the residual, and after one that does not. Design choice."""
HOPELESS = 1e6
"""Damping, relative to the mean diagonal of JᵀJ, at which a point is given up: no shorter step lowers its residual."""
PATIENCE = 15
"""Number of steps after which a point must improve by at least ``LEAST_PROGRESS`` in a step. Design choice: true points
of smooth networks are reached in 5 to 10 steps (``docs/lab/notebook.md``, "Network equations")."""
LEAST_PROGRESS = 1e-3
"""Smallest relative decrease of the squared residual that counts as progress."""
FEW = 0.1
"""Share of points at which recorded steps end. Design choice: points that take much longer than others mostly fail."""

Equations = Callable[[Float[Tensor, "k u"], Int[Tensor, "k"]], tuple[Tensor, Tensor, Tensor]]
"""From points and their indices to the squared residual, JᵀJ and Jᵀr of each point."""


def levenberg_marquardt(
    squared_residual: Callable[[Float[Tensor, "k u"], Int[Tensor, "k"]], Float[Tensor, "k"]],
    normal_equations: Equations,
    points: Float[Tensor, "k u"],
    *,
    steps: int,
    damping: float = 1e-2,
    tolerance: float = 0.0,
    recorded: bool = False,
) -> tuple[Float[Tensor, "k u"], Float[Tensor, "k"], int]:
    """Minimise the squared residuals of many points.

    Args:
        squared_residual: from points and their indices to ‖r‖².
        normal_equations: from points and their indices to ‖r‖², JᵀJ and Jᵀr.
        points: the starting points.
        steps: largest number of steps.
        damping: first damping, relative to the mean diagonal of JᵀJ.
        tolerance: norm of the residual at which a point is done.
        recorded: whether all points take every step, so that a GPU records the step once and replays it. This is
            faster where the launches of kernels take longer than their work. It stops when few points are left.

    Returns:
        The end points, their squared residuals, and the number of steps summed over the points.

    >>> import torch
    >>> def value(x, which): return (x.square() - 2).square().sum(1)
    >>> def normal(x, which):
    ...     r, j = x.square() - 2, 2 * x
    ...     return r.square().sum(1), torch.diag_embed(j * j), j * r
    >>> end, error, _ = levenberg_marquardt(value, normal, torch.tensor([[1.0], [-3.0]]), steps=20)
    >>> [round(float(each), 4) for each in end]
    [1.4142, -1.4142]
    """
    if recorded:
        return _recorded(normal_equations, points, steps, damping, tolerance)
    points = points.clone()
    everyone = torch.arange(len(points), device=points.device)
    error, hessian, slope = normal_equations(points, everyone)
    strength = torch.full_like(error, damping)
    identity = torch.eye(points.shape[1], dtype=points.dtype, device=points.device)
    active, total = everyone[error > tolerance**2], 0
    for step in range(steps):
        if not len(active):
            break
        check_time()
        total += len(active)
        scale = hessian[active].diagonal(dim1=1, dim2=2).mean(1)
        lift = (strength[active] * scale).clamp_min(torch.finfo(points.dtype).tiny)
        factor, failed = torch.linalg.cholesky_ex(hessian[active] + lift[:, None, None] * identity)
        moved = points[active] - torch.cholesky_solve(slope[active][:, :, None], factor)[:, :, 0]
        value = squared_residual(moved, active)
        better = (failed == 0) & (value < error[active])
        strength[active] *= torch.where(better, SHRINK, GROW)
        stalled = better & (value > (1 - LEAST_PROGRESS) * error[active])
        accepted = active[better]
        points[accepted], error[accepted] = moved[better], value[better]
        done = (error[active] <= tolerance**2) | (strength[active] > HOPELESS)
        if step >= PATIENCE:
            done |= stalled
        again = active[better & ~done]
        if len(again):
            _, hessian[again], slope[again] = normal_equations(points[again], again)
        active = active[~done]
    return points, error, total


def _recorded(
    normal_equations: Equations, points: Float[Tensor, "k u"], steps: int, damping: float, tolerance: float
) -> tuple[Float[Tensor, "k u"], Float[Tensor, "k"], int]:
    """Let all points take the same steps, without waiting for the device."""
    points, everyone = points.clone(), torch.arange(len(points), device=points.device)
    error, hessian, slope = (each.clone() for each in normal_equations(points, everyone))
    strength, count = torch.full_like(error, damping), torch.zeros_like(error)
    identity = torch.eye(points.shape[1], dtype=points.dtype, device=points.device)
    tiny = torch.finfo(points.dtype).tiny

    def step() -> None:
        lift = (strength * hessian.diagonal(dim1=1, dim2=2).mean(1)).clamp_min(tiny)
        factor, failed = torch.linalg.cholesky_ex(hessian + lift[:, None, None] * identity)
        # cholesky_solve cannot be recorded: on a GPU it allocates memory outside of PyTorch.
        half = torch.linalg.solve_triangular(factor, slope[:, :, None], upper=False)
        moved = points - torch.linalg.solve_triangular(factor.mT, half, upper=True)[:, :, 0]
        value, product, gradient = normal_equations(moved, everyone)
        better = (failed == 0) & (value < error)
        count.add_((error > tolerance**2).to(count))
        strength.mul_(torch.where(better, SHRINK, GROW))
        points.copy_(torch.where(better[:, None], moved, points))
        hessian.copy_(torch.where(better[:, None, None], product, hessian))
        slope.copy_(torch.where(better[:, None], gradient, slope))
        error.copy_(torch.where(better, value, error))

    def done() -> bool:
        working = (error > tolerance**2) & (strength <= HOPELESS)
        return int(working.sum()) <= FEW * len(points)

    repeat(step, steps, points.device, done)
    return points, error, int(count.sum())
