"""Terminal output: progress while a command runs, tables of results, and the exit codes of the commands."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from spearpp import Verdict
from spearpp.auditing import LayerAudit
from spearpp.auditing.numbers import Finding
from spearpp.errors import DataError
from spearpp.inversion.result import Progress as SearchProgress
from spearpp.model import Layer

LEAK = 1
"""Exit code: training data was recovered and ``--fail-on`` asked for this code."""
BAD_INPUT = 2
"""Exit code: a file, an option or a model is invalid."""
NOT_APPLICABLE = 3
"""Exit code: no layer of the update can be inverted."""
INTERNAL = 4
"""Exit code: a defect in spearpp itself. No verdict has this code."""
INTERRUPTED = 130
"""Exit code: the user pressed Ctrl-C. The value is 128 + SIGINT, the convention of Unix shells."""
VERDICT_STYLES: dict[str, str] = {
    Verdict.LEAKS: "bold red",
    Verdict.NOT_FOUND: "bold yellow",
    Verdict.NOT_APPLICABLE: "bold blue",
}
FINDING_STYLES = {"error": "red", "warning": "yellow", "note": "dim"}
MAX_TEXT_LENGTH = 300
"""Characters shown of a text that comes from a file.

Design choice: a long module path or sentence fits, and a hostile name cannot flood the terminal.
"""
PIPE_WIDTH = 100
"""Columns of a table when the output is not a terminal. Design choice: such a table fits into a log or a document."""


class ProgressCallback(Protocol):
    """Function that an audit calls after every round of a search."""

    def __call__(self, layer: Layer, state: SearchProgress) -> None:
        """Show the progress of one layer."""
        ...


def output(*, stderr: bool = False) -> Console:
    """Return a console: standard output for results, standard error for everything else.

    Piped output has no colours and no wrapped lines.
    """
    console = Console(highlight=False, stderr=stderr)
    return console if console.is_terminal else Console(highlight=False, stderr=stderr, width=PIPE_WIDTH, soft_wrap=True)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents.

    Raises:
        DataError: If the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"cannot create the folder {folder}: {error.strerror or error}"
        raise DataError(why, hint="choose another --out folder") from error


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C inside the block, so that a report is always written completely."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def safe(text: str) -> str:
    """Make a text from a file safe to print: no control characters, no Rich markup, limited length."""
    printable = "".join(each if each.isprintable() else "?" for each in text[:MAX_TEXT_LENGTH])
    return escape(printable + ("..." if len(text) > MAX_TEXT_LENGTH else ""))


@contextmanager
def progress(budget: float | None, quiet: bool) -> Iterator[ProgressCallback]:
    """Show one live line per layer on a terminal. Print nothing if ``quiet`` or if there is no terminal."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
        console=console,
        disable=quiet or not console.is_terminal,
        transient=True,
    )
    began, tasks = time.monotonic(), {}

    def update(layer: Layer, state: SearchProgress) -> None:
        if layer.name not in tasks:
            tasks[layer.name] = bar.add_task(f"layer {safe(layer.name)}", total=state.batch_size, state="")
        remaining = "" if budget is None else f", {max(0.0, budget - (time.monotonic() - began)):.0f} s left"
        counts = f"found {state.found} of {state.batch_size}, round {state.rounds}, {state.starts:,} starts"
        bar.update(tasks[layer.name], completed=state.found, state=counts + remaining)

    with bar:
        yield update


def print_layers(console: Console, layers: list[Layer], audits: list[LayerAudit] | None = None) -> None:
    """Print a table with one row per Linear layer, with the result of its audit where there is one."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    results = () if audits is None else ("samples", "exact")
    for name in ("layer", "neurons", "inputs", "sees", *results, "reason" if audits is None else "outcome"):
        justify: Literal["left", "right"] = "right" if name in ("neurons", "inputs", *results) else "left"
        table.add_column(name, justify=justify, overflow="fold", min_width=20 if name in ("reason", "outcome") else 4)
    for index, layer in enumerate(layers):
        cells, text = [str(layer.neurons), str(layer.features), str(layer.sees)], layer.reason
        if audits is not None:
            audited = audits[index]
            samples = "-" if audited.batch_size is None else str(audited.batch_size)
            cells.append(f"{samples} tokens" if samples != "-" and layer.tokens else samples)
            cells.append("-" if audited.inversion is None else str(audited.recovered))
            text = audited.reason
        table.add_row(safe(layer.name), *cells, safe(text), style="" if layer.qualifies else "dim")
    console.print(table)


def print_findings(console: Console, findings: list[Finding]) -> None:
    """Print what the checks before the search found in the update."""
    for each in findings:
        console.print(f"[{FINDING_STYLES[each.level]}]{each.level}[/] {safe(each.about)}: {safe(each.message)}")
