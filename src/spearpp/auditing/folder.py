"""Save an audit to a folder: ``report.json``, and ``recovered.safetensors`` with the recovered numbers.

The numbers are written first, and ``report.json`` contains their hash. If the program is killed while it writes, the
folder contains a complete audit, or ``load`` detects that the two files do not belong together.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch

from spearpp.auditing.claim import Claim, Kind
from spearpp.auditing.document import EVIDENCE_KINDS, SCHEMA, VERSION, document, plain
from spearpp.auditing.estimate import Estimate
from spearpp.auditing.numbers import Finding
from spearpp.auditing.replay import Replay
from spearpp.auditing.result import AuditResult, History, LayerAudit, RoundSummary, Verdict
from spearpp.auditing.vocabulary import Vocabulary
from spearpp.errors import DataError, OptionError
from spearpp.inversion.evidence import COLUMNS, Evidence
from spearpp.inversion.result import Inversion, Stats
from spearpp.model import Layer
from spearpp.pictures import Shape, blur, guess_shape
from spearpp.types import Tensor
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
    tensors = {name: each for i, layer in enumerate(result.layers) for name, each in _tensors(f"{i}", layer)}
    tensors["redacted"] = torch.tensor([REDACTIONS.index(redact)])  # so the file is never empty
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

    hidden = tuple(each.redacted() for each in result.vocabulary)
    return replace(result, layers=[hide(each) for each in result.layers], vocabulary=hidden)


def load(folder: FileName) -> AuditResult:
    """Read an audit that ``save`` wrote.

    Raises:
        DataError: if the folder contains no audit, or an audit of another version.
    """
    content = read_document(folder)
    numbers = Path(folder) / NUMBERS
    if sha256_of(numbers) != content.get("numbers_sha256"):
        raise DataError(f"{numbers} does not belong to the {DOCUMENT} in the same folder")
    tensors, _ = read_tensors(numbers)
    trained = content.get("estimated")
    try:
        return AuditResult(
            verdict=Verdict(content["verdict"]),
            summary=str(content["summary"]),
            layers=[_layer(each, f"{index}", tensors) for index, each in enumerate(content["layers"])],
            findings=[Finding(**each) for each in content["findings"]],
            caveats=[str(each) for each in content["caveats"]],
            replay=None if content["replay"] is None else Replay(**_fields_of(Replay, content["replay"])),
            seconds=float(content["seconds"]),
            budget=None if content["budget"] is None else float(content["budget"]),
            interrupted=bool(content["interrupted"]),
            estimated=None if trained is None else Estimate(**_fields_of(Estimate, trained)),
            history=_history(content.get("history")),
            vocabulary=tuple(Vocabulary.read(each) for each in content.get("vocabulary", [])),
        )
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


def _tensors(prefix: str, audited: LayerAudit) -> list[tuple[str, Tensor]]:
    """Return the names and tensors of one layer for ``recovered.safetensors``."""
    inversion = audited.inversion
    if inversion is None:
        return []
    names = ("inputs", "certified", "directions", "spectrum", "zeros", "fits")
    found = [(f"{prefix}/{name}", cast(Tensor, getattr(inversion, name))) for name in names]
    if audited.labels is not None:
        found.append((f"{prefix}/labels", audited.labels))
    for name, each in ({} if inversion.evidence is None else inversion.evidence.columns).items():
        found.append((f"{prefix}/evidence/{name}", each))
    return found


def _layer(content: Mapping[str, Any], prefix: str, tensors: Mapping[str, Tensor]) -> LayerAudit:
    """Return one layer from its entry in ``report.json`` and its tensors."""
    layer = Layer(**_fields_of(Layer, content))
    found = content["inversion"]
    if found is None:
        return LayerAudit(layer, bool(content["feasible"]), str(content["outcome"]))
    start = f"{prefix}/evidence/"
    columns = {name.removeprefix(start): each for name, each in tensors.items() if name.startswith(start)}
    evidence: Evidence | None = None
    if found["evidence"] is not None:
        evidence = Evidence(
            **{name: columns[name] for name in COLUMNS},
            layers={kind: layers for layers, kind in EVIDENCE_KINDS.items()}[found["evidence"]],
            details={name: each for name, each in columns.items() if name not in COLUMNS},
            numbers={name: _number(value) for name, value in found["batch_evidence"].items()},
        )
    inversion = Inversion(
        inputs=tensors[f"{prefix}/inputs"],
        certified=tensors[f"{prefix}/certified"],
        score=_number(found["score"]),
        batch_size=int(found["batch_size"]),
        directions=tensors[f"{prefix}/directions"],
        scale_known=bool(found["scale_known"]),
        evidence=evidence,
        spectrum=tensors[f"{prefix}/spectrum"],
        zeros=tensors[f"{prefix}/zeros"],
        fits=tensors[f"{prefix}/fits"],
        next_layer=str(found["next_layer"]),
        stats=Stats(**found["stats"]),
    )
    rows = {len(inversion.inputs), len(inversion.certified), *(len(each) for each in columns.values())}
    if len(rows) > 1:
        raise ValueError("the tensors of a layer have different lengths")
    if len(found["samples"]) != len(inversion.inputs):
        raise ValueError("a layer does not describe as many samples as it contains")
    labels, claims = tensors.get(f"{prefix}/labels"), tuple(_claim(each) for each in found["samples"])
    return LayerAudit(layer, bool(content["feasible"]), str(content["outcome"]), inversion, labels, claims)


def _history(content: Mapping[str, Any] | None) -> History | None:
    """Return the history of an audit of several rounds from its entry in ``report.json``."""
    if content is None:
        return None
    return History(
        rounds=tuple(RoundSummary(**each) for each in content["rounds"]),
        joined=tuple(int(each) for each in content["joined"]),
        samples=None if content["samples"] is None else int(content["samples"]),
        outcome=str(content["outcome"]),
        present=tuple(tuple(int(index) for index in each) for each in content["present"]),
        known_from=tuple(int(each) for each in content["known_from"]),
    )


def _claim(content: Mapping[str, Any]) -> Claim:
    """Return the claim of one input from its entry in ``report.json``."""
    error, apart = (math.inf if content[name] is None else float(content[name]) for name in ("error", "apart"))
    return Claim(Kind(content["claim"]), error, _number(content["samples"]), str(content["why"]), apart)


def _fields_of(table: type[Layer | Replay | Estimate], content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``report.json`` that are fields of a dataclass.

    A field with a default value may be missing, because an earlier release of the same version did not have it.
    """
    needed = (field.name for field in fields(table) if field.default is MISSING or field.name in content)
    return {name: content[name] for name in needed}


def _number(value: float | None) -> float:
    """Return a number, or nan for null."""
    return float("nan") if value is None else value
