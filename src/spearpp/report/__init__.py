"""Reports of an audit: report.html for people, and report.json, report.sarif and report.junit.xml for programs.

result = spearpp.audit(update, model)
spearpp.report.write("audit", result)
"""

import datetime
import json
import platform
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import safetensors
import scipy
import torch

from spearpp.about import __version__
from spearpp.auditing import AuditResult
from spearpp.auditing.folder import DOCUMENT, MIN_BLURRED_PIXELS, NUMBERS, Redaction, load, read_document, redacted
from spearpp.config import Config
from spearpp.errors import DataError, OptionError, SpearError
from spearpp.metrics import Score, score
from spearpp.pictures import blur, guess_shape
from spearpp.report.decision import decide
from spearpp.report.html import page
from spearpp.report.junit import junit_xml
from spearpp.report.presentation import Presentation, presented, shown_truth
from spearpp.report.sarif import sarif_log
from spearpp.simulate import Batch
from spearpp.types import Tensor
from spearpp.update.files import FileName, write_whole
from spearpp.update.source import sha256_of

__all__ = [
    "DOCUMENT",
    "NUMBERS",
    "Presentation",
    "Redaction",
    "compare",
    "junit_xml",
    "rerender",
    "sarif_log",
    "why_not_compared",
    "write",
]
MAX_FILES = 1000
"""Largest number of files of one audit that are hashed. Design choice: a folder of rounds has fewer, and a wrong folder
does not take minutes."""
PAGE, SARIF, JUNIT, TRUTH = "report.html", "report.sarif", "report.junit.xml", "truth.safetensors"


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
    config: Config | None = None,
    fail_on: str = "never",
) -> Path:
    """Write all files of a report and return the path of the page.

    Args:
        folder: Folder of the report. It is created if necessary. A report that it contains is replaced.
        result: The audit.
        truth: The client's true batch, to show beside the recovered inputs. The audit does not use it. It is only
            stored if the audit recovered features of an inner layer, which cannot be compared with inputs.
        presentation: How to show inputs. None guesses from the number of features.
        redact: How to hide recovered inputs in every file: "none", "blur" or "omit".
        command: Command line that repeats the audit.
        source: Files from which the update was read. The report contains their hashes.
        about: Further fields for ``report.json``, such as ``client`` and ``model``, the names of both.
        config: Accepted leaks and thresholds of ``spearpp.toml``.
        fail_on: What fails the gate: "leak", "certified" or "never".

    Returns:
        Path of ``report.html``.

    Raises:
        SpearError: If the truth or the presentation does not match the audit, or if a file cannot be written.
    """
    presentation = presented(result, truth) if presentation is None else presentation
    compared = None if truth is None else compare(result, truth)
    content = {
        "date": now(),
        "client": None,
        "model": None,
        "source": list(source),
        "command": shlex.join(command) if command else None,
        "versions": _versions(),
        "presentation": asdict(presentation),
        "truth": None if compared is None else compared.to_dict(),
        "truth_not_compared": None if truth is None else why_not_compared(result, truth),
        **(about or {}),
    }
    content["files"] = _fingerprints(content["source"])
    content |= decide({**result.to_dict(), **content}, config, fail_on)
    path = Path(folder)
    result.save(path, redact=redact, shape=presentation.shape, about=content)
    if truth is not None and redact == "none":
        truth.save(path / TRUTH)
    else:
        (path / TRUTH).unlink(missing_ok=True)
    return _render(path, result, truth, compared, presentation, redact)


def rerender(
    folder: FileName,
    *,
    truth: Batch | None = None,
    presentation: Presentation | None = None,
    redact: Redaction = "none",
) -> Path:
    """Render all files of an existing report but ``report.json`` again, with other display options.

    Args:
        folder: Folder of a report.
        truth: The client's true batch. None uses the batch stored in the folder, if there is one.
        presentation: How to show inputs. None uses the stored presentation.
        redact: How to hide recovered inputs on the page. The other files of the folder do not change.

    Returns:
        Path of ``report.html``.

    Raises:
        SpearError: If the folder contains no report, or if the truth does not match it.
    """
    path = Path(folder)
    result, content = load(path), read_document(path)
    if truth is None and (path / TRUTH).is_file():
        truth = Batch.load(path / TRUTH)
    if presentation is None and "presentation" in content:
        presentation = Presentation.read(content["presentation"])
    presentation = presented(result, truth) if presentation is None else presentation
    stored_redaction: Redaction = content.get("redacted", "none")
    if stored_redaction != "none" and truth is not None:
        why = f"the inputs in {path} were redacted, so they cannot be compared with a true batch"
        raise OptionError(why, hint="omit --truth")
    compared = None if truth is None else compare(result, truth)
    redact = redact if stored_redaction == "none" else stored_redaction
    try:
        return _render(path, result, truth, compared, presentation, redact)
    except (SpearError, OSError):
        raise
    except Exception as error:  # The template meets any kind of damage in the fields that ``load`` does not check.
        raise DataError(f"{path / DOCUMENT} is damaged: {type(error).__name__}: {error}") from error


def compare(result: AuditResult, truth: Batch) -> Score | None:
    """Score the recovered inputs against the true batch.

    Returns:
        The score, or None if the two cannot be compared (see ``why_not_compared``). If the layer acts on every token
        of a sequence, every token of the true batch counts as a sample.
    """
    rows = truth.as_rows(result.inputs.shape[1]) if why_not_compared(result, truth) is None else None
    if rows is None:
        return None
    return score(result.inputs, rows.inputs, normalisation=rows.normalisation)


def why_not_compared(result: AuditResult, truth: Batch) -> str | None:
    """Return a sentence if the recovered inputs cannot be compared with the true batch, else None."""
    if result.best is None:
        return "Not compared with the true batch: no input was recovered."
    if result.best.layer.sees == "features":
        return "Not compared with the true batch: features were recovered, and no inputs of the model."
    if truth.as_rows(result.inputs.shape[1]) is None:
        sizes = f"{result.inputs.shape[1]:,} numbers, and the true inputs have {truth.inputs.shape[1]:,}"
        return f"Not compared with the true batch: the recovered inputs have {sizes}."
    return None


def _render(
    path: Path,
    result: AuditResult,
    truth: Batch | None,
    compared: Score | None,
    presentation: Presentation,
    redact: Redaction,
) -> Path:
    content = read_document(path)
    if "severity" not in content:  # An earlier release wrote the report.
        content |= decide(content)
    shown = redacted(result, redact, presentation.shape)
    rows = shown_truth(result, truth)
    originals = None if rows is None or compared is None else _originals(rows, presentation, redact)
    html = page(shown, content, presentation, originals, compared, redact)
    write_whole(path / PAGE, html.encode())
    write_whole(path / SARIF, (json.dumps(sarif_log(content), indent=1) + "\n").encode())
    write_whole(path / JUNIT, junit_xml(content).encode())
    return path / PAGE


def _originals(truth: Batch, presentation: Presentation, redact: Redaction) -> Tensor | None:
    """Return the true inputs as far as the redaction allows to show them."""
    if redact == "none":
        return truth.inputs
    shape = presentation.shape or guess_shape(truth.inputs.shape[1])
    if redact == "omit" or shape is None or shape[1] * shape[2] < MIN_BLURRED_PIXELS:
        return None
    return blur(truth.inputs, shape)


def _versions() -> dict[str, str]:
    packages = {each.__name__: str(each.__version__) for each in (torch, numpy, scipy, safetensors)}
    return {
        "spearpp": __version__,
        **packages,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def now() -> str:
    """Return the time in UTC, as ISO 8601 with seconds."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _fingerprints(sources: Iterable[str]) -> list[dict[str, Any]]:
    """Return the name, size and SHA-256 hash of each file. A source is a file, or a folder of rounds of a client."""
    found: list[dict[str, Any]] = []
    for path in islice(_files(sources), MAX_FILES):
        with suppress(DataError, OSError):  # A file that was deleted meanwhile does not affect the audit.
            found.append({"name": str(path), "bytes": path.stat().st_size, "sha256": sha256_of(path)})
    return found


def _files(sources: Iterable[str]) -> Iterator[Path]:
    """Yield the named files and the files in the named folders that exist, without hidden files in folders."""
    for source in sources:
        path = Path(source)
        if path.is_dir():
            yield from (each for each in sorted(path.iterdir()) if each.is_file() and not each.name.startswith("."))
        elif path.is_file():
            yield path
