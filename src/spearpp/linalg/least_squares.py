"""Levenberg-Marquardt for many starting points at once, each with its own damping."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from spearpp.linalg.recording import STEPS_PER_CHECK, repeat
from spearpp.linalg.time_limit import check_time
from spearpp.types import Float, Int, Tensor

DAMPING_AFTER_SUCCESS, DAMPING_AFTER_FAILURE = 0.3, 5.0
"""Factors of the damping after a step that lowers the residual, and after a step that does not. Design choice."""
MAX_DAMPING = 1e6
"""Damping, relative to the mean diagonal of JᵀJ, at which a point is given up: no shorter step lowers its residual."""
MIN_PROGRESS = 1e-3
"""Smallest relative change of the squared residual by a step that is not the end. Design choice: at this rate, halving
the residual would take 1,400 steps. A step that raises the residual by less has reached a minimum up to rounding."""
MIN_FINISHED = 10
"""Smallest number of finished points from which their rate is estimated. Design choice: a third of it is random."""

MAX_CG_RESIDUAL = 0.1
"""Relative residual of the equations of a step at which conjugate gradients stop. Measured: with 0.3 they take 0.8 to
1.8 times as many iterations in total (``docs/lab/notebook.md``, "Speed of the equations")."""
MAX_UNFINISHED_SHARE = 0.2
"""Share of points that conjugate gradients do not wait for. Measured: 0 takes 1.3 to 1.5 times as many
iterations."""
MAX_CG_ITERATIONS = 60
"""Largest number of iterations of conjugate gradients in a step. Design choice: far more than usual."""

Equations = Callable[[Float[Tensor, "k u"], Int[Tensor, "k"]], tuple[Tensor, Tensor, Tensor]]
"""From points and their indices to the squared residual, JᵀJ and Jᵀr of each point."""

Products = Callable[
    [Float[Tensor, "k u"], Int[Tensor, "k"]], tuple[Tensor, Tensor, Callable[[Float[Tensor, "k u"]], Tensor]]
]
"""From points and their indices to the squared residual, Jᵀr, and the function that multiplies vectors by JᵀJ."""


Ends = tuple[Float[Tensor, "k u"], Float[Tensor, "k"], int]
"""The end points, their squared residuals, and the number of steps summed over the points."""


@dataclass(frozen=True)
class Options:
    """How many steps the points take, and when a point is done."""

    steps: int
    """Largest number of steps."""
    damping: float = 1e-2
    """First damping, relative to the mean diagonal of JᵀJ. ``truncated_newton`` takes this mean to be 1."""
    tolerance: float = 0.0
    """Norm of the residual at which a point is done."""
    close: float = 0.0
    """Norm of the residual at which a point is done once a step does not lower it."""
    patience: int = 15
    """Number of steps after which a point is done if a step changes its residual by less than ``MIN_PROGRESS``."""
    replaceable: bool = False
    """Whether the points are random starts, so that others can take their place. The descent then ends when points
    finish more slowly than on average so far: other starts are then worth more."""


def levenberg_marquardt(
    squared_residual: Callable[[Float[Tensor, "k u"], Int[Tensor, "k"]], Float[Tensor, "k"]],
    normal_equations: Equations,
    points: Float[Tensor, "k u"],
    options: Options,
    *,
    recorded: bool = False,
) -> Ends:
    """Minimise the squared residuals of many points.

    Args:
        squared_residual: from points and their indices to ‖r‖².
        normal_equations: from points and their indices to ‖r‖², JᵀJ and Jᵀr.
        points: the starting points.
        options: when to stop.
        recorded: whether all points take every step, so that a GPU records the step once and replays it. This is
            faster where the launches of kernels take longer than their work. ``options.patience`` is not used then.

    >>> import torch
    >>> def value(x, which): return (x.square() - 2).square().sum(1)
    >>> def normal(x, which):
    ...     r, j = x.square() - 2, 2 * x
    ...     return r.square().sum(1), torch.diag_embed(j * j), j * r
    >>> end, error, _ = levenberg_marquardt(value, normal, torch.tensor([[1.0], [-3.0]]), Options(steps=20))
    >>> [round(float(each), 4) for each in end]
    [1.4142, -1.4142]
    """
    if recorded:
        return _recorded(normal_equations, points, options)
    state = _State(points, options)
    state.error, hessian, slope = normal_equations(points, state.active)
    identity = torch.eye(points.shape[1], dtype=points.dtype, device=points.device)
    for active in state.take_steps():
        scale = hessian[active].diagonal(dim1=1, dim2=2).mean(1)
        lift = (state.strength[active] * scale).clamp_min(torch.finfo(points.dtype).tiny)
        factor, failed = torch.linalg.cholesky_ex(hessian[active] + lift[:, None, None] * identity)
        moved = state.points[active] - torch.cholesky_solve(slope[active][:, :, None], factor)[:, :, 0]
        value = torch.where(failed == 0, squared_residual(moved, active), torch.inf)
        again = state.accept(moved, value)
        if len(again):
            _, hessian[again], slope[again] = normal_equations(state.points[again], again)
    return state.points, state.error, state.total


def truncated_newton(
    squared_residual: Callable[[Float[Tensor, "k u"], Int[Tensor, "k"]], Float[Tensor, "k"]],
    products: Products,
    points: Float[Tensor, "k u"],
    options: Options,
) -> Ends:
    """Minimise the squared residuals of many points like ``levenberg_marquardt``, but without matrices.

    Conjugate gradients solve the equations of a step approximately. This is faster for many unknowns if the condition
    number of JᵀJ is small. ``products`` maps points and their indices to ‖r‖², Jᵀr, and the function that multiplies
    vectors by JᵀJ.

    >>> import torch
    >>> def value(x, which): return (x.square() - 2).square().sum(1)
    >>> def products(x, which):
    ...     r, j = x.square() - 2, 2 * x
    ...     return r.square().sum(1), j * r, lambda v: j * j * v
    >>> starts = torch.tensor([[1.0, 2.0], [-3.0, 1.0]])
    >>> [[round(float(each), 4) for each in row] for row in truncated_newton(value, products, starts, Options(20))[0]]
    [[1.4142, 1.4142], [-1.4142, 1.4142]]
    """
    state = _State(points, options)
    for active in state.take_steps():
        state.error[active], slope, product = products(state.points[active], active)
        moved = state.points[active] - _conjugate_gradients(product, slope, state.strength[active])
        state.accept(moved, squared_residual(moved, active))
    return state.points, state.error, state.total


class _Pace:
    """How fast points finish (``Options.replaceable``)."""

    def __init__(self) -> None:
        self.finished, self.work = 0, 0.0

    def slows(self, finished: int, work: float) -> bool:
        """Return whether fewer points have finished for the work since the last call than on average."""
        new, spent = finished - self.finished, work - self.work
        self.finished, self.work = finished, work
        return finished >= MIN_FINISHED and new * work < finished * spent


class _State:
    """Points that take steps, each with its own damping, until they are done."""

    def __init__(self, points: Float[Tensor, "k u"], options: Options) -> None:
        self.points, self.options = points.clone(), options
        self.error = points.new_full((len(points),), torch.inf)
        self.strength = torch.full_like(self.error, options.damping)
        self.active = torch.arange(len(points), device=points.device)
        self.finished = self.total = self.steps = 0

    def take_steps(self) -> Iterator[Int[Tensor, "a"]]:
        """Yield, step by step, the indices of the points that take the step."""
        pace = _Pace()
        while self.steps < self.options.steps:
            self.active = self.active[self.error[self.active] > self.options.tolerance**2]
            work = self.total + len(self.points)  # the first derivatives count as a step
            slow = self.options.replaceable and self.steps % STEPS_PER_CHECK == 0 and pace.slows(self.finished, work)
            if slow or not len(self.active):
                return
            check_time()
            self.total, self.steps = self.total + len(self.active), self.steps + 1
            yield self.active

    def accept(self, moved: Float[Tensor, "a u"], value: Float[Tensor, "a"]) -> Int[Tensor, "c"]:
        """Move the active points whose squared residual falls, and return the indices of those that take another step.

        ``moved`` is where the step leads, and ``value`` the squared residual there.
        """
        active, before = self.active, self.error[self.active]
        better = value < before
        self.strength[active] *= torch.where(better, DAMPING_AFTER_SUCCESS, DAMPING_AFTER_FAILURE)
        accepted = active[better]
        self.points[accepted], self.error[accepted] = moved[better], value[better]
        done = (self.error[active] <= self.options.tolerance**2) | (~better & (before <= self.options.close**2))
        self.finished += int(done.sum())
        done |= self.strength[active] > MAX_DAMPING
        if self.steps > self.options.patience:
            done |= (value - before).abs() < MIN_PROGRESS * before
        self.active = active[~done]
        return active[better & ~done]


def _conjugate_gradients(
    product: Callable[[Tensor], Tensor], slope: Float[Tensor, "k u"], strength: Float[Tensor, "k"]
) -> Float[Tensor, "k u"]:
    """Return about (JᵀJ + λ)⁻¹ Jᵀr, where λ is the strength."""
    tiny = torch.finfo(slope.dtype).tiny
    found, rest, direction = torch.zeros_like(slope), slope.clone(), slope.clone()
    size = rest.square().sum(1)
    goal = MAX_CG_RESIDUAL**2 * size

    def iterate() -> None:
        image = torch.addcmul(product(direction), strength[:, None], direction)
        length = torch.where(size > goal, size / (direction * image).sum(1).clamp_min(tiny), 0)[:, None]
        found.addcmul_(length, direction)
        rest.addcmul_(length, image, value=-1)
        now = rest.square().sum(1)
        direction.mul_((now / size.clamp_min(tiny))[:, None]).add_(rest)
        size.copy_(now)

    def done() -> bool:
        return float((size <= goal).double().mean()) >= 1 - MAX_UNFINISHED_SHARE

    repeat(iterate, MAX_CG_ITERATIONS, slope.device, done)
    return found


def _recorded(normal_equations: Equations, points: Float[Tensor, "k u"], options: Options) -> Ends:
    """Let all points take the same steps, without waiting for the device.

    The first step computes the derivatives at the starting points. Its slope is zero, so it moves no point.
    """
    points, everyone = points.clone(), torch.arange(len(points), device=points.device)
    error = points.new_full((len(points),), torch.inf)
    strength, slope = torch.full_like(error, options.damping / DAMPING_AFTER_SUCCESS), torch.zeros_like(points)
    count, finished = torch.full_like(error, -1), torch.zeros_like(everyone, dtype=torch.bool)
    identity = torch.eye(points.shape[1], dtype=points.dtype, device=points.device)
    hessian, tiny = identity.repeat(len(points), 1, 1), torch.finfo(points.dtype).tiny
    pace, checks = _Pace(), 0

    def step() -> None:
        lift = (strength * hessian.diagonal(dim1=1, dim2=2).mean(1)).clamp_min(tiny)
        factor, failed = torch.linalg.cholesky_ex(hessian + lift[:, None, None] * identity)
        # cholesky_solve cannot be recorded: on a GPU it allocates memory outside of PyTorch.
        half = torch.linalg.solve_triangular(factor, slope[:, :, None], upper=False)
        moved = points - torch.linalg.solve_triangular(factor.mT, half, upper=True)[:, :, 0]
        value, product, gradient = normal_equations(moved, everyone)
        better = (failed == 0) & (value < error)
        count.add_((~finished).to(count))
        strength.mul_(torch.where(better, DAMPING_AFTER_SUCCESS, DAMPING_AFTER_FAILURE))
        points.copy_(torch.where(better[:, None], moved, points))
        hessian.copy_(torch.where(better[:, None, None], product, hessian))
        slope.copy_(torch.where(better[:, None], gradient, slope))
        error.copy_(torch.where(better, value, error))
        finished.copy_((error <= options.tolerance**2) | (~better & (error <= options.close**2)))

    def done() -> bool:
        nonlocal checks
        checks += 1
        ended, left = torch.stack([finished.sum(), (~finished & (strength <= MAX_DAMPING)).sum()]).tolist()
        # The recording takes about as long as a step.
        return not left or (options.replaceable and pace.slows(ended, 1 + STEPS_PER_CHECK * checks))

    repeat(step, options.steps + 1, points.device, done)
    return points, error, int(count.sum())
