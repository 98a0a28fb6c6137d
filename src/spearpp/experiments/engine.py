"""Measures the cells that a store does not hold yet, with an engine: processes on this machine, or a Ray cluster."""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from spearpp.experiments.cell import Cell, code_version, versions
from spearpp.experiments.store import Store


@dataclass(frozen=True)
class Done:
    """A cell that was measured, in the process of a worker."""

    cell: Cell
    result: dict[str, Any]
    versions: dict[str, str]
    code: str = field(default_factory=code_version)
    """Code version of the worker."""


@dataclass(frozen=True)
class Failed:
    """A cell that could not be measured. It is not stored, so the next run tries it again."""

    cell: Cell
    why: str
    """The reason, in one line."""


Outcome = Done | Failed


class Engine(Protocol):
    """Measures cells in any order."""

    def run(self, cells: Sequence[Cell]) -> Generator[Outcome, None, None]:
        """Yield each cell as soon as it is measured. Closing the generator stops the remaining work."""
        ...

    def close(self) -> None:
        """Stop the processes or leave the cluster. Both are kept between runs."""
        ...


def measure(cell: Cell, device: str) -> Done:
    """Measure a cell, in a worker process.

    Each process uses one thread, so results do not depend on the number of processes, which share the cores evenly.
    """
    torch.set_num_threads(1)
    on = torch.device(device)
    return Done(cell, cell.measure(on), versions(on))


def worded(error: BaseException) -> str:
    """Return the class and the first line of the message of an error."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


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

    ``progress`` is called at the start and after every cell.

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
    with closing(engine.run(missing)) as outcomes:
        for outcome in outcomes:
            if isinstance(outcome, Failed):
                failed.append(outcome)
            elif outcome.code != code_version():
                versions_differ = f"the worker runs spearpp {outcome.code}, this process {code_version()}"
                failed.append(Failed(outcome.cell, f"{versions_differ}: install the same version"))
            else:
                store.put(outcome.cell, outcome.result, outcome.versions)
            done += 1
            report()
    return failed
