"""``spearpp report``: re-render the report page of an audit."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from spearpp import AuditResult
from spearpp import report as reports
from spearpp.auditing.folder import read_document
from spearpp.cli import options
from spearpp.cli.console import output
from spearpp.report.pdf import print_pdf
from spearpp.report.presentation import presented
from spearpp.simulate import Batch


def report(
    folder: Annotated[Path, Argument(help="Folder that spearpp audit wrote.")],
    truth: options.Truth = None,
    shape: options.Picture = None,
    mean: options.Mean = None,
    std: options.Deviation = None,
    columns: options.Columns = None,
    redact: options.Redact = "none",
    pdf: Annotated[
        bool, Option("--pdf", help="Also print the page to report.pdf. Needs Chromium, Chrome or Edge.")
    ] = False,
) -> None:
    """Re-render a report with other display options: image shape, column names, redaction or PDF.

    \b
    spearpp report audit-client7 --redact blur
    spearpp report audit-client7 --shape 1x28x28 --mean 0.1307 --std 0.3081
    spearpp report audit-client7 --redact omit --pdf
    """  # noqa: D301
    display = options.display_options(shape, mean, std, columns)
    presentation = None
    batch = None if truth is None else Batch.load(truth)
    if any(display.values()) or batch is not None:
        presentation = presented(AuditResult.load(folder), batch, **display)
    page = reports.rerender(folder, truth=batch, presentation=presentation, redact=redact)
    console = output()
    console.print(f"report: {page}", markup=False)
    if pdf:
        console.print(f"pdf: {print_pdf(page)}", markup=False)
    if redact != "none" and read_document(folder).get("redacted") == "none":
        files = " and ".join(name for name in (reports.NUMBERS, reports.TRUTH) if (folder / name).is_file())
        console.print(
            f"warning: only the page is redacted. The folder still contains the inputs in {files}. Share only the page",
            style="yellow",
        )
