"""What people see while a command works, and at its end."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from spearpp import Layer, LayerAudit, Verdict
from spearpp.auditing.checks import Finding
from spearpp.errors import DataError
from spearpp.inversion.result import Progress as State

COLOURS = {Verdict.LEAKS: "bold red", Verdict.NOT_FOUND: "bold yellow", Verdict.NOT_APPLICABLE: "bold blue"}
LONGEST = 300
"""Characters of a name or a sentence that are shown."""
LEVELS = {"error": "red", "warning": "yellow", "note": "dim"}


class Tell(Protocol):
    """What an audit calls after every round."""

    def __call__(self, layer: Layer, state: State) -> None:
        """Show how far the layer is."""
        ...


def output() -> Console:
    """Where results go: without colour when piped, and then in lines as long as they are."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200, soft_wrap=True)
    return console


def make_folder(folder: Path) -> None:
    """Make a folder, or say why not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be made: {error.strerror or error}") from error


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits: a report is written in an instant, and whole."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def safe(text: str) -> str:
    """A name from outside as a terminal may see it: no control characters, no markup, not too long."""
    shown = "".join(each if each.isprintable() else "?" for each in text[:LONGEST])
    return escape(shown + ("..." if len(text) > LONGEST else ""))


@contextmanager
def progress(budget: float | None, quiet: bool) -> Iterator[Tell]:
    """A live line for each layer on a terminal; nothing where there is none."""
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

    def tell(layer: Layer, state: State) -> None:
        if layer.name not in tasks:
            tasks[layer.name] = bar.add_task(f"layer {safe(layer.name)}", total=state.batch_size, state="")
        left = "" if budget is None else f", {max(0.0, budget - (time.monotonic() - began)):.0f} s left"
        words = f"found {state.found} of {state.batch_size}, round {state.rounds}, {state.starts:,} starts{left}"
        bar.update(tasks[layer.name], completed=state.found, state=words)

    with bar:
        yield tell


def print_layers(console: Console, layers: list[Layer], audits: list[LayerAudit] | None = None) -> None:
    """Every Linear layer, one a line."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("layer", "neurons", "inputs", "sees", "samples", "exact", "outcome"):
        table.add_column(name, justify="right" if name in ("neurons", "inputs", "samples", "exact") else "left")
    for index, layer in enumerate(layers):
        audited = None if audits is None else audits[index]
        samples = "-" if audited is None or audited.batch_size is None else str(audited.batch_size)
        exact = "-" if audited is None or audited.inversion is None else str(audited.recovered)
        words = layer.reason if audited is None else audited.reason
        mark = "" if layer.qualifies else "dim"
        facts = (str(layer.neurons), str(layer.features), layer.sees, samples, exact)
        table.add_row(safe(layer.name), *facts, safe(words), style=mark)
    console.print(table)


def print_findings(console: Console, findings: list[Finding]) -> None:
    """What was seen of the update before any search."""
    for each in findings:
        console.print(f"[{LEVELS[each.level]}]{each.level}[/] {safe(each.about)}: {safe(each.message)}")
