"""What would stop this, as far as it was measured. Never "then it is safe"."""

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from spearpp.auditing import AuditResult, LayerAudit, Verdict


@dataclass(frozen=True)
class Advice:
    """One thing to do, and why."""

    title: str
    text: str


@cache
def defences() -> dict[str, Any]:
    """The table of defences as measured: its setting, the command that repeats it, and its rows."""
    return json.loads(resources.files("spearpp.report").joinpath("defences.json").read_text("utf-8"))


NOT_APPLICABLE = (
    Advice(
        "Look at other attacks too",
        "No layer of this update could be inverted. That says nothing of attacks that guess inputs by optimisation, or "
        "of updates of other rounds.",
    ),
)
NOT_FOUND = (
    Advice(
        "Give it more time",
        "Run it again with a larger --budget, and on updates of several clients and several rounds.",
    ),
    Advice(
        "Do not call it safe",
        "Where batches are small against the width of a layer, assume that a better search finds them, and choose one "
        "of the measures in the table of defences.",
    ),
)
NOISE = Advice(
    "Add calibrated noise before anything leaves the client",
    "Of all measures in the table below only noise stopped this attack. What is needed depends on the model and the "
    "batch: measure it with your own, and have ε from an accountant beside it. Noise that is too weak is no "
    "protection: a tenth of what stopped it left nine of ten inputs recognisable.",
)
ROUNDING = Advice(
    "Do not rely on rounding or local epochs",
    "float16, bfloat16, eight bits and several local epochs were tried, and the inputs still came back.",
)
CARE = Advice(
    "Treat updates as personal data",
    "Whoever can read an update and the weights of its round can repeat this. Encrypt updates in transit and at rest, "
    "log who reads them, and delete them when they are aggregated.",
)


def advice(result: AuditResult) -> list[Advice]:
    """What the owner of the system can do next."""
    if result.verdict is Verdict.NOT_APPLICABLE:
        return list(NOT_APPLICABLE)
    if result.verdict is Verdict.NOT_FOUND and not result.fitting:
        return list(NOT_FOUND)
    best = result.shown
    return [NOISE, *([] if best is None else [_mix(best)]), ROUNDING, CARE]


def _mix(best: LayerAudit) -> Advice:
    neurons = best.layer.neurons
    return Advice(
        "Mix more samples into what the server sees",
        f"This update held {best.batch_size} samples in a layer of {neurons} neurons. As measured, up to about 0.45 "
        f"samples a neuron come back (here {int(0.45 * neurons)}), and from 0.5 on (here {neurons // 2}) the equations "
        "of two layers no longer determine them. Let clients train on more, or sum more of them by secure aggregation, "
        "so that every sum holds more than that. A few clients with few samples each are not enough.",
    )
