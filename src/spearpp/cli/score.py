"""``spearpp score``: compare recovered inputs with the true batch."""

import json
from pathlib import Path
from typing import Annotated

import typer

import spearpp
from spearpp import AuditResult
from spearpp.cli.console import output
from spearpp.errors import DataError
from spearpp.metrics import PAPER_PSNR
from spearpp.simulate import Batch


def score(
    recovered: Annotated[Path, typer.Argument(help="Folder of a report, or a tensor file with the key inputs.")],
    truth: Annotated[
        Path,
        typer.Argument(
            help="The client's true batch: a file written by spearpp simulate, or a tensor file with the key inputs "
            "or x."
        ),
    ],
    threshold: Annotated[float, typer.Option(help="PSNR in dB above which a sample counts as exact.")] = PAPER_PSNR,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare recovered inputs with the true batch, sample by sample.

    \b
    spearpp score audit-client7 truth.safetensors
    """  # noqa: D301
    batch = Batch.load(truth)
    inputs = AuditResult.load(recovered).inputs if recovered.is_dir() else Batch.load(recovered).inputs
    if not inputs.shape[1]:
        raise DataError(f"{recovered} contains no recovered inputs: the audit found none, or the report omits them")
    compared = spearpp.score(inputs, batch.inputs, normalisation=batch.normalisation, threshold=threshold)
    if as_json:
        typer.echo(json.dumps(compared.to_dict(), indent=1))
        return
    console = output()
    for index, (row, psnr) in enumerate(zip(compared.assignment.tolist(), compared.psnr.tolist(), strict=True)):
        match = f"recovered {row + 1:>4}   {psnr:6.1f} dB" if row >= 0 else "not recovered"
        console.print(f"sample {index + 1:>4}   {match}")
    console.print(repr(compared), markup=False)
