"""Measures the paper's searches: how many batches they recover and how fast they step.

    make bench-paper                                  # everything, on the device that is there
    make bench-paper ARGS="--batches 50 --parts recovery"

Recovery: CIFAR-10 test images (SPEARPP_DATA), a fresh 3072-m-m-m-10 network, float32 gradients, one
seed a batch from 1000 on. Speed: our Riemannian Adam and geoopt's take turns on the same starts in
one run; their ratio is what counts, seconds depend on the machine.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import spearpp
from spearpp import simulate, sphere
from spearpp.losses import LogCosh, NegativeL4
from spearpp.observation import observe
from spearpp.problem import Problem, pose
from spearpp.search import KernelSampling, ProjectedGradient, RiemannianAdam, Search
from spearpp.search.base import chunk_sizes
from spearpp.simulate import Batch
from spearpp.simulate.clients import LayerGradient

FIRST_SEED = 1000


@dataclass(frozen=True)
class Recovery:
    """One row: many batches of one setting."""

    method: str
    b: int
    m: int
    starts: int
    batches: int
    accurate: int
    """Batches with mean PSNR > 90, the paper's accuracy."""
    exact: int
    """Batches with every input over 90."""
    certified: int
    wrongly_certified: int
    mean_psnr: float
    median_starts: float
    median_seconds: float
    paper: str


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--starts", type=int, default=65_536)
    parser.add_argument("--data", help="CIFAR-10 npz or its folder; default SPEARPP_DATA")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parts", nargs="+", default=["recovery", "spear", "speed"])
    parser.add_argument("--out", type=Path, help="write the rows as JSON too")
    options = parser.parse_args()
    device = torch.device(options.device)
    rows: list[Recovery | Speed] = []
    if "recovery" in options.parts:
        rows += _recover(options, device, _paper_settings(options.starts))
    if "spear" in options.parts:
        rows += _recover(options, device, _spear_settings())
    if "wide" in options.parts:
        rows += _recover(options, device, _wide_settings(options.starts))
    if "speed" in options.parts:
        rows += list(_speeds(options.data, device))
    if options.out:
        options.out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0


Setting = tuple[str, int, int, Search, str]

HEADER = (
    f"{'method':<24}{'b':>4}{'m':>6}{'starts':>9}   mean > 90 (95 % interval)    all > 90  certified (wrong)"
    "  mean PSNR  median starts  median s  paper"
)


def _line(row: Recovery) -> str:
    low, high = _wilson(row.accurate, row.batches)
    of = f"/{row.batches}"
    return (
        f"{row.method:<24}{row.b:>4}{row.m:>6}{row.starts:>9}"
        f"   {row.accurate:>3}{of} = {row.accurate / row.batches:4.0%} ({low:4.0%} to {high:4.0%})"
        f"   {row.exact:>3}{of}    {row.certified:>3}{of} ({row.wrongly_certified})     "
        f"  {row.mean_psnr:>9.1f}  {row.median_starts:>13,.0f}  {row.median_seconds:>8.2f}  {row.paper}"
    )


def _paper_settings(starts: int) -> list[Setting]:
    return [
        ("L1 + Riemannian Adam", 20, 200, RiemannianAdam(starts=starts), "95 % (1e6 starts)"),
        ("LogCosh + rounding", 20, 200, RiemannianAdam(loss=LogCosh(1 / 300), starts=starts), "98 % (1e6 starts)"),
        ("L1 + projected gradient", 20, 200, ProjectedGradient(starts=starts), "25 % (1e6 starts)"),
        ("-L4 + rounding", 15, 200, RiemannianAdam(loss=NegativeL4(), starts=starts), "62 % (1e6 starts)"),
    ]


def _spear_settings() -> list[Setting]:
    return [("kernel sampling", b, 200, KernelSampling(starts=1_000_000), "-") for b in (8, 9, 10, 11, 12)]


def _wide_settings(starts: int) -> list[Setting]:
    l1 = RiemannianAdam(starts=starts)
    return [
        ("L1 + Riemannian Adam", 25, 200, l1, "77 % (1e6 starts)"),
        ("L1 + Riemannian Adam", 30, 200, l1, "25 % (1e6 starts)"),
        ("L1 + Riemannian Adam", 65, 1000, l1, "100 % (1e6 starts)"),
        ("L1 + Riemannian Adam", 100, 1000, l1, "41 % (1e6 starts)"),
        ("LogCosh + rounding", 65, 1000, RiemannianAdam(loss=LogCosh(1 / 500), starts=starts), "27 % (1e6 starts)"),
    ]


def _client(seed: int, b: int, m: int, data: str | None, device: torch.device) -> tuple[Batch, LayerGradient]:
    generator = torch.Generator().manual_seed(seed)
    batch = simulate.cifar10(b, path=data, generator=generator)
    model = simulate.mlp(3072, [m, m, m], 10, generator=generator).to(device)
    return batch, simulate.fedsgd(model, batch)


def _recover(options: argparse.Namespace, device: torch.device, settings: list[Setting]) -> Iterator[Recovery]:
    print("\n" + HEADER)
    for method, b, m, search, paper in settings:
        scores, certified, wrong, starts, seconds = [], 0, 0, [], []
        for index in range(options.batches):
            seed = FIRST_SEED + index
            batch, seen = _client(seed, b, m, options.data, device)
            began = time.perf_counter()
            result = spearpp.invert(*seen, search=search, generator=torch.Generator().manual_seed(seed))
            seconds.append(time.perf_counter() - began)
            scores.append(spearpp.score(result.inputs, batch.inputs, normalisation=batch.normalisation))
            certified += bool(result.certified.all())
            wrong += bool(result.certified.all()) and not scores[-1].exact
            starts.append(result.stats.starts)
            if sys.stderr.isatty():
                print(f"\r{method}: {index + 1} of {options.batches}\r", end="", file=sys.stderr, flush=True)
        row = Recovery(
            method=method,
            b=b,
            m=m,
            starts=search.starts,
            batches=options.batches,
            accurate=sum(each.accurate for each in scores),
            exact=sum(each.exact for each in scores),
            certified=certified,
            wrongly_certified=wrong,
            mean_psnr=statistics.mean(each.mean_psnr for each in scores),
            median_starts=statistics.median(starts),
            median_seconds=statistics.median(seconds),
            paper=paper,
        )
        print(_line(row), flush=True)
        yield row


def _wilson(hits: int, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval for a share."""
    z, share = 1.96, hits / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials**2))
    return centre - half, centre + half


def _speeds(data: str | None, device: torch.device) -> Iterator[Speed]:
    print(f"\nRiemannian Adam with L1 on {device}, float32, 50 steps, best of 5 turns each")
    print("   b     m  starts  start-steps/s: ours       geoopt  ratio  GFLOP/s: ours  a matrix product")
    peak = _peak(device)
    sizes = [(20, 200, 8192), (65, 1000, 4096)]
    if device.type == "cuda":
        sizes = [(20, 200, 65_536), (20, 200, 1_000_000), (65, 1000, 65_536), (150, 4000, 32_768)]
    for b, m, starts in sizes:
        _, seen = _client(FIRST_SEED, b, m, data, device)
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
