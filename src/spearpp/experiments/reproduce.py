"""Collects the measured numbers of a table, beside the numbers of the paper."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from spearpp.auditing.document import plain
from spearpp.experiments.cell import Cell, cells_of, code_version, commit
from spearpp.experiments.intervals import Interval, mean, wilson
from spearpp.experiments.store import Store
from spearpp.experiments.table import Row, Table

KEPT_OF_EACH_BATCH = ("mean_psnr", "recovered", "certified", "starts", "seconds")
"""Fields of ``Measurement`` that the JSON output lists for every batch, in the order of the seeds."""


@dataclass(frozen=True)
class Result:
    """Measured numbers of one row, of which ``batches`` of the ``wanted`` batches are measured. Without any: None."""

    row: Row
    batches: int
    wanted: int
    accuracy: Interval | None
    """Share of batches with a mean PSNR above the threshold. The paper calls it accuracy."""
    exact: Interval | None
    """Share of batches in which the PSNR of every input is above the threshold."""
    psnr: Interval | None
    """Mean PSNR over the batches, in dB."""
    with_masks: float | None
    """Mean PSNR in dB if the true activation patterns are known; None if not measured."""
    certified: int
    inputs: int
    """Number of inputs in all batches."""
    wrong: int
    """Number of certified inputs that are not in the batch."""
    median_starts: float | None
    median_seconds: float | None
    """Median duration of an inversion, including the singular value decomposition."""
    each: tuple[dict[str, Any], ...]
    """Fields of ``Measurement`` for every batch."""


@dataclass(frozen=True)
class Reproduction:
    """A table with its measured numbers, and how they were measured."""

    table: Table
    results: tuple[Result, ...]
    data: str
    code: str
    commits: tuple[str, ...]
    devices: tuple[str, ...]
    stale: int
    """Number of results of other code versions, which are not used."""


def cells(table: Table) -> list[Cell]:
    """Return all cells of a table, row by row. Rows with the same setting have the same cells."""
    return [cell for row in table.rows for cell in cells_of(row.setting, table.batches)]


def collect(table: Table, store: Store) -> Reproduction:
    """Collect the results of a table that this code version has stored."""
    results, used = [], []
    for row in table.rows:
        found = store.batches(row.setting, table.batches)
        results.append(summarise(row, [each.result for each in found], table.batches))
        used += found
    return Reproduction(
        table=table,
        results=tuple(results),
        data=table.rows[0].setting.data.kind if table.rows else "",
        code=code_version(),
        commits=_distinct(each.commit for each in used) or (commit(),),
        devices=_distinct(each.versions.get("device", "") for each in used),
        stale=store.stale(cells(table)),
    )


def summarise(row: Row, measured: Sequence[dict[str, Any]], wanted: int) -> Result:
    """Summarise the batches of a row.

    Shares have Wilson intervals, the mean PSNR has a Student interval, starts and seconds are medians. ``measured``
    holds the fields of ``Measurement`` for every measured batch, and ``wanted`` is the number of batches to measure.
    """
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
        median_starts=statistics.median(each["starts"] for each in measured) if count else None,
        median_seconds=statistics.median(each["seconds"] for each in measured) if count else None,
        each=tuple(measured),
    )


def as_json(reproduction: Reproduction) -> Any:
    """Return the whole table as JSON values, with one entry for each row."""
    table = reproduction.table
    content = {
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
                **{name: value for name, value in asdict(each).items() if name not in ("row", "each")},
                "each_batch": {name: [batch.get(name) for batch in each.each] for name in KEPT_OF_EACH_BATCH},
            }
            for each in reproduction.results
        ],
    }
    return plain(content)


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({*texts} - {""}))
