"""Compares the gated descent in one GPU kernel with single steps, and finds the best block sizes of the kernel.

    make bench NAME=descent                          # within a minute, with the chosen block sizes first
    make bench NAME=descent ARGS="--seconds 300"     # all block sizes

Each descent has 50 steps with 4 iterations, as the first effort of the gated search. "Error" is the largest distance
between an end point after 5 steps and the end point of the same descent in float64. A plan of the kernel consists of
the starts per program, the neurons per block, the warps and the pipeline stages.
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
from spearpp.linalg.kernels import padded
from spearpp.search.gated.descent import EPSILON, MIN_TENSOR_CORE_RIDGE, Effort, _schedule, _step_by_step
from spearpp.search.gated.objective import Gates

if TYPE_CHECKING:
    from spearpp.linalg.kernels.gated.persistent import Plan

SIZES = ((20, 200, 128), (20, 200, 512), (50, 500, 128), (100, 1000, 128), (100, 1000, 256))
"""(b, m, starts): batch size, layer width and number of starts."""
UPDATES_AT_ONCE = 100
"""Number of updates in the test with many updates."""
EFFORT = Effort(50, 4, 1e-4)
"""The first effort of the gated search (``EFFORTS[0]``)."""
CAREFUL = Effort(50, 4, 1e-5)
"""A smaller ε, for which the kernel computes in higher precision."""
COMPARED_STEPS = 5
"""Steps after which end points are compared with float64. After many steps, rounding alone separates them."""
RATE = 0.1
"""Learning rate, as in the gated search."""
REPEATS = 7
"""Timed runs, of which the median is reported. Design choice."""
CUDA = torch.device("cuda")


@dataclass(frozen=True)
class Problem:
    """Random rows, gates, basis and points of several updates, in float64."""

    rows: torch.Tensor
    gates: torch.Tensor
    basis: torch.Tensor
    points: torch.Tensor

    @property
    def operations(self) -> float:
        """Operations of the matrix products of a whole descent, without padding."""
        (updates, m, b), (starts, d) = self.rows.shape, self.points.shape[1:]
        once = m * b * (2 * EFFORT.iterations + 3) + 2 * m * d + 2 * b * d
        return 2.0 * updates * starts * once * (EFFORT.steps + 3)

    def single(self) -> tuple[Gates, torch.Tensor]:
        """Return the first update, in float32."""
        gates = Gates(self.rows[0].float(), self.gates[0].float(), self.basis[0].float())
        return gates, self.points[0].float()


def problem(b: int, m: int, starts: int, updates: int = 1) -> Problem:
    """Return a random problem."""
    generator = torch.Generator().manual_seed(b + m + starts)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(updates, *shape, generator=generator, dtype=torch.float64).to(CUDA)

    basis = torch.eye(b, dtype=torch.float64, device=CUDA).expand(updates, b, b)
    return Problem(draw(m, b) / b**0.5, draw(m, b), basis, sphere.retract(draw(starts, b)))


def plans(b: int, m: int, effort: Effort) -> Iterator["Plan"]:
    """Yield the plan that the kernel chooses, and then other plans."""
    from spearpp.linalg.kernels.gated.persistent import Plan, plan

    width = padded(b)
    chosen = plan(m, width, effort.ridge < MIN_TENSOR_CORE_RIDGE)
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


def in_one_kernel(given: Problem, effort: Effort, plan: "Plan") -> tuple[torch.Tensor, Callable[[], object]]:
    """Return the points, and the function that moves them by a whole descent."""
    from spearpp.linalg.kernels.gated import persistent

    rows, gates, basis, points = (each.float() for each in (given.rows, given.gates, given.basis, given.points))
    schedule = _schedule(effort.steps, RATE, torch.float32).to(CUDA)

    def descend() -> object:
        return persistent.descend(
            rows,
            gates,
            basis,
            points,
            schedule,
            iterations=effort.iterations,
            ridge=effort.ridge,
            least=EPSILON,
            exact=effort.ridge < MIN_TENSOR_CORE_RIDGE,
            cut=plan,
        )

    return points, descend


def milliseconds(work: Callable[[], object]) -> float:
    """Return the median duration, after one run that is not counted."""
    work()
    return 1e3 * statistics.median(command.seconds(work, CUDA) for _ in range(REPEATS))


def compile_one(plan: "Plan", width: int, effort: Effort) -> None:
    """Compile a plan into Triton's cache, in a process of its own."""
    in_one_kernel(problem(width, 64, 1), effort, plan)[1]()
    torch.cuda.synchronize()


def compile_all(wanted: list[tuple["Plan", int, Effort]]) -> None:
    """Compile all plans in parallel."""
    workers = max(1, min(14, (os.cpu_count() or 2) - 1, len(wanted)))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(compile_one, *each) for each in wanted]):
            done.exception()  # ``measured`` reports errors of a plan


def measured(given: Problem, effort: Effort, plan: "Plan", expected: torch.Tensor) -> str:
    """Return the line of one plan, with its time or its error."""
    name = f"{plan.starts:>3} x{plan.block:>4} w{plan.warps:<2} s{plan.stages} "
    name += ("parted " if plan.parted else "shared ") + (
        "kept  " if plan.whole else "ahead " if plan.ahead else "blocks"
    )
    try:
        points, descend = in_one_kernel(given, replace(effort, steps=COMPARED_STEPS), plan)
        descend()
        difference = float(torch.linalg.vector_norm(points[0].double() - expected, dim=1).max())
        duration = milliseconds(in_one_kernel(given, effort, plan)[1])
    except Exception as error:  # Triton raises many kinds of errors for a plan that does not fit
        return f"  {name}  {(str(error).strip() or repr(error)).splitlines()[-1][:90]}"
    return f"  {name} {duration:8.3f} ms {given.operations / duration / 1e9:8.2f} TFLOP/s  error {difference:.1e}"


def stepwise(given: Problem, effort: Effort, expected: torch.Tensor) -> str:
    """Return the line of single steps, which are recorded as a CUDA graph and replayed."""
    gates, points = given.single()
    ends = _step_by_step(gates, points.clone(), replace(effort, steps=COMPARED_STEPS), RATE).points
    difference = float(torch.linalg.vector_norm(ends.double() - expected, dim=1).max())
    duration = milliseconds(lambda: _step_by_step(gates, points.clone(), effort, RATE))
    rate = given.operations / len(given.rows) / duration / 1e9
    return f"  step by step                     {duration:8.3f} ms {rate:8.2f} TFLOP/s  error {difference:.1e}"


def reference(given: Problem, effort: Effort) -> torch.Tensor:
    """Return the end points of the first update after a few steps in float64."""
    gates = Gates(given.rows[0], given.gates[0], given.basis[0])
    return _step_by_step(gates, given.points[0].clone(), replace(effort, steps=COMPARED_STEPS), RATE).points


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=55.0, help="do not begin another plan after this time")
    until = time.monotonic() + options.parse_args().seconds
    if not torch.cuda.is_available() or find_spec("triton") is None:
        print("error: this benchmark needs a CUDA device and Triton", file=sys.stderr)
        return 2
    chosen = [(next(plans(b, m, effort)), padded(b), effort) for b, m, _ in SIZES for effort in (EFFORT, CAREFUL)]
    others = [(plan, padded(b), EFFORT) for b, m, _ in SIZES for plan in plans(b, m, EFFORT)]
    began = time.monotonic()
    compile_all(list(dict.fromkeys([*chosen, *others])))
    print(f"{torch.cuda.get_device_name()}: compiled in {time.monotonic() - began:.0f} s", flush=True)
    for b, m, starts in SIZES:
        given = problem(b, m, starts)
        for effort in (EFFORT, CAREFUL):
            print(f"b={b} m={m} starts={starts} ridge={effort.ridge:g}: the chosen plan")
            expected = reference(given, effort)
            print(stepwise(given, effort, expected))
            print(measured(given, effort, next(plans(b, m, effort)), expected), flush=True)
    b, m, starts = SIZES[0]
    given = problem(b, m, starts, UPDATES_AT_ONCE)
    expected = reference(given, EFFORT)
    print(f"b={b} m={m} starts={starts}, {UPDATES_AT_ONCE} updates at once")
    for plan in plans(b, m, EFFORT):
        if time.monotonic() < until:
            print(measured(given, EFFORT, plan, expected), flush=True)
    for b, m, starts in SIZES:
        print(f"b={b} m={m} starts={starts}: other plans")
        given = problem(b, m, starts)
        expected = reference(given, EFFORT)
        for plan in list(plans(b, m, EFFORT))[1:]:
            if time.monotonic() < until:
                print(measured(given, EFFORT, plan, expected), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
