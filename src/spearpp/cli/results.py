"""Print the result of an audit."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from spearpp import AuditResult
from spearpp import report as reports
from spearpp.auditing.folder import read_document
from spearpp.cli.console import VERDICT_STYLES, output, print_findings, print_layers, safe
from spearpp.dp import Comparison
from spearpp.report.decision import count_checks, describe, why_refused
from spearpp.simulate import Batch

SHOWN_WORDS = 12
"""Words of a vocabulary on the terminal. Design choice: the line stays short, and the report has all words."""
SEVERITY_STYLES = {"critical": "bold red", "high": "bold red", "medium": "bold yellow", "low": "", "unknown": "blue"}


def print_result(
    result: AuditResult, page: Path, quiet: bool, *, truth: Batch | None = None, dp: Comparison | None = None
) -> None:
    """Print the verdict and, unless ``quiet``, the decision, layers, findings, replay, caveats and path of the report.

    What a file of accepted leaks changes, and why a gate failed, is printed in any case.

    Args:
        result: The audit.
        page: Path of ``report.html``.
        quiet: Whether to print only the verdict.
        truth: The client's true batch, to say how many of its samples were recovered.
        dp: What the stated DP-SGD implies.
    """
    console, content = output(), read_document(page.parent)
    console.print(safe(result.summary), style=VERDICT_STYLES[result.verdict])
    if result.interrupted:
        console.print("interrupted: the report contains the samples certified so far", style="yellow")
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
        why = why_refused(content["leaks"], gate["thresholds"], gate["fail_on"])
        console.print(f"gate: failed: {safe(why)} {option}", style="bold red")
    elif gate["passed"] and not quiet:
        console.print(f"gate: passed {option}")


def _print_decision(console: Console, content: Mapping[str, Any]) -> None:
    """Print severity, risk, action and how many checks passed."""
    counts = count_checks(content["checks"])
    severity = content["severity"]
    console.print(f"severity: {severity}", style=SEVERITY_STYLES[severity])
    console.print(f"risk: {content['risk']}")
    console.print(f"action: {content['action']}")
    open_leaks = ", ".join(each["id"] for each in content["leaks"] if each["status"] != "accepted")
    console.print(f"checks: {counts}" + (f"; leaks: {safe(open_leaks)}" if open_leaks else ""))


def _print_score(result: AuditResult, truth: Batch) -> None:
    """Print how many of the true samples the audit recovered."""
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
