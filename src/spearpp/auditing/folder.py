"""Save an audit to a folder: ``report.json``, and ``recovered.safetensors`` with the recovered numbers.

The numbers are written first, and ``report.json`` contains their hash. If the program is killed while it writes, the
folder contains a complete audit, or ``load`` detects that the two files do not belong together.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from spearpp.auditing.document import SCHEMA, VERSION, document, plain, read, recovered_tensors
from spearpp.auditing.result import AuditResult, LayerAudit
from spearpp.errors import DataError, OptionError
from spearpp.pictures import Shape, blur, guess_shape
from spearpp.update.files import FileName, read_tensors, write_tensors, write_whole
from spearpp.update.source import read_file, sha256_of

Redaction = Literal["none", "blur", "omit"]
REDACTIONS: tuple[Redaction, ...] = ("none", "blur", "omit")
DOCUMENT, NUMBERS = "report.json", "recovered.safetensors"
MIN_BLURRED_PIXELS = 256
"""Smallest number of pixels of a picture that is blurred. Smaller pictures are omitted. A design choice: each of the 4
x 4 blocks of the blurred picture then averages at least 16 pixels."""
MAX_DOCUMENT_BYTES = 2**28
"""Largest size of ``report.json``. A design choice: 256 MiB are far more than any report needs, and they fit into
memory."""


def save(
    result: AuditResult,
    folder: FileName,
    *,
    redact: Redaction = "none",
    shape: Shape | None = None,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write an audit into a folder. The folder is created if necessary, and an audit in the folder is replaced.

    Args:
        result: the audit.
        folder: path of the folder.
        redact: what to hide. "none" hides nothing. "blur" keeps 4 x 4 blocks of every picture with at least 16 x 16
            pixels, keeps the labels, and omits all other inputs and the vocabulary. "omit" omits all inputs, labels and
            the vocabulary.
        shape: shape of a picture, for blurring. None guesses the shape.
        about: further content for ``report.json``, in a form for JSON.

    Raises:
        DataError: if the folder cannot be written.
        OptionError: if ``redact`` is unknown.
    """
    if redact not in REDACTIONS:
        raise OptionError(f"redact={redact!r}: expected one of {', '.join(REDACTIONS)}")
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{path} cannot be created: {error.strerror or error}") from error
    result = redacted(result, redact, shape)
    redaction = {"redacted": torch.tensor([REDACTIONS.index(redact)])}  # so the file is never empty
    tensors = recovered_tensors(result) | redaction
    write_tensors(path / NUMBERS, tensors, {"audit": VERSION, "redacted": redact})
    content = {
        **document(result),
        "redacted": redact,
        **plain(about or {}),
        "numbers_sha256": sha256_of(path / NUMBERS),
    }
    write_whole(path / DOCUMENT, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def redacted(result: AuditResult, redact: Redaction, shape: Shape | None = None) -> AuditResult:
    """Return the audit with its recovered inputs blurred or omitted. See ``save`` for ``redact`` and ``shape``."""
    if redact == "none":
        return result

    def hide(audited: LayerAudit) -> LayerAudit:
        if audited.inversion is None:
            return audited
        inputs = audited.inversion.inputs
        picture = shape if shape is not None and audited.layer.sees != "features" else guess_shape(inputs.shape[1])
        if redact == "omit" or picture is None or picture[1] * picture[2] < MIN_BLURRED_PIXELS:
            hidden = inputs[:, :0]
        else:
            hidden = blur(inputs.float(), picture)
        no_directions = audited.inversion.directions[:, :0]
        inversion = replace(audited.inversion, inputs=hidden, directions=no_directions)
        return replace(audited, labels=None if redact == "omit" else audited.labels, inversion=inversion)

    hidden = tuple(replace(each, used=(), words=()) for each in result.vocabulary)
    return replace(result, layers=[hide(each) for each in result.layers], vocabulary=hidden)


def load(folder: FileName) -> AuditResult:
    """Read an audit that ``save`` wrote.

    Raises:
        DataError: if the folder contains no audit, or an audit of another version.
    """
    content = read_document(folder)
    file = Path(folder) / NUMBERS
    if sha256_of(file) != content.get("numbers_sha256"):
        raise DataError(f"{file} does not belong to the {DOCUMENT} in the same folder")
    tensors, _ = read_tensors(file)
    try:
        return read(content, tensors)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{Path(folder) / DOCUMENT} is not a report of this version: {error!r}") from error


def read_document(folder: FileName) -> dict[str, Any]:
    """Return the content of ``report.json`` in a folder.

    Raises:
        DataError: if there is no such file, or the file is not a report of this version.
    """
    file = Path(folder) / DOCUMENT
    if not file.is_file():
        why = f"there is no file {file}: is {folder} a folder of an audit?"
        raise DataError(why, hint="spearpp audit --out DIR writes such a folder")
    try:
        content = json.loads(read_file(file, MAX_DOCUMENT_BYTES))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise DataError(f"{file} is not the report of an audit")
    if content.get("version") != VERSION:
        raise DataError(
            f"{file} has version {str(content.get('version'))[:20]}, but this spearpp reads version {VERSION}",
            hint="audit the update again to get a report of this version",
        )
    return content
