"""The content of ``report.json``. ``report.schema.json`` documents the format."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from spearpp.auditing.claims import UNJUDGED
from spearpp.auditing.result import AuditResult, LayerAudit
from spearpp.inversion.evidence import WHOLE_NETWORK
from spearpp.inversion.result import Inversion

SCHEMA = "spearpp-report"
VERSION = 3
"""Version of the format. It increases if a field changes its meaning or is removed, not if a field is added."""
EVIDENCE_KINDS = {1: "one layer", 2: "two layers", WHOLE_NETWORK: "the whole network"}
"""The name of the evidence in ``report.json``, by the number of layers that the evidence comes from."""


def document(result: AuditResult) -> dict[str, Any]:
    """Return everything in an audit except the recovered numbers, ready for JSON. Non-finite numbers become null."""
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
        "history": None if result.history is None else asdict(result.history),
        "vocabulary": [asdict(each) for each in result.vocabulary],
        "layers": [_layer(each) for each in result.layers],
    }
    return {name: plain(value) for name, value in content.items()}


def _layer(audited: LayerAudit) -> dict[str, Any]:
    """Return the entry of one layer."""
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
    """Return the entry of one layer's inversion."""
    evidence = inversion.evidence
    return {
        "score": inversion.score,
        "batch_size": inversion.batch_size,
        "scale_known": inversion.scale_known,
        "next_layer": inversion.next_layer,
        "stats": asdict(inversion.stats),
        "spectrum": inversion.spectrum.tolist(),
        "evidence": None if evidence is None else EVIDENCE_KINDS[evidence.layers],
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
