"""Measures the cells that a store does not hold yet."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spearpp.experiments.cell import Cell
from spearpp.experiments.engines import Done, Engine, Failed
from spearpp.experiments.store import Store


@dataclass(frozen=True)
class Progress:
    """Progress of a run, for a progress display."""

    done: int
    """Number of cells that this run has finished, including failed ones."""
    total: int
    """Number of cells that this run has to measure."""
    stored: int
    """Number of cells that the store held before this run."""


def run(
    cells: Sequence[Cell], store: Store, engine: Engine, progress: Callable[[Progress], None] | None = None
) -> list[Failed]:
    """Measure the cells that the store does not hold, and store each result as soon as it is there.

    An interrupted run loses only the cells that are being measured. Call ``run`` again to continue.

    Args:
        cells: all cells of the experiment.
        store: where results are kept.
        engine: measures the cells.
        progress: called at the start and after every cell.

    Returns:
        The cells that failed. They are not stored, so the next run tries them again.
    """
    missing = store.missing(cells)
    stored = len({cell.key for cell in cells}) - len(missing)
    failed: list[Failed] = []
    done = 0

    def report() -> None:
        if progress is not None:
            progress(Progress(done, len(missing), stored))

    report()
    if not missing:
        return failed
    outcomes = engine.run(missing)
    try:
        for outcome in outcomes:
            if isinstance(outcome, Done):
                store.put(outcome.cell, outcome.result, outcome.versions)
            else:
                failed.append(outcome)
            done += 1
            report()
    finally:
        close = getattr(outcomes, "close", None)
        if close is not None:
            close()
    return failed
