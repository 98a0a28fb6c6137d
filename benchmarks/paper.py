"""Compares the speed of our Riemannian Adam with geoopt's and with plain PyTorch, in turns on the same starts.

    make bench NAME=paper

Compare the ratios: the speeds themselves depend on the machine. ``spearpp reproduce`` measures how much the paper's
searches recover.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks import command
from benchmarks.recovery import FIRST_SEED, Setting, attack
from spearpp.inversion.observation import observe
from spearpp.inversion.problem import Problem, pose
from spearpp.linalg import sphere
from spearpp.search import RiemannianAdam
from spearpp.search.base import chunk_sizes


@dataclass(frozen=True)
class Speed:
    """One row: start-steps per second of our search, of geoopt and of plain PyTorch, in float32, best of 5 turns."""

    device: str
    b: int
    m: int
    starts: int
    ours: float
    geoopt: float
    plain: float
    ratio: float
    """Speed of our search divided by the speed of geoopt."""
    ours_gflops: float
    peak_gflops: float
    """GFLOP/s of a large square float32 matrix product on the same device."""


def main() -> int:
    options = command.parser(__doc__).parse_args()
    return command.run(command.printed(speeds(options.data, options.device)), options.out)


def speeds(data: str | None, device: torch.device) -> Iterator[Speed]:
    """Measure all rows."""
    peak = command.peak(device)
    sizes = [(20, 200, 8192), (65, 1000, 4096)]
    if device.type == "cuda":
        sizes = [(20, 200, 65_536), (20, 200, 1_000_000), (65, 1000, 65_536), (150, 4000, 32_768)]
    for b, m, starts in sizes:
        _, (seen, *_) = attack(Setting("speed", b, m, RiemannianAdam()), data).prepare(FIRST_SEED, device)
        problem = pose(observe(*seen))
        ours, geoopt, plain = _compare(problem, starts, steps=50)
        gflops = ours * 4 * m * b / 1e9
        yield Speed(str(device), b, m, starts, ours, geoopt, plain, ours / geoopt, gflops, peak)


def _compare(problem: Problem, starts: int, steps: int) -> list[float]:
    """Return the start-steps per second of our search, of geoopt and of plain PyTorch."""
    import geoopt

    rows = problem.live_rows.float()
    generator = torch.Generator().manual_seed(0)
    points = sphere.uniform(starts, problem.batch_size, generator, device=rows.device)
    search = RiemannianAdam(steps=steps)
    sizes = list(chunk_sizes(starts, rows.shape[0] * rows.element_size(), rows.device, None))

    def ours() -> None:
        for part in points.split(sizes):
            search.descend(rows, part.clone())

    def with_geoopt() -> None:
        moved = geoopt.ManifoldParameter(points.clone(), manifold=geoopt.Sphere())
        optimiser = geoopt.optim.RiemannianAdam([moved], lr=search.rates[0][1])
        for _ in range(steps):
            optimiser.zero_grad()
            (moved @ rows.T).abs().sum().backward()
            optimiser.step()

    def plain() -> None:
        """The direct implementation: autograd, torch's Adam, and a projection to the sphere after every step."""
        moved = points.clone().requires_grad_()
        optimiser = torch.optim.Adam([moved], lr=search.rates[0][1])
        for _ in range(steps):
            optimiser.zero_grad()
            (moved @ rows.T).abs().sum().backward()
            optimiser.step()
            with torch.no_grad():
                moved.div_(torch.linalg.vector_norm(moved, dim=1, keepdim=True))

    contestants = (ours, with_geoopt, plain)
    turns = [[command.seconds(one, rows.device) for one in contestants] for _ in range(5)]
    return [starts * steps / min(times) for times in zip(*turns, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
