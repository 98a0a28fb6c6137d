"""Measures work and time of the gated search. Fails if the search needs more work than the committed baseline.

    make bench NAME=speed
    make bench NAME=speed ARGS="--update"      # replace the baseline by the measured numbers
    make bench NAME=speed ARGS="--large"       # also m = 4000, for a GPU

Work is counted in start-steps and in operations of matrix products. Both are the same in every run on a device. Time is
compared with one float64 singular value decomposition of the same gradient, because both change alike when the machine
is busy; a larger ratio is only a warning. The benchmark ends with the comparison of ``benchmarks.paper``.
"""

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

import spearpp
from benchmarks import command, paper
from benchmarks.recovery import FIRST_SEED, Setting, attack
from spearpp.inversion.observation import observe
from spearpp.inversion.result import Inversion
from spearpp.search import Gated

BASELINE = Path(__file__).with_name("baseline.json")
ALLOWED_GROWTH = 1.2
"""Factor by which a number may exceed the baseline.

Design choice: rounding differs between machines and can change the course of a search, so exact equality is too strict.
"""
SIZES = ((20, 200, 8), (30, 200, 8), (50, 200, 4), (100, 1000, 3))
"""(b, m, batches) of the rows."""
LARGE_SIZES = ((210, 4000, 4), (600, 4000, 1))
"""Further rows with ``--large``."""


@dataclass(frozen=True)
class Row:
    """Medians over several batches of one size, including the singular value decomposition."""

    device: str
    b: int
    m: int
    batches: int
    whole: int
    """Number of batches that were recovered exactly, with every input certified."""
    start_steps: float
    operations: float
    """Operations of matrix products: two for each multiplication. nan on a GPU, which does not count replayed steps."""
    seconds: float
    svds: float
    """Seconds, divided by those of one float64 singular value decomposition of the same gradient."""
    products: float
    """Seconds, divided by those that a large matrix product takes for the same number of operations."""
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds of each stage of the inversion."""

    @property
    def name(self) -> str:
        """Name of the row in the baseline."""
        return f"{self.device} b={self.b} m={self.m}"


def main() -> int:
    options = command.parser(__doc__)
    options.add_argument("--large", action="store_true", help="also measure m = 4000")
    options.add_argument("--update", action="store_true", help="replace the baseline by the measured numbers")
    chosen = options.parse_args()
    rows: list[Row] = []

    def gated() -> Iterator[Row | paper.Speed]:
        peak = command.peak(chosen.device)
        for size in (*SIZES, *LARGE_SIZES) if chosen.large else SIZES:
            rows.append(_measured(*size, chosen.data, chosen.device, peak))
            yield rows[-1]
        yield from paper.speeds(chosen.data, chosen.device)

    status = command.run(command.printed(gated()), chosen.out)
    baseline = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    if chosen.update and all(row.whole == row.batches for row in rows):
        kept = ("start_steps", "operations", "svds")
        baseline |= {row.name: {key: asdict(row)[key] for key in kept} for row in rows}
        BASELINE.write_text(json.dumps(baseline, indent=1, sort_keys=True) + "\n")
        return status
    worse, slower = compare(rows, baseline)
    for line in slower:
        print(f"warning: {line}", file=sys.stderr)
    for line in worse:
        print(f"error: {line}", file=sys.stderr)
    return status or int(bool(worse))


def compare(rows: list[Row], baseline: dict[str, dict[str, float]]) -> tuple[list[str], list[str]]:
    """Compare rows with the baseline.

    Returns:
        Errors (a fifth more work than in the baseline, or a batch that was not recovered) and warnings (a fifth more
        time, or a row without a baseline).
    """
    worse = [f"{row.name}: {row.whole} of {row.batches} batches recovered" for row in rows if row.whole < row.batches]
    slower = []
    for row in rows:
        before = baseline.get(row.name)
        if before is None:
            slower.append(f"{row.name} has no baseline")
            continue
        for key, into in (("start_steps", worse), ("operations", worse), ("svds", slower)):
            now = asdict(row)[key]
            if now > ALLOWED_GROWTH * before[key]:
                into.append(f"{row.name}: {key} {now:,.4g}, the baseline has {before[key]:,.4g}")
    return worse, slower


def _measured(b: int, m: int, batches: int, data: str | None, device: torch.device, peak: float) -> Row:
    batches_measured = [_batch(seed, b, m, data, device) for seed in range(FIRST_SEED, FIRST_SEED + batches)]

    def median(of: Callable[[_Batch], float]) -> float:
        return statistics.median(of(batch) for batch in batches_measured)

    operations, seconds = median(lambda batch: batch.operations), median(lambda batch: batch.seconds)
    return Row(
        device=device.type,
        b=b,
        m=m,
        batches=batches,
        whole=sum(batch.whole for batch in batches_measured),
        start_steps=median(lambda batch: batch.result.stats.steps),
        operations=operations,
        seconds=seconds,
        svds=median(lambda batch: batch.seconds / batch.svd),
        products=seconds * peak * 1e9 / operations,
        stages={
            stage: round(statistics.median(batch.result.stats.seconds[stage] for batch in batches_measured), 4)
            for stage in batches_measured[0].result.stats.seconds
        },
    )


@dataclass(frozen=True)
class _Batch:
    result: Inversion
    whole: bool
    operations: float
    seconds: float
    svd: float


def _batch(seed: int, b: int, m: int, data: str | None, device: torch.device) -> _Batch:
    """Invert one batch twice: first count its operations, then time it and a decomposition of the same gradient."""
    batch, (seen, *_) = attack(Setting("speed", b, m, Gated()), data).prepare(seed, device)
    results: list[Inversion] = []

    def invert() -> None:
        results.append(spearpp.invert(*seen, generator=torch.Generator().manual_seed(seed)))

    with FlopCounterMode(display=False) as counter:
        invert()
    gradient = observe(*seen).gradient
    svd = command.seconds(lambda: torch.linalg.svd(gradient, full_matrices=False), device)
    seconds = command.seconds(invert, device)
    result = results[-1]
    score = spearpp.score(result.inputs, batch.inputs.to(device), normalisation=batch.normalisation)
    whole = score.exact and bool(result.certified.all())
    operations = math.nan if device.type == "cuda" else counter.get_total_flops()
    return _Batch(result, whole, operations, seconds, svd)


if __name__ == "__main__":
    sys.exit(main())
