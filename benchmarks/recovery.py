"""Measures recovery rates: many batches of one setting, with the seeds 1000, 1001, ..."""

import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from spearpp.experiments import Attack, Source
from spearpp.experiments.cell import FIRST_SEED
from spearpp.experiments.intervals import wilson
from spearpp.metrics import PAPER_PSNR
from spearpp.search import Search
from spearpp.simulate import Client, FedSGD

__all__ = ["FIRST_SEED", "Recovery", "Setting", "attack", "measure"]


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


@dataclass(frozen=True)
class Recovery:
    """One row of results."""

    method: str
    b: int
    m: int
    batches: int
    accurate: int
    """Number of batches with a mean PSNR above the threshold. The paper calls their share accuracy."""
    exact: int
    """Number of batches in which every input is above the threshold."""
    certified: int
    """Number of batches in which every input is certified."""
    certified_inputs: int
    wrongly_certified: int
    """Number of certified inputs with a PSNR below 60 dB to the true input they are matched to."""
    uncertified: int
    """Number of inputs above 90 dB that were not certified."""
    mean_psnr: float
    with_masks: float
    """Mean PSNR if the true activation patterns are known, an upper limit under noise; nan if not measured."""
    median_starts: float
    median_seconds: float
    median_decompose: float
    """Median seconds of the singular value decomposition, which are part of ``median_seconds``."""
    paper: str


HEADER = (
    f"{'method':<26}{'b':>5}{'m':>6}  mean > threshold (95 %)      all >   certified  inputs: certified (wrong), missed"
    "  mean PSNR (true patterns)  starts  seconds (svd)  paper"
)


def line(row: Recovery) -> str:
    """Return the row as text, below ``HEADER``."""
    share = wilson(row.accurate, row.batches)
    of = f"/{row.batches}"
    return (
        f"{row.method:<26}{row.b:>5}{row.m:>6}"
        f"  {row.accurate:>3}{of:<4} {share.value:4.0%} ({share.low:4.0%} to {share.high:4.0%})"
        f"  {row.exact:>3}{of:<4}  {row.certified:>3}{of:<4}"
        f"  {row.certified_inputs:>6} ({row.wrongly_certified}), {row.uncertified:<6}"
        f"{row.mean_psnr:>18.1f} ({row.with_masks:.1f})  {row.median_starts:>6,.0f}"
        f"  {row.median_seconds:>6.2f} ({row.median_decompose:.2f})  {row.paper}"
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


def measure(settings: list[Setting], batches: int | None, data: str | None, device: torch.device) -> Iterator[Recovery]:
    """Measure the settings in order, and print each row when it is done.

    Args:
        settings: what to measure.
        batches: largest number of batches; None takes the number of each setting.
        data: path of CIFAR-10.
        device: where the inversion runs.
    """
    print("\n" + HEADER)
    for setting in settings:
        row = _measure_one(setting, min(filter(None, (setting.batches, batches))), data, device)
        print(line(row), flush=True)
        yield row


def _measure_one(setting: Setting, batches: int, data: str | None, device: torch.device) -> Recovery:
    measured: list[dict[str, Any]] = []
    planned = attack(setting, data)
    end = "\r" if sys.stderr.isatty() else "\n"  # so that the log of an interrupted run shows its progress
    for seed in range(FIRST_SEED, FIRST_SEED + batches):
        measured.append(planned.measure(seed, device))
        accurate = sum(each["accurate"] for each in measured)
        progress = (
            f"{accurate} of {len(measured)} batches accurate, {batches} in total; {measured[-1]['seconds']:.1f} s"
        )
        print(f"{setting.method}, b={setting.b}: {progress}", end=end, file=sys.stderr, flush=True)
    bounds = [each["with_masks"] for each in measured if each["with_masks"] is not None]
    return Recovery(
        method=setting.method,
        b=setting.b,
        m=setting.m,
        batches=batches,
        accurate=sum(each["accurate"] for each in measured),
        exact=sum(each["exact"] for each in measured),
        certified=sum(each["certified"] == setting.b for each in measured),
        certified_inputs=sum(each["certified"] for each in measured),
        wrongly_certified=sum(each["wrongly_certified"] for each in measured),
        uncertified=sum(each["missed"] for each in measured),
        mean_psnr=statistics.mean(each["mean_psnr"] for each in measured),
        with_masks=statistics.mean(bounds) if bounds else math.nan,
        median_starts=statistics.median(each["starts"] for each in measured),
        median_seconds=statistics.median(each["seconds"] for each in measured),
        median_decompose=statistics.median(each["decompose"] for each in measured),
        paper=setting.paper,
    )
