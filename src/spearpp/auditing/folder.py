"""A folder that holds an audit: ``report.json``, and ``recovered.safetensors`` with the recovered numbers.

The numbers are written first and their hash goes into the other file: a folder in which a writer was killed
still holds a whole audit or is recognised.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch

from spearpp.auditing.checks import Finding
from spearpp.auditing.claims import Claim, Kind
from spearpp.auditing.document import SCHEMA, VERSION, document, plain
from spearpp.auditing.estimate import Estimate
from spearpp.auditing.replay import Replay
from spearpp.auditing.result import AuditResult, LayerAudit, Verdict
from spearpp.errors import DataError, OptionError
from spearpp.inversion.evidence import Certificates, WitnessCertificates
from spearpp.inversion.result import Inversion, Stats
from spearpp.model import Layer
from spearpp.pictures import Shape, blur, guess_shape
from spearpp.types import Tensor
from spearpp.update.files import FileName, read_tensors, write_tensors, write_whole

Redaction = Literal["none", "blur", "omit"]
REDACTIONS: tuple[Redaction, ...] = ("none", "blur", "omit")
DOCUMENT, NUMBERS = "report.json", "recovered.safetensors"
SMALLEST = 256
"""Pixels from which on a picture can be blurred: 16 or more go into a block. Smaller ones are left out."""
LARGEST = 2**28
"""Bytes that ``report.json`` may have."""


def save(
    result: AuditResult,
    folder: FileName,
    *,
    redact: Redaction = "none",
    shape: Shape | None = None,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write an audit into a folder, which is made if it is not there; an audit in it is replaced.

    Args:
        result: the audit.
        folder: where.
        redact: "none"; "blur" keeps 4 x 4 blocks of each picture of 16 x 16 pixels or more, the labels, and nothing of
            other inputs; "omit" keeps nothing.
        shape: of a picture, for blurring; None guesses it.
        about: what else ``report.json`` shall hold, as JSON takes it.

    Raises:
        DataError: if it cannot be written.
    """
    if redact not in REDACTIONS:
        raise OptionError(f"redact={redact!r}: one of {', '.join(REDACTIONS)}")
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{place} cannot be made: {error.strerror or error}") from error
    result = redacted(result, redact, shape)
    tensors = {name: each for i, layer in enumerate(result.layers) for name, each in _tensors(f"{i}", layer)}
    tensors["redacted"] = torch.tensor([REDACTIONS.index(redact)])  # and a file is never empty
    write_tensors(place / NUMBERS, tensors, {"audit": VERSION, "redacted": redact})
    content = {**document(result), "redacted": redact, **plain(about or {}), "numbers_sha256": _hash(place / NUMBERS)}
    write_whole(place / DOCUMENT, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def redacted(result: AuditResult, redact: Redaction, shape: Shape | None = None) -> AuditResult:
    """The same audit with its recovered inputs blurred or left out."""
    if redact == "none":
        return result

    def hide(audited: LayerAudit) -> LayerAudit:
        if audited.inversion is None:
            return audited
        inputs = audited.inversion.inputs
        form = shape if shape is not None and audited.layer.sees == "inputs" else guess_shape(inputs.shape[1])
        if redact == "omit" or form is None or form[1] * form[2] < SMALLEST:
            hidden = inputs[:, :0]
        else:
            hidden = blur(inputs.float(), form)
        nothing = audited.inversion.directions[:, :0]
        labels = None if redact == "omit" else audited.labels
        return replace(audited, labels=labels, inversion=replace(audited.inversion, inputs=hidden, directions=nothing))

    return replace(result, layers=[hide(each) for each in result.layers])


def load(folder: FileName) -> AuditResult:
    """Read an audit that ``save`` wrote.

    Raises:
        DataError: if the folder holds none, or one of another version.
    """
    content = read_document(folder)
    numbers = Path(folder) / NUMBERS
    if _hash(numbers) != content.get("numbers_sha256"):
        raise DataError(f"{numbers} does not belong to the {DOCUMENT} beside it")
    tensors, _ = read_tensors(numbers)
    try:
        return AuditResult(
            verdict=Verdict(content["verdict"]),
            summary=str(content["summary"]),
            layers=[_layer(each, f"{index}", tensors) for index, each in enumerate(content["layers"])],
            findings=[Finding(**each) for each in content["findings"]],
            caveats=[str(each) for each in content["caveats"]],
            replay=_replay(content["replay"]),
            seconds=float(content["seconds"]),
            budget=None if content["budget"] is None else float(content["budget"]),
            interrupted=bool(content["interrupted"]),
            estimated=_estimate(content.get("estimated")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{Path(folder) / DOCUMENT} is no report of this version: {error!r}") from error


def read_document(folder: FileName) -> dict[str, Any]:
    """The content of a folder's ``report.json``.

    Raises:
        DataError: if there is none, or it is of another kind or version.
    """
    file = Path(folder) / DOCUMENT
    try:
        if file.stat().st_size > LARGEST:
            raise DataError(f"{file} has more than the {LARGEST:,} bytes allowed")
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise DataError(
            f"{file} cannot be read: {error.strerror or error}; is {folder} a folder of an audit?"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is no JSON: {error}") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise DataError(f"{file} is no report of an audit")
    if content.get("version") != VERSION:
        raise DataError(f"{file} has version {str(content.get('version'))[:20]}, this spearpp reads {VERSION}")
    return content


def _hash(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from error


def _tensors(prefix: str, audited: LayerAudit) -> list[tuple[str, Tensor]]:
    inversion = audited.inversion
    if inversion is None:
        return []
    names = ("inputs", "certified", "directions", "spectrum", "zeros", "fits")
    found = [(f"{prefix}/{name}", cast(Tensor, getattr(inversion, name))) for name in names]
    if audited.labels is not None:
        found.append((f"{prefix}/labels", audited.labels))
    for name, each in _columns(inversion.certificates).items():
        found.append((f"{prefix}/evidence/{name}", each))
    return found


def _columns(evidence: Certificates | WitnessCertificates | None) -> dict[str, Tensor]:
    if evidence is None:
        return {}
    named = {field.name: getattr(evidence, field.name) for field in fields(evidence)}
    return {name: each for name, each in named.items() if isinstance(each, Tensor)}


def _layer(content: Mapping[str, Any], prefix: str, tensors: Mapping[str, Tensor]) -> LayerAudit:
    layer = Layer(**{field.name: content[field.name] for field in fields(Layer)})
    found = content["inversion"]
    if found is None:
        return LayerAudit(layer, bool(content["feasible"]), str(content["outcome"]))
    kinds = {"masks": Certificates, "witnesses": WitnessCertificates}
    evidence: Certificates | WitnessCertificates | None = None
    if found["evidence"] is not None:
        named = {name: _finite(value) for name, value in found["batch_evidence"].items()}
        start = f"{prefix}/evidence/"
        columns = {name.removeprefix(start): each for name, each in tensors.items() if name.startswith(start)}
        evidence = kinds[found["evidence"]](**columns, **named)
    inversion = Inversion(
        inputs=tensors[f"{prefix}/inputs"],
        certified=tensors[f"{prefix}/certified"],
        score=_finite(found["score"]),
        batch_size=int(found["batch_size"]),
        directions=tensors[f"{prefix}/directions"],
        scale_known=bool(found["scale_known"]),
        certificates=evidence,
        spectrum=tensors[f"{prefix}/spectrum"],
        zeros=tensors[f"{prefix}/zeros"],
        fits=tensors[f"{prefix}/fits"],
        next_layer=str(found["witness"]),
        stats=Stats(**found["stats"]),
    )
    rows = {len(inversion.inputs), len(inversion.certified), *(len(each) for each in _columns(evidence).values())}
    if len(rows) > 1:
        raise ValueError("its numbers have different lengths")
    if len(found["samples"]) != len(inversion.inputs):
        raise ValueError("it does not describe as many samples as it holds")
    labels, claims = tensors.get(f"{prefix}/labels"), tuple(_claim(each) for each in found["samples"])
    return LayerAudit(layer, bool(content["feasible"]), str(content["outcome"]), inversion, labels, claims)


def _claim(content: Mapping[str, Any]) -> Claim:
    error, apart = (math.inf if content[name] is None else float(content[name]) for name in ("error", "apart"))
    return Claim(Kind(content["claim"]), error, _finite(content["samples"]), str(content["why"]), apart)


def _replay(content: Mapping[str, Any] | None) -> Replay | None:
    if content is None:
        return None
    return Replay(**{field.name: content[field.name] for field in fields(Replay)})


def _estimate(content: Mapping[str, Any] | None) -> Estimate | None:
    if content is None:
        return None
    return Estimate(**{field.name: content[field.name] for field in fields(Estimate)})


def _finite(value: float | None) -> float:
    return float("nan") if value is None else value
