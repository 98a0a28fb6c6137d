"""The content of ``report.json`` and ``recovered.safetensors``. ``report.schema.json`` documents the former."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, replace
from typing import Any

from spearpp.auditing.checks import Finding
from spearpp.auditing.claims import UNJUDGED, Claim, ClaimKind
from spearpp.auditing.estimate import Estimate
from spearpp.auditing.replay import Replay
from spearpp.auditing.result import AuditResult, History, LayerAudit, RoundSummary, Verdict
from spearpp.auditing.vocabulary import Vocabulary
from spearpp.inversion.evidence import COLUMNS, Evidence, Scope
from spearpp.inversion.result import Inversion, Stats
from spearpp.model import Layer
from spearpp.types import Tensor

SCHEMA = "spearpp-report"
VERSION = 3
"""Version of the format. It increases if a field changes its meaning or is removed, not if a field is added."""
TENSORS = ("inputs", "certified", "directions", "spectrum", "zeros", "fits")
"""The tensors of an inversion in ``recovered.safetensors``."""


def document(result: AuditResult) -> dict[str, Any]:
    """Return everything in an audit except the recovered numbers, ready for JSON. Non-finite numbers become null."""
    best = result.best
    content = {
        "schema": SCHEMA,
        "version": VERSION,
        "verdict": str(result.verdict),
        "summary": result.summary,
        "batch_size": None if best is None else best.batch_size,
        "exact": 0 if best is None else best.exact,
        "approximate": 0 if best is None else best.approximate,
        "fitting": result.fitting,
        "why_not_certified": result.why_not_certified,
        "best_layer": None if best is None else best.layer.name,
        "seconds": result.seconds,
        "budget": result.budget,
        "interrupted": result.interrupted,
        "findings": [asdict(finding) for finding in result.findings],
        "caveats": list(result.caveats),
        "replay": None if result.replay is None else {**asdict(result.replay), "proves": result.replay.proves},
        "estimated": None if result.estimated is None else asdict(result.estimated),
        "history": None if result.history is None else asdict(result.history),
        "vocabulary": [asdict(each) for each in result.vocabulary],
        "layers": [_layer(each) for each in result.layers],
    }
    return {name: plain(value) for name, value in content.items()}


def _layer(audited: LayerAudit) -> dict[str, Any]:
    """Return the entry of one layer."""
    return {
        **asdict(audited.layer),
        "invertible": audited.invertible,
        "outcome": audited.reason,
        "batch_size": audited.batch_size,
        "exact": audited.exact,
        "approximate": audited.approximate,
        "fitting": audited.fitting,
        "inversion": None if audited.inversion is None else _inversion(audited, audited.inversion),
    }


def _inversion(audited: LayerAudit, inversion: Inversion) -> dict[str, Any]:
    """Return the entry of one layer's inversion."""
    evidence = inversion.evidence
    return {
        "score": inversion.score,
        "batch_size": inversion.batch_size,
        "scale_known": inversion.scale_known,
        "next_layer": inversion.next_layer,
        "stats": asdict(inversion.stats),
        "spectrum": inversion.spectrum.tolist(),
        "evidence": None if evidence is None else str(evidence.scope),
        "batch_evidence": {} if evidence is None else evidence.numbers,
        "samples": [_sample(audited, inversion, row) for row in range(len(inversion.inputs))],
    }


def _sample(audited: LayerAudit, inversion: Inversion, row: int) -> dict[str, Any]:
    """Return the entry of one input: its claim, its label and the numbers of its evidence."""
    evidence, labels = inversion.evidence, audited.labels
    claim = audited.claims[row] if row < len(audited.claims) else UNJUDGED
    numbers = {} if evidence is None else {name: each[row].item() for name, each in evidence.columns.items()}
    if row < len(inversion.zeros):
        numbers["zeros"] = int(inversion.zeros[row])
    numbers["noise_error"] = numbers.pop("error", math.inf)
    return {
        "claim": str(claim.kind),
        "certified": claim.certified,
        "error": claim.error,
        "samples": claim.samples,
        "apart": claim.apart,
        "why": claim.why,
        "label": None if labels is None or int(labels[row]) < 0 else int(labels[row]),
        **numbers,
    }


def plain(value: Any) -> Any:
    """Convert a value for JSON: tuples become lists, and non-finite numbers become None.

    >>> plain({"a": (1.0, float("inf"))})
    {'a': [1.0, None]}
    """
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def recovered_tensors(result: AuditResult) -> dict[str, Tensor]:
    """Return the tensors of an audit by their name in ``recovered.safetensors``: "0/inputs" are those of layer 0."""
    tensors: dict[str, Tensor] = {}
    for index, audited in enumerate(result.layers):
        inversion = audited.inversion
        if inversion is None:
            continue
        tensors |= {f"{index}/{name}": getattr(inversion, name) for name in TENSORS}
        if audited.labels is not None:
            tensors[f"{index}/labels"] = audited.labels
        if inversion.evidence is not None:
            tensors |= {f"{index}/evidence/{name}": each for name, each in inversion.evidence.columns.items()}
    return tensors


def read(content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> AuditResult:
    """Return an audit from the content of ``report.json`` and the tensors of ``recovered.safetensors``.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: if the content is not that of a report.
    """
    trained = content.get("estimated")
    return AuditResult(
        verdict=Verdict(content["verdict"]),
        summary=str(content["summary"]),
        layers=[_read_layer(each, f"{index}", tensors) for index, each in enumerate(content["layers"])],
        findings=[Finding(**each) for each in content["findings"]],
        caveats=[str(each) for each in content["caveats"]],
        replay=None if content["replay"] is None else Replay(**_fields_of(Replay, content["replay"])),
        seconds=float(content["seconds"]),
        budget=None if content["budget"] is None else float(content["budget"]),
        interrupted=bool(content["interrupted"]),
        estimated=None if trained is None else Estimate(**_fields_of(Estimate, trained)),
        history=_read_history(content.get("history")),
        vocabulary=tuple(Vocabulary.read(each) for each in content.get("vocabulary", [])),
    )


def _read_layer(content: Mapping[str, Any], prefix: str, tensors: Mapping[str, Tensor]) -> LayerAudit:
    """Return one layer from its entry in ``report.json`` and its tensors."""
    layer = Layer(**_fields_of(Layer, content))
    audited = LayerAudit(layer, str(content["outcome"]), invertible=bool(content["invertible"]))
    found = content["inversion"]
    if found is None:
        return audited
    start = f"{prefix}/evidence/"
    columns = {name.removeprefix(start): each for name, each in tensors.items() if name.startswith(start)}
    evidence: Evidence | None = None
    if found["evidence"] is not None:
        evidence = Evidence(
            **{name: columns[name] for name in COLUMNS},
            scope=Scope(found["evidence"]),
            details={name: each for name, each in columns.items() if name not in COLUMNS},
            numbers={name: _number(value) for name, value in found["batch_evidence"].items()},
        )
    own: dict[str, Any] = {name: tensors[f"{prefix}/{name}"] for name in TENSORS}
    inversion = Inversion(
        **own,
        score=_number(found["score"]),
        batch_size=int(found["batch_size"]),
        scale_known=bool(found["scale_known"]),
        evidence=evidence,
        next_layer=str(found["next_layer"]),
        stats=Stats(**found["stats"]),
    )
    rows = {len(inversion.inputs), len(inversion.certified), *(len(each) for each in columns.values())}
    if len(rows) > 1:
        raise ValueError("the tensors of a layer have different lengths")
    if len(found["samples"]) != len(inversion.inputs):
        raise ValueError("a layer does not describe as many samples as it contains")
    labels, claims = tensors.get(f"{prefix}/labels"), tuple(_read_claim(each) for each in found["samples"])
    return replace(audited, inversion=inversion, labels=labels, claims=claims)


def _read_history(content: Mapping[str, Any] | None) -> History | None:
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


def _read_claim(content: Mapping[str, Any]) -> Claim:
    """Return the claim of one input from its entry in ``report.json``."""
    error, apart = (math.inf if content[name] is None else float(content[name]) for name in ("error", "apart"))
    return Claim(ClaimKind(content["claim"]), error, _number(content["samples"]), str(content["why"]), apart)


def _fields_of(table: type[Layer | Replay | Estimate], content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``report.json`` that are fields of a dataclass.

    A field with a default value may be missing, because an earlier release of the same version did not have it.
    """
    needed = (field.name for field in fields(table) if field.default is MISSING or field.name in content)
    return {name: content[name] for name in needed}


def _number(value: float | None) -> float:
    """Return a number, or nan for null."""
    return float("nan") if value is None else value
