"""``spearpp compare``: list what changed between two audits."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from spearpp.auditing.folder import read_document
from spearpp.cli.console import LEAK, output, print_json, safe
from spearpp.report.changes import changes

DIRECTIONS = {
    "worse": "The second audit found more: a leak is new or larger.",
    "better": "The second audit found less: a leak is gone or smaller.",
    "mixed": "Some leaks are new or larger, and others are gone or smaller.",
    "different": "The leaks are the same. Something else differs.",
    "same": "Nothing differs.",
}
STYLES = {"worse": "bold red", "mixed": "bold red", "better": "bold green", "different": "bold", "same": "bold"}


def compare(
    before: Annotated[Path, Argument(help="Folder of the first audit.")],
    after: Annotated[Path, Argument(help="Folder of the second audit.")],
    as_json: Annotated[bool, Option("--json", help="Print the changes as JSON.")] = False,
    fail_on: Annotated[
        Literal["never", "worse", "changed"],
        Option(
            help="When to exit with code 1. worse: a leak is new or larger. changed: anything differs. never: do not "
            "use code 1."
        ),
    ] = "never",
) -> None:
    """List what changed between two audits: verdict, leaks, layers, claims, settings and files.

    \b
    spearpp compare audit-monday audit-tuesday
    spearpp compare baseline audit-client7 --fail-on worse

    \b
    Exit codes: 0 finished, 1 worse or changed (with --fail-on), 2 invalid input, 4 internal error.
    Redacted reports can be compared too. The dates and the names of the two folders are not compared.
    """  # noqa: D301
    found = changes(read_document(before), read_document(after))
    if as_json:
        print_json(found.to_dict())
    else:
        console = output()
        console.print(f"{found.direction}: {DIRECTIONS[found.direction]}", style=STYLES[found.direction])
        for each in found.changes:
            console.print(f"- {safe(str(each))}")
    failed = {"worse": ("worse", "mixed"), "changed": ("worse", "better", "mixed", "different")}.get(fail_on, ())
    raise typer.Exit(LEAK if found.direction in failed else 0)
