"""How fast the paper's search steps: our Riemannian Adam and geoopt's take turns on the same starts in one run.

    make bench-paper

Their ratio is what counts, seconds depend on the machine. How much the paper's searches recover is measured by
``spearpp reproduce``.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks import command
from benchmarks.recovery import FIRST_SEED, Setting, attack
from spearpp import sphere
from spearpp.observation import observe
from spearpp.problem import Problem, pose
from spearpp.search import RiemannianAdam
from spearpp.search.base import chunk_sizes


@dataclass(frozen=True)
class Speed:
    """One row: start-steps a second, ours and geoopt's."""

    device: str
    b: int
    m: int
    starts: int
    ours: float
    geoopt: float
    ratio: float
    ours_gflops: float
    peak_gflops: float
    """A large square float32 matrix product on the same device."""


def main() -> int:
    options = command.parser(__doc__).parse_args()
    return command.run(_speeds(options.data, options.device), options.out)


def _speeds(data: str | None, device: torch.device) -> Iterator[Speed]:
    print(f"\nRiemannian Adam with L1 on {device}, float32, 50 steps, best of 5 turns each")
    print("   b     m  starts  start-steps/s: ours       geoopt  ratio  GFLOP/s: ours  a matrix product")
    peak = _peak(device)
    sizes = [(20, 200, 8192), (65, 1000, 4096)]
    if device.type == "cuda":
        sizes = [(20, 200, 65_536), (20, 200, 1_000_000), (65, 1000, 65_536), (150, 4000, 32_768)]
    for b, m, starts in sizes:
        _, (seen, *_) = attack(Setting("speed", b, m, RiemannianAdam()), data).prepare(FIRST_SEED, device)
        problem = pose(observe(*seen))
        ours, theirs = _compare(problem, starts, steps=50)
        row = Speed(
            device=str(device),
            b=b,
            m=m,
            starts=starts,
            ours=ours,
            geoopt=theirs,
            ratio=ours / theirs,
            ours_gflops=ours * 4 * m * b / 1e9,
            peak_gflops=peak,
        )
        print(
            f"{b:>4}{m:>6}{starts:>8}  {ours:>19,.0f}{theirs:>13,.0f}  {row.ratio:>5.2f}"
            f"  {row.ours_gflops:>13,.0f}  {peak:>16,.0f}",
            flush=True,
        )
        yield row


def _compare(problem: Problem, starts: int, steps: int) -> tuple[float, float]:
    """Start-steps a second of both, taking turns on the same starts."""
    import geoopt

    rows = problem.live_rows.float()
    generator = torch.Generator().manual_seed(0)
    points = sphere.uniform(starts, problem.batch_size, generator, device=rows.device)
    search = RiemannianAdam(steps=steps)
    sizes = list(chunk_sizes(starts, rows.shape[0] * rows.element_size(), rows.device, None))

    def ours() -> None:
        for part in points.split(sizes):
            search.descend(rows, part.clone())

    def theirs() -> None:
        moved = geoopt.ManifoldParameter(points.clone(), manifold=geoopt.Sphere())
        optimiser = geoopt.optim.RiemannianAdam([moved], lr=search.rates[0][1])
        for _ in range(steps):
            optimiser.zero_grad()
            (moved @ rows.T).abs().sum().backward()
            optimiser.step()

    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(5):
        times["ours"].append(_seconds(ours, rows.device))
        times["theirs"].append(_seconds(theirs, rows.device))
    return starts * steps / min(times["ours"]), starts * steps / min(times["theirs"])


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _peak(device: torch.device) -> float:
    size = 8192 if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device)
    return 2 * size**3 / min(_seconds(lambda: a @ a, device) for _ in range(5)) / 1e9


if __name__ == "__main__":
    sys.exit(main())
