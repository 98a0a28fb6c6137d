"""Code that ``reproduce`` and ``frontier`` share: store, engine, progress display and interruption."""

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from spearpp.cli.console import INTERRUPTED, output
from spearpp.errors import OptionError
from spearpp.experiments.cell import Cell
from spearpp.experiments.engine import Engine, Failed, run
from spearpp.experiments.engine import Progress as RunProgress
from spearpp.experiments.local import Local
from spearpp.experiments.ray import Ray
from spearpp.experiments.rendering import Cells
from spearpp.experiments.store import Store

EngineName = Literal["local", "ray"]
SHOWN_FAILURES = 3
"""Failed cells printed with their error. Design choice: more failures usually repeat the same error."""
PROGRESS_SECONDS = 10.0
"""Seconds between two progress lines when there is no terminal. Design choice: keeps log files short."""


def engine_of(name: EngineName, address: str | None, workers: int | None, device: str | None, gpus: float) -> Engine:
    """Return the engine that the options of a command describe."""
    if name == "local" and (address or gpus):
        raise OptionError("--address and --gpus apply only to Ray: add --engine ray")
    if name == "ray" and (workers or device):
        raise OptionError("--workers and --device apply only to --engine local. Ray schedules by --gpus")
    return Ray(address, gpus=gpus) if name == "ray" else Local.here(device, workers)


@contextmanager
def open_session(path: Path, engine: Engine) -> Iterator["Session"]:
    """Open the store of a command, and close the store and the engine afterwards.

    An interruption ends the command with exit code 130, and a failed cell with code 1. Failed cells are not stored, so
    the next run tries them again.
    """
    store = Store(path)
    try:
        with interruptible() as interruption, closing(store), closing(engine):
            opened = Session(store, engine, interruption)
            yield opened
    except KeyboardInterrupt as error:
        raise typer.Exit(INTERRUPTED) from error
    if opened.failed:
        raise typer.Exit(1)


class Session:
    """The store and the engine of one command, and what it prints."""

    def __init__(self, store: Store, engine: Engine, interruption: "Interruption") -> None:
        self.store, self.engine, self._interruption = store, engine, interruption
        self.results, self.notes = output(), output(stderr=True)
        self.failed: list[Failed] = []

    def table(self, title: str, rows: Sequence[Cells]) -> None:
        """Print a table to standard output."""
        table = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for index, (name, _) in enumerate(rows[0]):
            left = index == 0
            table.add_column(escape(name), justify="left" if left else "right", overflow="fold", min_width=3 + 8 * left)
        for row in rows:
            table.add_row(*(escape(text) for _, text in row))
        self.results.print(table)

    def say(self, text: str) -> None:
        """Print a line to standard output."""
        self.results.print(text, markup=False)

    def _warn(self, text: str) -> None:
        self.notes.print(text, markup=False)

    def measure(self, cells: Sequence[Cell], what: str = "cells") -> None:
        """Measure the cells that the store does not contain, and show progress and the remaining time."""
        began, last_line = time.monotonic(), 0.0
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("cells, elapsed"),
            TimeElapsedColumn(),
            TextColumn("remaining"),
            TimeRemainingColumn(),
            console=self.notes,
            disable=not self.notes.is_terminal,
            transient=True,
        ) as bar:
            task = bar.add_task(escape(what), total=None)

            def show(state: RunProgress) -> None:
                nonlocal last_line
                bar.update(task, completed=state.done, total=state.total)
                elapsed = time.monotonic() - began
                due = elapsed - last_line > PROGRESS_SECONDS or state.done == state.total
                if not self.notes.is_terminal and state.done and due:
                    last_line = elapsed
                    remaining = elapsed / state.done * (state.total - state.done)
                    self._warn(
                        f"{what}: {state.done} of {state.total} cells, {state.stored} were already stored; "
                        f"{elapsed:.0f} s elapsed, about {remaining:.0f} s remaining"
                    )

            try:
                failed = run(cells, self.store, self.engine, show)
            except BaseException:
                if self._interruption.received:
                    bar.stop()
                    missing = len(self.store.missing(cells))
                    self._warn(f"interrupted: {missing} cells are missing. Run the same command to continue")
                raise
        for each in failed[:SHOWN_FAILURES]:
            self._warn(f"failed: {each.cell.identity[:120]}, seed {each.cell.seed}: {each.why}")
        if len(failed) > SHOWN_FAILURES:
            self._warn(f"and {len(failed) - SHOWN_FAILURES} more")
        self.failed += failed


class Interruption:
    """Signal handler that remembers whether a signal arrived."""

    received = False

    def __call__(self, *_: object) -> None:
        """Raise KeyboardInterrupt for the first signal and ignore later ones.

        The ``timeout`` program sends two signals. The second would disturb the handling of the first.
        """
        if not self.received:
            self.received = True
            raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Handle SIGTERM, which schedulers send, like Ctrl-C.

    A signal can arrive at any point, even inside Python's own locks. A lock then raises a RuntimeError instead of the
    KeyboardInterrupt. The context manager replaces this error by a KeyboardInterrupt.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    previous = {each: signal.signal(each, interruption) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interruption
    except Exception:
        if interruption.received:
            raise KeyboardInterrupt from None
        raise
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)
