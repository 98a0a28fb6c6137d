"""The paper's tables, measured: our numbers beside its own."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from spearpp.experiments.cell import Cell, cells_of
from spearpp.experiments.intervals import Interval, mean, wilson
from spearpp.experiments.store import Store, Stored
from spearpp.experiments.table import Row, Table
from spearpp.experiments.version import code_version, commit

RAW = ("mean_psnr", "recovered", "certified", "starts", "seconds")
"""What the JSON has of every batch, in the order of the seeds."""


@dataclass(frozen=True)
class Result:
    """One row with what was measured; ``batches`` says how much of it there is."""

    row: Row
    batches: int
    wanted: int
    accuracy: Interval | None
    """Share of batches with mean PSNR over the threshold, the paper's accuracy."""
    exact: Interval | None
    """Share of batches with every input over it."""
    psnr: Interval | None
    """Mean over the batches, in dB."""
    with_masks: float | None
    """dB with the true masks given, where there is noise."""
    certified: int
    inputs: int
    wrong: int
    """Certified inputs that are not in the batch."""
    starts: float | None
    """Median of those spent."""
    seconds: float | None
    """Median a batch, decomposition included."""
    each: tuple[dict[str, Any], ...]
    """The batches one by one, as they were measured."""


@dataclass(frozen=True)
class Reproduction:
    """A table with all its results, and where they come from."""

    table: Table
    results: tuple[Result, ...]
    data: str
    code: str
    commits: tuple[str, ...]
    devices: tuple[str, ...]
    stale: int
    """Cells of this table that other code versions measured; not counted."""

    @property
    def complete(self) -> bool:
        """Whether every row has all its batches."""
        return all(each.batches == each.wanted for each in self.results)


def cells(table: Table) -> list[Cell]:
    """All cells of a table, row after row; rows that share a setting share their cells."""
    return [cell for row in table.rows for cell in cells_of(row.setting, table.batches)]


def collect(table: Table, store: Store) -> Reproduction:
    """What a store holds of a table at this code version."""
    results, kept = [], []
    for row in table.rows:
        found = [stored for cell in cells_of(row.setting, table.batches) if (stored := store.get(cell)) is not None]
        results.append(summarise(row, [each.result for each in found], table.batches))
        kept += found
    return Reproduction(
        table=table,
        results=tuple(results),
        data=table.rows[0].setting.data.kind if table.rows else "",
        code=code_version(),
        commits=_distinct(kept, lambda each: each.commit) or (commit(),),
        devices=_distinct(kept, lambda each: each.versions.get("device", "")),
        stale=store.stale(cells(table)),
    )


def summarise(row: Row, measured: Sequence[dict[str, Any]], wanted: int) -> Result:
    """Rates with Wilson's intervals, the mean PSNR with Student's, medians of the rest."""
    count = len(measured)
    bounds = [each["with_masks"] for each in measured if each["with_masks"] is not None]
    return Result(
        row=row,
        batches=count,
        wanted=wanted,
        accuracy=wilson(sum(each["accurate"] for each in measured), count) if count else None,
        exact=wilson(sum(each["exact"] for each in measured), count) if count else None,
        psnr=mean([each["mean_psnr"] for each in measured]) if count else None,
        with_masks=statistics.fmean(bounds) if bounds else None,
        certified=sum(each["certified"] for each in measured),
        inputs=sum(each["b"] for each in measured),
        wrong=sum(each["wrongly_certified"] for each in measured),
        starts=statistics.median(each["starts"] for each in measured) if count else None,
        seconds=statistics.median(each["seconds"] for each in measured) if count else None,
        each=tuple(measured),
    )


def as_json(reproduction: Reproduction) -> dict[str, Any]:
    """Everything as plain values, one entry a row."""
    table = reproduction.table
    return {
        "table": table.name,
        "title": table.title,
        "reference": table.reference,
        "data": reproduction.data,
        "code": reproduction.code,
        "commits": list(reproduction.commits),
        "devices": list(reproduction.devices),
        "stale": reproduction.stale,
        "rows": [
            {
                "method": each.row.name,
                "ours": each.row.ours,
                "note": each.row.note,
                "b": each.row.setting.b,
                "m": each.row.setting.m,
                "threshold": each.row.setting.threshold,
                "starts": each.row.setting.search.starts,
                "paper": asdict(each.row.claim) if each.row.claim else None,
                "batches": each.batches,
                "wanted": each.wanted,
                "accuracy": _plain(each.accuracy),
                "exact": _plain(each.exact),
                "psnr": _plain(each.psnr),
                "with_masks": each.with_masks,
                "certified": each.certified,
                "inputs": each.inputs,
                "wrong": each.wrong,
                "median_starts": each.starts,
                "median_seconds": each.seconds,
                "each_batch": {name: [batch.get(name) for batch in each.each] for name in RAW},
            }
            for each in reproduction.results
        ],
    }


def _plain(interval: Interval | None) -> dict[str, float | None] | None:
    if interval is None:
        return None
    return {name: value if value == value else None for name, value in asdict(interval).items()}  # nan is no JSON


def _distinct(kept: Sequence[Stored], what: Any) -> tuple[str, ...]:
    return tuple(sorted({what(each) for each in kept} - {""}))
