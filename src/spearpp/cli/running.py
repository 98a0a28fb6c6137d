"""What the commands that measure share: the store, the engine, progress and how they end."""

import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from spearpp.errors import OptionError, SpearError
from spearpp.experiments.cell import Cell
from spearpp.experiments.engines import Engine, Failed, Local, Ray
from spearpp.experiments.run import Progress as Step
from spearpp.experiments.run import run
from spearpp.experiments.store import Store

PIPE_WIDTH = 240
"""Columns of a line that no terminal bounds."""
SHOWN_FAILURES = 3
SAY_SECONDS = 10.0
"""Between lines of progress where there is no terminal."""


class Screen:
    """Results go to standard output, everything else to standard error; colours only to a terminal."""

    def __init__(self) -> None:
        self._out = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
        self.notes = Console(stderr=True, width=None if sys.stderr.isatty() else PIPE_WIDTH, highlight=False)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table with a title."""
        drawn = Table(title=escape(title), title_justify="left")
        for index, name in enumerate(columns):
            drawn.add_column(escape(name), justify="left" if index == 0 else "right")
        for row in rows:
            drawn.add_row(*(escape(cell) for cell in row))
        self._out.print(drawn)

    def say(self, text: str) -> None:
        """A line."""
        self._out.print(escape(text))

    def warn(self, text: str) -> None:
        """A line beside the results."""
        self.notes.print(escape(text))


class Session:
    """A store and an engine for the time of one command."""

    def __init__(
        self,
        store: Path,
        resume: bool,
        engine: str,
        address: str | None,
        workers: int | None,
        device: str | None,
        gpus: float,
    ) -> None:
        if not resume and store.exists():
            raise OptionError(f"{store} exists: name a new --store, or leave out --no-resume to go on with it")
        if engine == "local" and (address or gpus):
            raise OptionError("--address and --gpus are for Ray: add --engine ray")
        if engine == "ray" and (workers or device):
            raise OptionError("--workers and --device are for --engine local: Ray schedules by --gpus")
        self.screen = Screen()
        self.engine: Engine = Ray(address, gpus=gpus) if engine == "ray" else Local.here(device, workers)
        self.store = Store(store)
        self._failed: list[Failed] = []
        self._open = ExitStack()
        self._interruption = Interruption()

    def __enter__(self) -> "Session":
        self._interruption = self._open.enter_context(interruptible())
        self._open.callback(self.store.close)
        self._open.callback(self.engine.close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def measure(self, cells: Sequence[Cell], what: str = "cells") -> None:
        """Measure what the store lacks, showing how far it is and how long it will take."""
        began, said = time.monotonic(), 0.0
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("cells, past"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.screen.notes,
            disable=not self.screen.notes.is_terminal,
            transient=True,
        ) as bar:
            task = bar.add_task(escape(what), total=None)

            def show(step: Step) -> None:
                nonlocal said
                bar.update(task, completed=step.done, total=step.total)
                now = time.monotonic() - began
                if (
                    not self.screen.notes.is_terminal
                    and step.done
                    and (now - said > SAY_SECONDS or step.done == step.total)
                ):
                    said = now
                    left = now / step.done * (step.total - step.done)
                    self.screen.warn(
                        f"{what}: {step.done} of {step.total} cells, {step.stored} were stored before; "
                        f"{now:.0f} s past, about {left:.0f} s left"
                    )

            try:
                failed = run(cells, self.store, self.engine, show)
            except BaseException:
                if self._interruption.came:
                    bar.stop()
                    missing = len(self.store.missing(cells))
                    self.screen.warn(f"interrupted: {missing} cells are left; the same command goes on from here")
                raise
        for each in failed[:SHOWN_FAILURES]:
            self.screen.warn(f"failed: {each.cell.identity[:120]}, seed {each.cell.seed}: {each.why}")
        if len(failed) > SHOWN_FAILURES:
            self.screen.warn(f"and {len(failed) - SHOWN_FAILURES} more")
        self._failed += failed

    def leave(self) -> None:
        """Exit code 1 if a cell failed; nothing is stored of those, so the next run tries them again."""
        if self._failed:
            raise typer.Exit(1)


class Interruption:
    """Whether someone asked for the end."""

    came = False

    def __call__(self, *_: object) -> None:
        """As a signal's handler. The first alone counts: ``timeout`` sends two, and one would disturb the other."""
        if not self.came:
            self.came = True
            raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """SIGTERM, as schedulers send it, ends a run as Ctrl-C does.

    It may come between any two steps, also in Python's own locks, which then raise a RuntimeError in its place.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before = {each: signal.signal(each, interruption) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interruption
    except Exception:
        if interruption.came:
            raise KeyboardInterrupt from None
        raise
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def guarded() -> Iterator[None]:
    """Errors on purpose become one line and exit code 2, Ctrl-C 130."""
    try:
        yield
    except (SpearError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(130) from error
