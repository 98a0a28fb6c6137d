"""Recovery rates: many batches of one setting, one seed a batch from 1000 on."""

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
from spearpp.search import Search
from spearpp.simulate import Client, FedSGD

__all__ = ["FIRST_SEED", "Recovery", "Setting", "attack", "measure"]


@dataclass(frozen=True)
class Setting:
    """What one row measures."""

    method: str
    b: int
    m: int
    search: Search
    paper: str = "-"
    client: Client = field(default=FedSGD(), repr=False)
    threshold: float = 90.0
    batches: int | None = None
    bound: bool = False
    """Whether to measure what the true masks would give."""
    witnesses: int = 1
    """1: the first layer alone. 2: the gradient of the second as well."""
    raw: bool = False
    """Pixels in [0, 1] as they are, not normalised."""


@dataclass(frozen=True)
class Recovery:
    """One row of results."""

    method: str
    b: int
    m: int
    batches: int
    accurate: int
    """Batches with mean PSNR over the threshold, the paper's accuracy."""
    exact: int
    """Batches with every input over it."""
    certified: int
    """Batches with every input certified."""
    certified_inputs: int
    wrongly_certified: int
    """Certified inputs with a PSNR under 60 to the nearest true one."""
    uncertified: int
    """Inputs over 90 dB that were not certified."""
    mean_psnr: float
    with_masks: float
    """Mean PSNR with the true masks given, the most that noise allows; nan where there is no noise."""
    median_starts: float
    median_seconds: float
    median_decompose: float
    """Of these seconds, the singular value decomposition."""
    paper: str


HEADER = (
    f"{'method':<26}{'b':>5}{'m':>6}  mean > threshold (95 %)      all >   certified  inputs: certified (wrong), missed"
    "  mean PSNR (true masks)  starts  seconds (svd)  paper"
)


def line(row: Recovery) -> str:
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
    """The same as the package measures it, on CIFAR-10."""
    return Attack(
        b=setting.b,
        m=setting.m,
        search=setting.search,
        client=setting.client,
        data=Source.parse(data or "cifar10"),
        witnesses=setting.witnesses,
        normalise=not setting.raw,
        threshold=setting.threshold,
        bound=setting.bound,
    )


def measure(settings: list[Setting], batches: int | None, data: str | None, device: torch.device) -> Iterator[Recovery]:
    """Measure one setting after the other, printing each row when it is done.

    ``batches`` is for settings that do not say how many they want; there it is at most that.
    """
    print("\n" + HEADER)
    for setting in settings:
        row = _measure_one(setting, min(filter(None, (setting.batches, batches))), data, device)
        print(line(row), flush=True)
        yield row


def _measure_one(setting: Setting, batches: int, data: str | None, device: torch.device) -> Recovery:
    measured: list[dict[str, Any]] = []
    planned = attack(setting, data)
    end = "\r" if sys.stderr.isatty() else "\n"  # a run that is cut short has said how far it came
    for seed in range(FIRST_SEED, FIRST_SEED + batches):
        measured.append(planned.measure(seed, device))
        accurate = sum(each["accurate"] for each in measured)
        held = f"{accurate} of {len(measured)} batches, of {batches}; {measured[-1]['seconds']:.1f} s"
        print(f"{setting.method}, b={setting.b}: {held}", end=end, file=sys.stderr, flush=True)
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
