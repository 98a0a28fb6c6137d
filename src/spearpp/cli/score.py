"""``spearpp score``: compare recovered inputs with the true batch."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

import spearpp
from spearpp import AuditResult
from spearpp.cli.console import output, print_json
from spearpp.errors import DataError
from spearpp.metrics import PAPER_PSNR
from spearpp.simulate import Batch
from spearpp.types import Tensor


def score(
    recovered: Annotated[Path, Argument(help="Folder of a report, or a tensor file with the key inputs.")],
    truth: Annotated[
        Path,
        Argument(
            help="The client's true batch: a file written by spearpp simulate, or a tensor file with the key inputs "
            "or x."
        ),
    ],
    threshold: Annotated[
        float, Option(help="PSNR in dB above which an input counts as recovered in this comparison.")
    ] = PAPER_PSNR,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare recovered inputs with the client's true batch, sample by sample.

    \b
    spearpp score audit-client7 truth.safetensors
    """  # noqa: D301
    batch = Batch.load(truth)
    inputs = _recovered(recovered)
    batch = batch.as_rows(inputs.shape[1]) or batch  # if the sizes differ, the score raises the error
    compared = spearpp.score(inputs, batch.inputs, normalisation=batch.normalisation, threshold=threshold)
    if as_json:
        print_json(compared.to_dict())
        return
    console = output()
    for index, (row, psnr) in enumerate(zip(compared.assignment.tolist(), compared.psnr.tolist(), strict=True)):
        match = f"is recovered input {row + 1:>4}   {psnr:6.1f} dB" if row >= 0 else "has no recovered input"
        console.print(f"sample {index + 1:>4}   {match}")
    console.print(compared.summary, markup=False)


def _recovered(path: Path) -> Tensor:
    """Return the recovered inputs of a report folder or of a file."""
    if not path.is_dir():
        return Batch.load(path).inputs
    result = AuditResult.load(path)
    if not result.inputs.shape[1]:
        why = f"{path} contains no recovered inputs: the audit found none, or the report omits them"
        raise DataError(why, hint="spearpp report DIR shows what the audit found")
    if result.best is not None and result.best.layer.sees == "features":
        what = f"features of layer {result.best.layer.name}, which cannot be compared with inputs of the model"
        advice = "spearpp score compares inputs only; the features are in recovered.safetensors"
        raise DataError(f"{path} contains {what}", hint=advice)
    return result.inputs
