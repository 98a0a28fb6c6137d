"""Descent of the gated objective on the sphere of p, for all starts at once. On a GPU, one kernel does small problems.

Many starts approach the same direction. On a CPU, duplicate starts are removed during the descent.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from spearpp.linalg import sphere
from spearpp.linalg.kernels import gated as kernels
from spearpp.linalg.recording import repeat
from spearpp.linalg.tensor_cores import tensor_cores
from spearpp.search.gated.objective import Gates, Objective
from spearpp.types import Float, Int, Tensor

BETAS = 0.9, 0.999
"""β₁ and β₂ of Adam: the usual defaults."""
EPSILON = 1e-12
"""ε of Adam. Design choice: it only prevents a division by zero."""
MIN_TENSOR_CORE_RIDGE = 1e-4
"""Smallest ``ridge`` of the objective for which products may use tensor cores, which round factors to ten bits. Design
choice: this rounding has a relative error of 5e-4, whose square is far below this number."""
WARM_UP = 2
"""Number of evaluations before the first step, until conjugate gradients have a good solution. Design
choice: each evaluation continues the last solution, so two evaluations do twice the iterations."""
DEDUPLICATION_TIMES = 0.3, 0.6
"""Shares of the steps after which duplicate starts are removed. Measured: at five sizes, searches needed as many rounds
as before and 8 to 49 % fewer evaluations (docs/lab/notebook.md, section "Speed")."""
DUPLICATE_COSINE = 0.95
"""Cosine of two directions above which their starts count as duplicates. Measured together with the times above."""
MAX_KEPT_SHARE = 0.8
"""Largest share of remaining starts for which new, smaller tensors pay off. Design choice."""


@dataclass(frozen=True)
class Effort:
    """How carefully a round descends."""

    steps: int
    """Steps per start."""
    iterations: int
    """Conjugate-gradient iterations per step."""
    ridge: float
    """The small number that makes the matrix of the objective invertible."""


@dataclass(frozen=True)
class Ends:
    """End points of a descent."""

    points: Float[Tensor, "ends d"]
    """v, with p = N v."""
    directions: Float[Tensor, "ends b"]
    """q."""
    steps: int
    """Number of steps, summed over the starts."""


def descend(gates: Gates, points: Float[Tensor, "starts d"], effort: Effort, rate: float) -> Ends:
    """Descend by Riemannian Adam with a cosine schedule.

    The points, unit vectors v, may be overwritten. On a CPU, duplicate starts share one end point.
    """
    directions = _in_one_kernel(gates, points, effort, rate)
    if directions is not None:
        return Ends(points, directions, len(points) * effort.steps)
    # On a GPU, fewer starts take the same time, and recording their steps again takes longer.
    return _step_by_step(gates, points, effort, rate, () if points.is_cuda else DEDUPLICATION_TIMES)


def _in_one_kernel(gates: Gates, points: Tensor, effort: Effort, rate: float) -> Float[Tensor, "starts b"] | None:
    """Do all steps in one kernel and return the directions. Return None, with unchanged points, if no kernel fits."""
    persistent = kernels.for_all_steps(points, len(gates.rows), max(gates.basis.shape))
    if persistent is None:
        return None
    with torch.cuda.device(points.device):
        schedule = _schedule(effort.steps, rate, points.dtype).to(points.device, non_blocking=True)
        exact = effort.ridge < MIN_TENSOR_CORE_RIDGE
        options = {"iterations": effort.iterations, "ridge": effort.ridge, "exact": exact}
        tensors = (each[None] for each in (gates.rows, gates.gates, gates.basis, points))
        directions = persistent.descend(*tensors, schedule, **options, least=EPSILON)
        return None if directions is None else directions[0]


def _step_by_step(
    gates: Gates, points: Float[Tensor, "starts d"], effort: Effort, rate: float, halts: tuple[float, ...] = ()
) -> Ends:
    """Do the steps one by one. Duplicate starts are removed after the shares ``halts`` of the steps."""
    schedule = _schedule(effort.steps, rate, points.dtype).to(points.device, non_blocking=True)
    counter = torch.zeros(1, dtype=torch.long, device=points.device)
    here = torch.cuda.device(points.device) if points.is_cuda else nullcontext()
    with here, tensor_cores(points.is_cuda and effort.ridge >= MIN_TENSOR_CORE_RIDGE):
        starts, done, start_steps = _Starts(gates, points, effort), 0, 0
        for stop in (*(WARM_UP + int(share * effort.steps) for share in halts), len(schedule)):
            repeat(partial(starts.step, schedule, counter), stop - done, points.device)
            start_steps += len(starts) * (min(stop, WARM_UP + effort.steps) - max(done, WARM_UP))
            done = stop
            if stop < len(schedule):
                starts = starts.without_duplicates()
    return Ends(starts.points, starts.objective.direction, start_steps)


class _Starts:
    """The points of a descent, with their moments."""

    def __init__(self, gates: Gates, points: Float[Tensor, "starts d"], effort: Effort) -> None:
        self.gates, self.points, self.effort = gates, points, effort
        self.objective = Objective(gates, points, ridge=effort.ridge, iterations=effort.iterations)
        self.momentum, self.second = torch.zeros_like(points), torch.zeros_like(points[:, :1])

    def __len__(self) -> int:
        return len(self.points)

    def step(self, schedule: Float[Tensor, "evaluations 4"], counter: Int[Tensor, "1"]) -> None:
        """Evaluate the objective, and take the step that the schedule has at the counter."""
        objective = self.objective
        objective.evaluate()
        parts = objective.through_gates, objective.through_basis, objective.value
        objective.kernels.move(self.points, *parts, self.momentum, self.second, schedule, counter, EPSILON)
        counter.add_(1)

    def without_duplicates(self) -> "_Starts":
        """Keep the starts whose direction is not that of a start with a smaller objective.

        If nearly all starts remain, none is removed.
        """
        order = self.objective.value[:, 0].argsort(stable=True)
        unit = sphere.retract(self.objective.direction[order])
        kept = order[sphere.first_of_each(unit, DUPLICATE_COSINE)].sort().values
        if len(kept) > MAX_KEPT_SHARE * len(self):
            return self
        fewer = _Starts(self.gates, self.points[kept], self.effort)
        fewer.objective.solution.copy_(self.objective.solution[kept])
        fewer.momentum, fewer.second = self.momentum[kept], self.second[kept]
        return fewer


@lru_cache(maxsize=32)
def _schedule(steps: int, rate: float, dtype: torch.dtype) -> Float[Tensor, "evaluations 4"]:
    """Return the schedule of ``move`` on the host: for every evaluation rate/(1-β₁ᵗ), 1/(1-β₂ᵗ), 1-β₁ and 1-β₂.

    The first evaluations do not move the points, so that conjugate gradients find a good solution of M u = p. Later
    evaluations start from this solution. The last evaluation does not move the points either.
    """
    done = torch.arange(steps, dtype=dtype)
    first, second = (torch.full_like(done, 1 - beta) for beta in BETAS)
    rates = rate * 0.5 * (1 + torch.cos(math.pi * done / steps)) / (1 - BETAS[0] ** (done + 1))
    moves = torch.stack([rates, 1 / (1 - BETAS[1] ** (done + 1)), first, second], dim=1)
    still = torch.tensor([[0.0, 1.0, 0.0, 0.0]], dtype=dtype)
    return torch.cat([still.expand(WARM_UP, 4), moves, still])
