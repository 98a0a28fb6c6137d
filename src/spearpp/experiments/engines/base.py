"""The protocol of an engine, and the work that a worker process of any engine does."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from spearpp.experiments.cell import Cell
from spearpp.experiments.version import code_version, versions


@dataclass(frozen=True)
class Done:
    """A cell that was measured."""

    cell: Cell
    result: dict[str, Any]
    versions: dict[str, str]


@dataclass(frozen=True)
class Failed:
    """A cell that could not be measured. It is not stored, so the next run tries it again."""

    cell: Cell
    why: str
    """The reason, in one line."""


Outcome = Done | Failed


class Engine(Protocol):
    """Measures cells in any order."""

    def run(self, cells: Sequence[Cell]) -> Iterator[Outcome]:
        """Yield each cell as soon as it is measured. Closing the iterator stops the remaining work."""
        ...

    def close(self) -> None:
        """Stop the processes or leave the cluster. Both are kept between runs."""
        ...


@dataclass(frozen=True)
class Work:
    """What a worker process returns, as values that can be pickled."""

    result: dict[str, Any]
    versions: dict[str, str]
    code: str


def measure(cell: Cell, device: str) -> Work:
    """Measure a cell, in a worker process.

    Each process uses one thread. Results therefore do not depend on the number of processes, and the processes share
    the cores evenly.
    """
    torch.set_num_threads(1)
    on = torch.device(device)
    return Work(cell.measure(on), versions(on), code_version())


def judged(cell: Cell, work: Work) -> Outcome:
    """Return the outcome of a cell. The cell fails if the worker runs another version of the code."""
    if work.code != code_version():
        return Failed(
            cell, f"the worker runs spearpp {work.code}, this process {code_version()}: install the same version"
        )
    return Done(cell, work.result, work.versions)


def worded(error: BaseException) -> str:
    """Return the class and the first line of the message of an error."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
