"""Measures recovery rates: many batches of one setting, with the seeds 1000, 1001, ..."""

import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from spearpp.experiments import Attack, Source
from spearpp.experiments.cell import FIRST_SEED
from spearpp.experiments.reproduce import Result, summarise
from spearpp.experiments.table import Row
from spearpp.metrics import PAPER_PSNR
from spearpp.search import Search
from spearpp.simulate import Client, FedSGD

__all__ = ["FIRST_SEED", "Setting", "attack", "measure"]


@dataclass(frozen=True)
class Setting:
    """Setting of one row."""

    method: str
    b: int
    m: int
    search: Search
    paper: str = "-"
    """What the paper reports, or a target, as text."""
    client: Client = field(default=FedSGD(), repr=False)
    threshold: float = PAPER_PSNR
    """PSNR in dB above which an input counts as recovered."""
    batches: int | None = None
    """Number of batches; None takes the number on the command line."""
    bound: bool = False
    """Whether to measure the PSNR with known activation patterns."""
    layers_used: int = 1
    """Number of layers the server uses. 1: the first layer. 2: the first layer and the next layer."""
    raw: bool = False
    """Whether inputs are pixels in [0, 1] that are not normalised."""


HEADER = (
    f"{'method':<26}{'b':>5}{'m':>6}  mean > threshold (95 %)      all >   certified  inputs: certified (wrong), missed"
    "  mean PSNR (true patterns)  starts  seconds (svd)  paper"
)


def line(setting: Setting, row: Result) -> str:
    """Return the row as text, below ``HEADER``."""
    assert row.accuracy is not None
    assert row.psnr is not None
    decompose = statistics.median(each["decompose"] for each in row.each)
    of, masks = f"/{row.batches}", "nan" if row.with_masks is None else f"{row.with_masks:.1f}"
    accurate, exact = (sum(each[name] for each in row.each) for name in ("accurate", "exact"))
    certified = sum(each["certified"] == each["b"] for each in row.each)
    return (
        f"{setting.method:<26}{setting.b:>5}{setting.m:>6}"
        f"  {accurate:>3}{of:<4} {row.accuracy.value:4.0%} ({row.accuracy.low:4.0%} to {row.accuracy.high:4.0%})"
        f"  {exact:>3}{of:<4}  {certified:>3}{of:<4}"
        f"  {row.certified:>6} ({row.wrong}), {sum(each['missed'] for each in row.each):<6}"
        f"{row.psnr.value:>18.1f} ({masks})  {row.median_starts:>6,.0f}"
        f"  {row.median_seconds:>6.2f} ({decompose:.2f})  {setting.paper}"
    )


def attack(setting: Setting, data: str | None) -> Attack:
    """Return the same setting as an ``Attack`` on CIFAR-10."""
    return Attack(
        b=setting.b,
        m=setting.m,
        search=setting.search,
        client=setting.client,
        data=Source.parse(data or "cifar10"),
        layers_used=setting.layers_used,
        normalise=not setting.raw,
        threshold=setting.threshold,
        bound=setting.bound,
    )


def measure(settings: list[Setting], batches: int | None, data: str | None, device: torch.device) -> Iterator[Result]:
    """Measure the settings in order, and print each row when it is done.

    Args:
        settings: what to measure.
        batches: largest number of batches; None takes the number of each setting.
        data: path of CIFAR-10.
        device: where the inversion runs.
    """
    print("\n" + HEADER)
    for setting in settings:
        count, planned = min(filter(None, (setting.batches, batches))), attack(setting, data)
        measured: list[dict[str, Any]] = []
        end = "\r" if sys.stderr.isatty() else "\n"  # so that the log of an interrupted run shows its progress
        for seed in range(FIRST_SEED, FIRST_SEED + count):
            measured.append(planned.measure(seed, device))
            accurate = sum(each["accurate"] for each in measured)
            progress = f"{accurate} of {len(measured)} batches accurate, {count} in total"
            seconds = f"{measured[-1]['seconds']:.1f} s"
            print(f"{setting.method}, b={setting.b}: {progress}; {seconds}", end=end, file=sys.stderr, flush=True)
        row = summarise(Row(setting.method, setting.paper, planned, None), measured, count)
        print(line(setting, row), flush=True)
        yield row
