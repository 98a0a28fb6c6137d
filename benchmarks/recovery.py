"""Recovery rates: many batches of one setting, one seed a batch from 1000 on."""

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

import spearpp
from spearpp import simulate
from spearpp.filtering import Selection, recover
from spearpp.nullspace import kernel_vectors
from spearpp.observation import observe
from spearpp.problem import pose
from spearpp.search import Search
from spearpp.shapes import Tensor
from spearpp.simulate import Batch, LayerGradient

FIRST_SEED = 1000
Client = Callable[[nn.Module, Batch, torch.Generator], list[LayerGradient]]


def fedsgd(model: nn.Module, batch: Batch, _generator: torch.Generator) -> list[LayerGradient]:
    return simulate.fedsgd(model, batch)


@dataclass(frozen=True)
class Setting:
    """What one row measures."""

    method: str
    b: int
    m: int
    search: Search
    paper: str = "-"
    client: Client = field(default=fedsgd, repr=False)
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
    low, high = wilson(row.accurate, row.batches)
    of = f"/{row.batches}"
    return (
        f"{row.method:<26}{row.b:>5}{row.m:>6}"
        f"  {row.accurate:>3}{of:<4} {row.accurate / row.batches:4.0%} ({low:4.0%} to {high:4.0%})"
        f"  {row.exact:>3}{of:<4}  {row.certified:>3}{of:<4}"
        f"  {row.certified_inputs:>6} ({row.wrongly_certified}), {row.uncertified:<6}"
        f"{row.mean_psnr:>18.1f} ({row.with_masks:.1f})  {row.median_starts:>6,.0f}"
        f"  {row.median_seconds:>6.2f} ({row.median_decompose:.2f})  {row.paper}"
    )


def wilson(hits: int, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval for a share."""
    z, share = 1.96, hits / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def client_of(seed: int, setting: Setting, data: str | None, device: torch.device) -> tuple[Batch, list[LayerGradient]]:
    generator = torch.Generator().manual_seed(seed)
    batch = simulate.cifar10(setting.b, path=data, normalise=not setting.raw, generator=generator)
    model = simulate.mlp(3072, [setting.m] * 3, 10, generator=generator).to(device)
    return batch, setting.client(model, batch, generator)


def with_true_masks(seen: LayerGradient, batch: Batch) -> Tensor:
    """What comes back if every direction is solved for the rows its true input silences."""
    problem = pose(observe(*seen))
    left, noise = problem.factors.left, problem.factors.row_noise
    assert seen.bias is not None
    silent = batch.inputs.to(seen.weight) @ seen.weight.T + seen.bias <= 0
    rows = left / noise.clamp_min(torch.finfo(noise.dtype).tiny)[:, None] * noise.max()
    directions = torch.cat([kernel_vectors(part[:, :, None] * rows)[0] for part in silent.split(16)])
    return recover(problem, Selection(directions, silent, len(directions), 0.0))


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
    scores, results, seconds, bounds, wrong, missed = [], [], [], [], 0, 0
    end = "\r" if sys.stderr.isatty() else "\n"  # a run that is cut short has said how far it came
    for index in range(batches):
        seed = FIRST_SEED + index
        batch, (seen, following, *_) = client_of(seed, setting, data, device)
        two = setting.witnesses == 2
        began = time.perf_counter()
        result = spearpp.invert(
            *seen,
            next_grad_weight=following.grad_weight if two else None,
            next_weight=following.weight if two else None,
            search=setting.search,
            generator=torch.Generator().manual_seed(seed),
        )
        seconds.append(time.perf_counter() - began)
        scored = partial(
            spearpp.score, truth=batch.inputs, normalisation=batch.normalisation, threshold=setting.threshold
        )
        score = scored(result.inputs)
        if setting.bound:
            bounds.append(scored(with_true_masks(seen, batch)).mean_psnr)
        certified = result.certified.cpu()
        near = torch.zeros(len(certified))
        near[score.assignment[score.assignment >= 0]] = score.psnr[score.assignment >= 0].float()
        wrong += int((certified & (near < 60)).sum())
        missed += int((~certified & (near > 90)).sum())
        scores.append(score)
        results.append(result)
        held = f"{sum(each.accurate for each in scores)} of {index + 1} batches, of {batches}; {seconds[-1]:.1f} s"
        print(f"{setting.method}, b={setting.b}: {held}", end=end, file=sys.stderr, flush=True)
    return Recovery(
        method=setting.method,
        b=setting.b,
        m=setting.m,
        batches=batches,
        accurate=sum(each.accurate for each in scores),
        exact=sum(each.exact for each in scores),
        certified=sum(each.missing == 0 for each in results),
        certified_inputs=sum(int(each.certified.sum()) for each in results),
        wrongly_certified=wrong,
        uncertified=missed,
        mean_psnr=statistics.mean(each.mean_psnr for each in scores),
        with_masks=statistics.mean(bounds) if bounds else math.nan,
        median_starts=statistics.median(each.stats.starts for each in results),
        median_seconds=statistics.median(seconds),
        median_decompose=statistics.median(each.stats.seconds["decompose"] for each in results),
        paper=setting.paper,
    )
