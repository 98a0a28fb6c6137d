"""An audit as a folder that people and programs can read: report.html, report.json, report.sarif.

result = spearpp.audit(update, model)
spearpp.report.write("audit", result)
"""

import json
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from spearpp.auditing import AuditResult
from spearpp.auditing.folder import DOCUMENT, NUMBERS, SMALLEST, Redaction, load, read_document, redacted
from spearpp.errors import OptionError, ShapeError
from spearpp.metrics import Score, score
from spearpp.pictures import blur, guess_shape
from spearpp.report.html import page
from spearpp.report.presentation import Presentation
from spearpp.report.sarif import sarif
from spearpp.simulate import Batch
from spearpp.types import Tensor
from spearpp.update.files import FileName, write_whole

__all__ = ["DOCUMENT", "NUMBERS", "Presentation", "Redaction", "again", "compare", "sarif", "write"]
PAGE, GATE, TRUTH = "report.html", "report.sarif", "truth.safetensors"


def write(
    folder: FileName,
    result: AuditResult,
    *,
    truth: Batch | None = None,
    presentation: Presentation | None = None,
    redact: Redaction = "none",
    command: Sequence[str] = (),
    source: Sequence[str] = (),
    about: dict[str, Any] | None = None,
) -> Path:
    """Write all files of a report and return the page's.

    Args:
        folder: made if it is not there; a report in it is replaced.
        result: the audit.
        truth: the client's own batch, to show originals beside what came back; never seen by the audit.
        presentation: how inputs are to be shown; None guesses.
        redact: "blur" or "omit" what was recovered, in every file of the folder.
        command: what repeats it.
        source: the files it read.
        about: anything else for ``report.json``.

    Raises:
        SpearError: if something does not fit together, or cannot be written.
    """
    if presentation is None:
        presentation = Presentation.of(_width(result), truth)
    compared = None if truth is None else compare(result, truth)
    content = {
        "source": list(source),
        "command": shlex.join(command) if command else None,
        "versions": _versions(),
        "presentation": asdict(presentation),
        "truth": None if compared is None else _compared(compared),
        **(about or {}),
    }
    place = Path(folder)
    result.save(place, redact=redact, shape=presentation.shape, about=content)
    if truth is not None and redact == "none":
        truth.save(place / TRUTH)
    else:
        (place / TRUTH).unlink(missing_ok=True)
    return _render(place, result, truth, compared, presentation, redact)


def _width(result: AuditResult) -> int:
    """How many numbers an input has that the page shows; 0 if it shows none."""
    return 0 if result.shown is None or result.shown.inversion is None else result.shown.inversion.inputs.shape[1]


def again(
    folder: FileName,
    *,
    truth: Batch | None = None,
    presentation: Presentation | None = None,
    redact: Redaction = "none",
) -> Path:
    """Render the page and the SARIF file of a folder again, from what is in it, and return the page's path.

    Redaction here is of the page alone: what the folder holds stays.

    Raises:
        SpearError: if the folder holds no report.
    """
    place = Path(folder)
    result, content = load(place), read_document(place)
    if truth is None and (place / TRUTH).is_file():
        truth = Batch.load(place / TRUTH)
    if presentation is None:
        presentation = Presentation.read(content.get("presentation", {}))
    kept: Redaction = content.get("redacted", "none")
    if kept != "none" and truth is not None:
        raise OptionError(f"the recovered inputs of {place} were redacted: they cannot be compared with a truth")
    compared = None if truth is None else compare(result, truth)
    return _render(place, result, truth, compared, presentation, redact if kept == "none" else kept)


def compare(result: AuditResult, truth: Batch) -> Score | None:
    """How good what came back is; None where that is no input of the model.

    Raises:
        ShapeError: if the truth has other columns than the model's inputs.
    """
    if result.best is None or result.best.layer.sees == "features":
        return None
    if result.inputs.shape[1] != truth.inputs.shape[1]:
        seen = f"{result.inputs.shape[1]} numbers, those of the truth {truth.inputs.shape[1]}"
        raise ShapeError(f"recovered inputs have {seen}: is it another client's?")
    return score(result.inputs, truth.inputs, normalisation=truth.normalisation)


def _render(
    place: Path,
    result: AuditResult,
    truth: Batch | None,
    compared: Score | None,
    presentation: Presentation,
    redact: Redaction,
) -> Path:
    content = read_document(place)
    shown = redacted(result, redact, presentation.shape)
    originals = None if truth is None or compared is None else _originals(truth, presentation, redact)
    made = page(shown, content, presentation, originals, compared, redact)
    write_whole(place / PAGE, made.encode())
    write_whole(place / GATE, (json.dumps(sarif(content), indent=1) + "\n").encode())
    return place / PAGE


def _originals(truth: Batch, presentation: Presentation, redact: Redaction) -> Tensor | None:
    if redact == "none":
        return truth.inputs
    shape = presentation.shape or guess_shape(truth.inputs.shape[1])
    if redact == "omit" or shape is None or shape[1] * shape[2] < SMALLEST:
        return None
    return blur(truth.inputs, shape)


def _compared(compared: Score) -> dict[str, Any]:
    return {
        "samples": len(compared.psnr),
        "exact": compared.recovered,
        "threshold_db": compared.threshold,
        "mean_psnr_db": compared.mean_psnr,
        "least_psnr_db": float(compared.psnr.min()),
        "psnr_db": compared.psnr.tolist(),
        "recovered_row": compared.assignment.tolist(),
    }


def _versions() -> dict[str, str]:
    names = ("spearpp", "torch", "numpy", "scipy", "safetensors")
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = str(getattr(sys.modules.get(name), "__version__", "unknown"))
    return {**found, "python": platform.python_version(), "platform": platform.platform()}
