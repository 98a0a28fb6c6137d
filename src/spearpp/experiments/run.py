"""Measure what a store does not hold yet."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spearpp.experiments.cell import Cell
from spearpp.experiments.engines import Done, Engine, Failed
from spearpp.experiments.store import Store


@dataclass(frozen=True)
class Progress:
    """How far a run has come, for whoever shows it."""

    done: int
    """Cells of this run that were measured now."""
    total: int
    """Cells of this run that had to be measured."""
    stored: int
    """Cells that the store held before."""
    last: Cell | None
    failed: int


def run(
    cells: Sequence[Cell], store: Store, engine: Engine, progress: Callable[[Progress], None] | None = None
) -> list[Failed]:
    """Measure the missing cells and store each as it comes; those that failed are returned and not stored.

    Interrupting loses what is in flight and nothing else: call it again to go on.
    """
    missing = store.missing(cells)
    stored = len({cell.key for cell in cells}) - len(missing)
    failed: list[Failed] = []
    done = 0

    def tell(last: Cell | None) -> None:
        if progress is not None:
            progress(Progress(done, len(missing), stored, last, len(failed)))

    tell(None)
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
            tell(outcome.cell)
    finally:
        close = getattr(outcomes, "close", None)
        if close is not None:
            close()
    return failed
