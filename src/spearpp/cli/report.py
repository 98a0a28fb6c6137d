"""``spearpp report``."""

from pathlib import Path
from typing import Annotated

import typer

from spearpp import AuditResult
from spearpp import report as reports
from spearpp.auditing.folder import read_document
from spearpp.cli import options
from spearpp.cli.audit import redaction
from spearpp.cli.console import output
from spearpp.simulate import Batch


def report(
    folder: Annotated[Path, typer.Argument(help="A folder that spearpp audit wrote.")],
    truth: options.Truth = None,
    shape: options.Picture = None,
    mean: options.Mean = None,
    std: options.Deviation = None,
    columns: options.Columns = None,
    redact: options.Redact = "none",
) -> None:
    """Render the page of an audit again, with other eyes: pictures, names, redaction.

    \b
    spearpp report audit-client7 --redact blur
    spearpp report audit-client7 --shape 1x28x28 --mean 0.1307 --std 0.3081
    """  # noqa: D301
    shown = options.shown(shape, mean, std, columns)
    presentation = None
    batch = None if truth is None else Batch.load(truth)
    if any(shown.values()) or batch is not None:
        result = AuditResult.load(folder)
        presentation = reports.Presentation.of(result.inputs.shape[1], batch, **shown)
    page = reports.again(folder, truth=batch, presentation=presentation, redact=redaction(redact))
    console = output()
    console.print(f"report: {page}", markup=False)
    if redact != "none" and read_document(folder).get("redacted") == "none":
        held = " and ".join(name for name in (reports.NUMBERS, reports.TRUTH) if (folder / name).is_file())
        console.print(f"{held} beside it still hold what was recovered: share the page alone", style="yellow")
