"""An audit as plain numbers and words: the content of ``report.json``, whose form ``report.schema.json`` documents."""

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from spearpp.auditing.claims import UNJUDGED
from spearpp.auditing.result import AuditResult, LayerAudit
from spearpp.inversion.evidence import Certificates
from spearpp.inversion.result import Inversion
from spearpp.types import Tensor

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SCHEMA = "spearpp-report"
VERSION = 2
"""Rises when a field changes its meaning or goes; new fields do not raise it."""


def document(result: AuditResult) -> dict[str, Any]:
    """Everything in an audit but the recovered numbers themselves, as JSON takes it; null for what is not finite."""
    best = result.best
    content = {
        "schema": SCHEMA,
        "version": VERSION,
        "verdict": str(result.verdict),
        "summary": result.summary,
        "batch_size": None if best is None else best.batch_size,
        "recovered": 0 if best is None else best.recovered,
        "approximate": 0 if best is None else len(result.inputs) - best.recovered,
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
        "layers": [_layer(each) for each in result.layers],
    }
    return {name: plain(value) for name, value in content.items()}


def _layer(audited: LayerAudit) -> dict[str, Any]:
    return {
        **asdict(audited.layer),
        "feasible": audited.feasible,
        "outcome": audited.reason,
        "batch_size": audited.batch_size,
        "recovered": audited.recovered,
        "approximate": audited.approximate,
        "fitting": audited.fitting,
        "inversion": None if audited.inversion is None else _inversion(audited, audited.inversion),
    }


def _inversion(audited: LayerAudit, inversion: Inversion) -> dict[str, Any]:
    evidence = inversion.certificates
    kind = None if evidence is None else "masks" if isinstance(evidence, Certificates) else "witnesses"
    return {
        "score": inversion.score,
        "batch_size": inversion.batch_size,
        "scale_known": inversion.scale_known,
        "witness": inversion.next_layer,
        "stats": asdict(inversion.stats),
        "spectrum": inversion.spectrum.tolist(),
        "evidence": kind,
        "batch_evidence": {} if evidence is None else _scalars(evidence),
        "samples": [_sample(audited, inversion, row) for row in range(len(inversion.inputs))],
    }


def _sample(audited: LayerAudit, inversion: Inversion, row: int) -> dict[str, Any]:
    evidence, labels = inversion.certificates, audited.labels
    claim = audited.claims[row] if row < len(audited.claims) else UNJUDGED
    columns = {} if evidence is None else {f.name: getattr(evidence, f.name) for f in fields(evidence)}
    numbers = {name: each[row].item() for name, each in columns.items() if isinstance(each, Tensor)}
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


def _scalars(evidence: "DataclassInstance") -> dict[str, float]:
    named = {field.name: getattr(evidence, field.name) for field in fields(evidence)}
    return {name: value for name, value in named.items() if isinstance(value, int | float)}


def plain(value: Any) -> Any:
    """The same as JSON takes it: lists for tuples, None for numbers that are not finite.

    >>> plain({"a": (1.0, float("inf"))})
    {'a': [1.0, None]}
    """
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
