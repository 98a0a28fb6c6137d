"""Descent of the gated objective on the sphere of p, all starts at once; that of a small problem in one kernel.

Many starts go the same way. On a CPU those that are on the way of another leave as soon as that shows.
"""

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from spearpp.linalg import sphere
from spearpp.linalg.kernels import gated as kernels
from spearpp.search.gated.objective import Gates, Objective
from spearpp.search.gated.recording import repeat
from spearpp.types import Float, Int, Tensor

BETAS = 0.9, 0.999
EPSILON = 1e-12
ROUGH = 1e-4
"""ε of the objective from which the rounding of tensor cores does not matter."""
WARM_UP = 2
"""Evaluations before the first step."""
HALTS = 0.3, 0.6
"""Shares of the steps after which doubles leave."""
SAME_WAY = 0.95
"""Cosine of their directions from which two starts end at the same."""
WORTH = 0.8
"""Share of the starts up to which those that are left are worth their own tensors."""
_SWITCHING = threading.RLock()


@dataclass(frozen=True)
class Effort:
    """How carefully a round descends."""

    steps: int
    iterations: int
    """Conjugate-gradient iterations a step."""
    epsilon: float
    """ε of the objective."""


@dataclass(frozen=True)
class Ends:
    """Where starts ended."""

    points: Float[Tensor, "ends d"]
    """c."""
    directions: Float[Tensor, "ends b"]
    """q."""
    steps: int
    """Start-steps taken."""


def descend(gates: Gates, points: Float[Tensor, "starts d"], effort: Effort, rate: float) -> Ends:
    """Riemannian Adam with a cosine schedule; one end for starts that go the same way. The points given are used up."""
    rows = gates.rows
    directions = _at_once(rows[None], gates.gates[None], gates.basis[None], points[None], [len(rows)], effort, rate)
    if directions is not None:
        return Ends(points, directions[0], len(points) * effort.steps)
    # A GPU takes as long for few starts as for many, and longer to record their steps anew.
    return _step_by_step(gates, points, effort, rate, () if points.is_cuda else HALTS)


def descend_many(
    rows: Float[Tensor, "updates m b"],
    gates: Float[Tensor, "updates m d"],
    basis: Float[Tensor, "updates b d"],
    points: Float[Tensor, "updates starts d"],
    counts: Sequence[int],
    effort: Effort,
    rate: float,
) -> tuple[Float[Tensor, "updates starts d"], Float[Tensor, "updates starts b"]]:
    """``descend`` for several updates, in one launch where they are small.

    ``counts`` says how many neurons each has; the rows and gates after them are zero. Without a GPU one update
    follows the other: their products are large enough to be worth a call each, and stay in the cache.
    """
    directions = _at_once(rows, gates, basis, points, counts, effort, rate)
    if directions is None:
        problems = [Gates(rows[i, :count], gates[i, :count], basis[i]) for i, count in enumerate(counts)]
        each = [_step_by_step(one, c, effort, rate).directions for one, c in zip(problems, points, strict=True)]
        directions = torch.stack(each) if each else rows.new_zeros(*points.shape[:2], rows.shape[2])
    return points, directions


def _at_once(
    rows: Float[Tensor, "updates m b"],
    gates: Float[Tensor, "updates m d"],
    basis: Float[Tensor, "updates b d"],
    points: Float[Tensor, "updates starts d"],
    counts: Sequence[int],
    effort: Effort,
    rate: float,
) -> Float[Tensor, "updates starts b"] | None:
    """All steps in one kernel: the directions, or None and nothing moved where that is not the way."""
    persistent = kernels.for_all_steps(points, rows.shape[1], max(basis.shape[1:]))
    if persistent is None:
        return None
    with torch.cuda.device(points.device):
        schedule = _schedule(effort.steps, rate, points.dtype).to(points.device, non_blocking=True)
        options = {"iterations": effort.iterations, "epsilon": effort.epsilon, "exact": effort.epsilon < ROUGH}
        return persistent.descend(rows, gates, basis, points, counts, schedule, **options, least=EPSILON)


def _step_by_step(
    gates: Gates, points: Float[Tensor, "starts d"], effort: Effort, rate: float, halts: tuple[float, ...] = ()
) -> Ends:
    schedule = _schedule(effort.steps, rate, points.dtype).to(points.device, non_blocking=True)
    counter = torch.zeros(1, dtype=torch.long, device=points.device)
    here = torch.cuda.device(points.device) if points.is_cuda else nullcontext()
    with here, tensor_cores(points.is_cuda and effort.epsilon >= ROUGH):
        starts, done, taken = _Starts(gates, points, effort), 0, 0
        for stop in (*(WARM_UP + int(share * effort.steps) for share in halts), len(schedule)):
            repeat(partial(starts.step, schedule, counter), stop - done, points.device)
            taken += len(starts) * (min(stop, WARM_UP + effort.steps) - max(done, WARM_UP))
            done = stop
            if stop < len(schedule):
                starts = starts.without_doubles()
    return Ends(starts.points, starts.objective.direction, taken)


class _Starts:
    """Points on their way."""

    def __init__(self, gates: Gates, points: Float[Tensor, "starts d"], effort: Effort) -> None:
        self.gates, self.points, self.effort = gates, points, effort
        self.objective = Objective(gates, points, epsilon=effort.epsilon, iterations=effort.iterations)
        self.momentum, self.second = torch.zeros_like(points), torch.zeros_like(points[:, :1])

    def __len__(self) -> int:
        return len(self.points)

    def step(self, schedule: Float[Tensor, "evaluations 4"], counter: Int[Tensor, "1"]) -> None:
        """Evaluate, and move by what the schedule says."""
        here = self.objective
        here.evaluate()
        parts = here.through_gates, here.through_basis, here.value
        here.kernels.move(self.points, *parts, self.momentum, self.second, schedule, counter, EPSILON)
        counter.add_(1)

    def without_doubles(self) -> "_Starts":
        """Those that go the way of none that is farther down; all of them if that is nearly all."""
        order = self.objective.value[:, 0].argsort(stable=True)
        unit = sphere.retract(self.objective.direction[order])
        first = ~((unit @ unit.T).abs() > SAME_WAY).tril(-1).any(1)
        kept = order[first].sort().values
        if len(kept) > WORTH * len(self):
            return self
        others = _Starts(self.gates, self.points[kept], self.effort)
        others.objective.solution.copy_(self.objective.solution[kept])
        others.momentum, others.second = self.momentum[kept], self.second[kept]
        return others


@lru_cache(maxsize=32)
def _schedule(steps: int, rate: float, dtype: torch.dtype) -> Float[Tensor, "evaluations 4"]:
    """What ``move`` reads: for every evaluation the rate over 1-β₁ᵗ, 1/(1-β₂ᵗ), 1-β₁ and 1-β₂. Made on the host.

    Nothing moves at first, until M u = p has a good solution, from which later ones start, and at last.
    """
    done = torch.arange(steps, dtype=dtype)
    first, second = (torch.full_like(done, 1 - beta) for beta in BETAS)
    rates = rate * 0.5 * (1 + torch.cos(math.pi * done / steps)) / (1 - BETAS[0] ** (done + 1))
    moves = torch.stack([rates, 1 / (1 - BETAS[1] ** (done + 1)), first, second], dim=1)
    still = torch.tensor([[0.0, 1.0, 0.0, 0.0]], dtype=dtype)
    return torch.cat([still.expand(WARM_UP, 4), moves, still])


@contextmanager
def tensor_cores(allowed: bool) -> Iterator[None]:
    """Let float32 products round their factors to ten bits (TF32) meanwhile; as it is, where the user has said how."""
    if not allowed:
        yield
        return
    with _SWITCHING:  # the switch is the process's
        try:
            before = torch.backends.cuda.matmul.allow_tf32
            torch.backends.cuda.matmul.allow_tf32 = True
        except RuntimeError:  # set by the other of torch's two ways, which do not mix
            yield
            return
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
