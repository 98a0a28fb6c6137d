"""Terminal output: progress while a command runs, the result of an audit, and the exit codes of the commands."""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from spearpp import AuditResult, Verdict
from spearpp import report as reports
from spearpp.auditing import LayerAudit
from spearpp.auditing.checks import Finding
from spearpp.auditing.document import plain
from spearpp.auditing.folder import read_document
from spearpp.dp import Comparison
from spearpp.errors import DataError
from spearpp.inversion.result import Progress as SearchProgress
from spearpp.model import Layer
from spearpp.report.decision import count_checks, describe, named, why_refused
from spearpp.simulate import Batch

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
SHOWN_WORDS = 12
"""Words of a vocabulary on the terminal. Design choice: the line stays short, and the report has all words."""
SEVERITY_STYLES = {"critical": "bold red", "high": "bold red", "medium": "bold yellow", "low": "", "unknown": "blue"}


def output(*, stderr: bool = False) -> Console:
    """Return a console: standard output for results, standard error for everything else.

    Piped output has no colours and no wrapped lines.
    """
    console = Console(highlight=False, stderr=stderr)
    return console if console.is_terminal else Console(highlight=False, stderr=stderr, width=PIPE_WIDTH, soft_wrap=True)


def print_json(content: Any) -> None:
    """Print a value as JSON. Numbers that are not finite become null."""
    typer.echo(json.dumps(plain(content), indent=1))


def make_folder(folder: Path) -> None:
    """Create the folder of ``--out`` and its parents."""
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
def progress(budget: float | None, quiet: bool) -> Iterator[Callable[[Layer, SearchProgress], None]]:
    """Show one live line per layer on a terminal. Print nothing if ``quiet`` or if there is no terminal.

    The block gets the function that an audit calls after every round of a search.
    """
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
    for name in ("layer", "neurons", "width", "receives", *results, "reason" if audits is None else "outcome"):
        justify: Literal["left", "right"] = "right" if name in ("neurons", "width", *results) else "left"
        table.add_column(name, justify=justify, overflow="fold", min_width=20 if name in ("reason", "outcome") else 4)
    for index, layer in enumerate(layers):
        cells, text = [str(layer.neurons), str(layer.features), str(layer.sees)], layer.reason
        if audits is not None:
            audited = audits[index]
            samples = f"{audited.batch_size}{' tokens' if layer.tokens else ''}"
            cells.append("-" if audited.batch_size is None else samples)
            cells.append("-" if audited.inversion is None else str(audited.exact))
            text = audited.reason
        table.add_row(safe(layer.name), *cells, safe(text), style="" if layer.qualifies else "dim")
    console.print(table)


def print_findings(console: Console, findings: list[Finding]) -> None:
    """Print the findings of the checks before the search."""
    for each in findings:
        console.print(f"[{FINDING_STYLES[each.level]}]{each.level}[/] {safe(each.about)}: {safe(each.message)}")


def print_result(
    result: AuditResult, page: Path, quiet: bool, *, truth: Batch | None = None, dp: Comparison | None = None
) -> None:
    """Print the verdict and, unless ``quiet``, the decision, layers, findings, replay, caveats and path of the report.

    Accepted leaks and the reason why a gate failed are printed even if ``quiet``. With the client's true batch, print
    how many of its samples were recovered.
    """
    console, content = output(), read_document(page.parent)
    console.print(safe(result.summary), style=VERDICT_STYLES[result.verdict])
    if result.interrupted:
        console.print("interrupted: the report contains the inputs certified so far", style="yellow")
    _print_accepted(console, content)
    print_gate(console, content, quiet)
    if quiet:
        return
    _print_decision(console, content)
    repeated = {each.message for each in result.findings if each.message in result.summary}
    shown = [replace(each, reason="as stated above") if each.reason in repeated else each for each in result.layers]
    print_layers(console, [each.layer for each in result.layers], shown)
    print_findings(console, [each for each in result.findings if each.message not in repeated])
    if result.replay is not None:
        difference = f"{result.replay.difference:.1e} (relative)"
        text = f"replay: recomputed from the recovered samples, the update differs by {difference}"
        if result.replay.mixed:
            text += f"; with pairs of samples averaged, by {result.replay.mixed:.2g}"
        if result.replay.unrelated:
            text += f"; with unrelated samples, by {result.replay.unrelated:.2g}"
        console.print(text)
        console.print(f"meaning: {result.replay.meaning}")
    for table in result.vocabulary:
        if table.words:
            more = f" and {table.count - SHOWN_WORDS:,} more" if table.count > SHOWN_WORDS else ""
            console.print(f"vocabulary of {safe(table.table)}: {safe(', '.join(table.words[:SHOWN_WORDS]))}{more}")
    for caveat in result.caveats:
        console.print(f"- {safe(caveat)}")
    console.print(f"report: {page}", markup=False)
    if dp is not None:
        _print_bound(dp)
    if truth is not None:
        _print_score(result, truth)


def _print_accepted(console: Console, content: Mapping[str, Any]) -> None:
    """Print every leak that a file of accepted leaks names, and the entries of the file that fit no leak."""
    for leak in content["leaks"]:
        if leak["acceptance"] is not None:
            style = "yellow" if leak["status"] == "accepted" else "red"
            console.print(f"{leak['status']}: {safe(leak['id'])}: {safe(describe(leak))}", style=style)
    for name in content["gate"]["unused"]:
        console.print(f"not found: {safe(name)} is accepted in {safe(content['gate']['config'])}", style="dim")


def print_gate(console: Console, content: Mapping[str, Any], quiet: bool) -> None:
    """Print whether the gate passed, and why it failed. If ``quiet``, print only a failure."""
    gate = content["gate"]
    option = f"(--fail-on {gate['fail_on']})"
    if gate["passed"] is False:
        console.print(f"gate: failed: {safe(why_refused(content['leaks'], gate))} {option}", style="bold red")
    elif gate["passed"] and not quiet:
        console.print(f"gate: passed {option}")


def _print_decision(console: Console, content: Mapping[str, Any]) -> None:
    """Print severity, risk, action and how many checks passed."""
    counts = count_checks(content["checks"])
    severity = content["severity"]
    console.print(f"severity: {severity}", style=SEVERITY_STYLES[severity])
    console.print(f"risk: {content['risk']}")
    console.print(f"action: {content['action']}")
    open_leaks = ", ".join(named(each) for each in content["leaks"] if each["status"] != "accepted")
    console.print(f"checks: {counts}" + (f"; leaks: {safe(open_leaks)}" if open_leaks else ""))


def _print_score(result: AuditResult, truth: Batch) -> None:
    compared = reports.compare(result, truth)
    if compared is not None:
        output().print(f"compared with the true batch: {compared.summary}", markup=False)
    elif result.best is None:
        output().print(f"compared with the true batch: 0 of {len(truth.inputs)} samples recovered", markup=False)


def _print_bound(dp: Comparison) -> None:
    """Print the bound that the stated DP-SGD implies, beside what the audit recovered."""
    console = output()
    console.print(f"bound: {dp.sentence} {dp.measured}", markup=False)
    for warning in dp.warnings:
        console.print(f"[yellow]warning[/] {safe(warning)}")
    if dp.not_checked is not None:
        console.print(f"noise not checked: {dp.not_checked}", markup=False)
