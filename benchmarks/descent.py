"""One gated descent on a GPU: step by step against all steps in one kernel, and how the kernel is best cut.

    python -m benchmarks.descent                  # within a minute; what is chosen for a size comes first
    python -m benchmarks.descent --seconds 300    # every cut, however long it takes

50 steps with 4 iterations, the first effort of a round. Far is the largest distance of an end point after 5 steps to
that of the same descent in float64. A cut is starts a program x neurons a block, warps and stages.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from importlib.util import find_spec
from multiprocessing import get_context
from typing import TYPE_CHECKING

import torch

from benchmarks import command
from spearpp.linalg import sphere
from spearpp.search.gated.descent import EPSILON, ROUGH, Effort, _schedule, _step_by_step
from spearpp.search.gated.objective import Gates

if TYPE_CHECKING:
    from spearpp.linalg.kernels.gated.persistent import Plan

SIZES = ((20, 200, 128), (20, 200, 512), (50, 500, 128), (100, 1000, 128), (100, 1000, 256))
MANY = 100
EFFORT = Effort(50, 4, 1e-4)
CAREFUL = Effort(50, 4, 1e-5)
FEW = 5
RATE = 0.1
CUDA = torch.device("cuda")


@dataclass(frozen=True)
class Problem:
    """Random rows, gates, basis and points of some updates, in float64."""

    rows: torch.Tensor
    gates: torch.Tensor
    basis: torch.Tensor
    points: torch.Tensor

    @property
    def operations(self) -> float:
        """Of the matrix products of a whole descent, without padding."""
        (updates, m, b), (starts, d) = self.rows.shape, self.points.shape[1:]
        once = m * b * (2 * EFFORT.iterations + 3) + 2 * m * d + 2 * b * d
        return 2.0 * updates * starts * once * (EFFORT.steps + 3)

    def single(self) -> tuple[Gates, torch.Tensor]:
        """The first update, in float32."""
        gates = Gates(self.rows[0].float(), self.gates[0].float(), self.basis[0].float())
        return gates, self.points[0].float()


def problem(b: int, m: int, starts: int, updates: int = 1) -> Problem:
    generator = torch.Generator().manual_seed(b + m + starts)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(updates, *shape, generator=generator, dtype=torch.float64).to(CUDA)

    basis = torch.eye(b, dtype=torch.float64, device=CUDA).expand(updates, b, b)
    return Problem(draw(m, b) / b**0.5, draw(m, b), basis, sphere.retract(draw(starts, b)))


def cuts(b: int, m: int, effort: Effort) -> Iterator["Plan"]:
    """What the kernel would choose, then the others."""
    from spearpp.linalg.kernels.gated.persistent import Plan, padded, plan

    width = padded(b)
    chosen = plan(m, width, effort.epsilon < ROUGH)
    yield chosen
    others = [
        Plan(starts, block, warps, parted=False, whole=False, stages=2 if block * width > 2**13 else 3)
        for starts in (16, 32)
        for warps in (8, 4)
        for block in (128, 64, 32)
    ]
    others += [replace(other, ahead=True) for other in others if (other.starts, other.warps) == (16, 8)]
    if width <= 32:
        others += [Plan(16, 256, 4, True, True), Plan(32, 256, 8, True, True), Plan(16, 128, 8, True, False)]
    elif width <= 64:
        others += [Plan(16, 128, 8, True, False), Plan(16, 64, 4, True, False)]
    else:
        others += [Plan(16, 128, 16, False, False, 2), Plan(16, 64, 16, False, False)]
    yield from (other for other in others if other != chosen)


def at_once(given: Problem, effort: Effort, cut: "Plan") -> tuple[torch.Tensor, Callable[[], object]]:
    """The points, and what moves them."""
    from spearpp.linalg.kernels.gated import persistent

    rows, gates, basis, points = (each.float() for each in (given.rows, given.gates, given.basis, given.points))
    schedule = _schedule(effort.steps, RATE, torch.float32).to(CUDA)
    counts = [rows.shape[1]] * len(rows)

    def move() -> object:
        return persistent.descend(
            rows,
            gates,
            basis,
            points,
            counts,
            schedule,
            iterations=effort.iterations,
            epsilon=effort.epsilon,
            least=EPSILON,
            exact=effort.epsilon < ROUGH,
            cut=cut,
        )

    return points, move


def milliseconds(work: Callable[[], object]) -> float:
    work()
    return 1e3 * statistics.median(command.seconds(work, CUDA) for _ in range(7))


def compile_one(cut: "Plan", width: int, effort: Effort) -> None:
    """Into Triton's cache, from a process of its own."""
    at_once(problem(width, 64, 1), effort, cut)[1]()
    torch.cuda.synchronize()


def compile_all(wanted: list[tuple["Plan", int, Effort]]) -> None:
    workers = max(1, min(14, (os.cpu_count() or 2) - 1, len(wanted)))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(compile_one, *each) for each in wanted]):
            done.exception()  # it is said where that cut is measured


def measured(given: Problem, effort: Effort, cut: "Plan", expected: torch.Tensor) -> str:
    """A line for one cut, or why there is none."""
    name = f"{cut.starts:>3} x{cut.block:>4} w{cut.warps:<2} s{cut.stages} "
    name += ("parted " if cut.parted else "shared ") + ("kept  " if cut.whole else "ahead " if cut.ahead else "blocks")
    try:
        points, move = at_once(given, replace(effort, steps=FEW), cut)
        move()
        far = float(torch.linalg.vector_norm(points[0].double() - expected, dim=1).max())
        taken = milliseconds(at_once(given, effort, cut)[1])
    except Exception as error:  # a cut that does not fit says so in many ways
        return f"  {name}  {(str(error).strip() or repr(error)).splitlines()[-1][:90]}"
    return f"  {name} {taken:8.3f} ms {given.operations / taken / 1e9:8.2f} TFLOP/s  far {far:.1e}"


def stepwise(given: Problem, effort: Effort, expected: torch.Tensor) -> str:
    """The same for single steps, recorded and replayed."""
    gates, points = given.single()
    few = _step_by_step(gates, points.clone(), replace(effort, steps=FEW), RATE).points
    far = float(torch.linalg.vector_norm(few.double() - expected, dim=1).max())
    taken = milliseconds(lambda: _step_by_step(gates, points.clone(), effort, RATE))
    rate = given.operations / len(given.rows) / taken / 1e9
    return f"  step by step                     {taken:8.3f} ms {rate:8.2f} TFLOP/s  far {far:.1e}"


def reference(given: Problem, effort: Effort) -> torch.Tensor:
    """Where a few steps of the first update end in float64."""
    gates = Gates(given.rows[0], given.gates[0], given.basis[0])
    return _step_by_step(gates, given.points[0].clone(), replace(effort, steps=FEW), RATE).points


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=55.0, help="no cut is begun later")
    until = time.monotonic() + options.parse_args().seconds
    if not torch.cuda.is_available() or find_spec("triton") is None:
        print("error: this needs a CUDA device and Triton", file=sys.stderr)
        return 2
    from spearpp.linalg.kernels.gated.persistent import padded

    ours = [(next(cuts(b, m, effort)), padded(b), effort) for b, m, _ in SIZES for effort in (EFFORT, CAREFUL)]
    others = [(cut, padded(b), EFFORT) for b, m, _ in SIZES for cut in cuts(b, m, EFFORT)]
    began = time.monotonic()
    compile_all(list(dict.fromkeys([*ours, *others])))
    print(f"{torch.cuda.get_device_name()}: compiled in {time.monotonic() - began:.0f} s", flush=True)
    for b, m, starts in SIZES:
        given = problem(b, m, starts)
        for effort in (EFFORT, CAREFUL):
            print(f"b={b} m={m} starts={starts} ε={effort.epsilon:g}: what is chosen")
            expected = reference(given, effort)
            print(stepwise(given, effort, expected))
            print(measured(given, effort, next(cuts(b, m, effort)), expected), flush=True)
    b, m, starts = SIZES[0]
    given = problem(b, m, starts, MANY)
    expected = reference(given, EFFORT)
    print(f"b={b} m={m} starts={starts}, {MANY} updates at once")
    for cut in cuts(b, m, EFFORT):
        if time.monotonic() < until:
            print(measured(given, EFFORT, cut, expected), flush=True)
    for b, m, starts in SIZES:
        print(f"b={b} m={m} starts={starts}: other cuts")
        given = problem(b, m, starts)
        expected = reference(given, EFFORT)
        for cut in list(cuts(b, m, EFFORT))[1:]:
            if time.monotonic() < until:
                print(measured(given, EFFORT, cut, expected), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
