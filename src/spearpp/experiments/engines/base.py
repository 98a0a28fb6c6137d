"""What an engine is, and the work that all of them do."""

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
    """A cell that was not, and why. Nothing is stored for it, so the next run tries again."""

    cell: Cell
    why: str


Outcome = Done | Failed


class Engine(Protocol):
    """Measures cells, in any order, and yields each as soon as it is done."""

    def run(self, cells: Sequence[Cell]) -> Iterator[Outcome]:
        """Closing the iterator ends the work that is still under way."""
        ...

    def close(self) -> None:
        """Let go of processes or cluster, which are kept from one run to the next."""
        ...


@dataclass(frozen=True)
class Work:
    """What a worker hands back, as plain values."""

    result: dict[str, Any]
    versions: dict[str, str]
    code: str


def measure(cell: str, device: str) -> Work:
    """The work itself, in the worker's process; ``cell`` as ``Cell.to_json`` wrote it.

    One thread a process: results then do not depend on how many there are, and the cores are shared evenly.
    """
    torch.set_num_threads(1)
    where = torch.device(device)
    return Work(Cell.from_json(cell).measure(where), versions(where), code_version())


def judged(cell: Cell, work: Work) -> Outcome:
    """Refuse what other code measured."""
    if work.code != code_version():
        return Failed(
            cell, f"the worker runs spearpp {work.code}, this process {code_version()}: install the same there"
        )
    return Done(cell, work.result, work.versions)


def worded(error: BaseException) -> str:
    """An error of a worker in one line."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
