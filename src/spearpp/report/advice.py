"""Advice for the owner of a system, based on the measured effect of defences. It never calls an update safe."""

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from spearpp.auditing import AuditResult, LayerAudit

RECOVERED_RATIO = 0.7
"""Largest measured number of samples per neuron that were recovered: 140 samples with 200 neurons, and three hidden
layers (docs/results/equations.md). With ReLU it is 0.45 (docs/lab/notebook.md).
"""
DETERMINED_RATIO = 1.0
"""Samples per neuron from which on the gradients leave no equations.

Derived: a gradient with m rows has at most rank m, and each layer leaves m - b equations (docs/method.md).
"""


@dataclass(frozen=True)
class Advice:
    """One recommendation and its reason."""

    title: str
    text: str


@cache
def defences() -> dict[str, Any]:
    """Return the table of measured defences: the setting, the command that repeats it, and the rows."""
    return json.loads(resources.files("spearpp.report").joinpath("defences.json").read_text("utf-8"))


NOISE = Advice(
    "Add calibrated noise before the update leaves the client",
    "Of all measures in the table below, only noise stopped this attack. The necessary amount depends on the model and "
    "the batch. Measure it with your own model, and report ε from a privacy accountant. Noise that is too weak does "
    "not protect: a tenth of the noise that stopped the attack left nine of ten inputs recognisable.",
)
ROUNDING = Advice(
    "Do not rely on rounding or local epochs",
    "The inputs were still recovered with float16, bfloat16, eight bits and several local epochs.",
)
ROUNDS = Advice(
    "Do not let the same samples take part in many rounds",
    "Rounds of one client with the same data determine more samples than each round alone, so a batch that is too "
    "large for one round can leak over several. Choose the batch size for all rounds together, let clients take part "
    "rarely, or use secure aggregation in every round. With noise, report ε composed over all rounds. Audit the rounds "
    "of a client together (spearpp audit --rounds).",
)
PERSONAL_DATA = Advice(
    "Treat updates as personal data",
    "Anyone who can read an update and the weights of its round can repeat this attack. Encrypt updates in transit and "
    "at rest, log who reads them, and delete them after aggregation.",
)
VOCABULARY = Advice(
    "Move every row of the embedding, or none",
    "Only the rows that a client uses get a gradient, at any batch size. Freeze the embedding, add calibrated noise to "
    "all of its rows, or sum the updates of many clients by secure aggregation, so that nobody can tell the rows of "
    "one client from those of the others. Larger batches, local epochs and Adam do not hide the rows.",
)


def advice(result: AuditResult) -> list[Advice]:
    """Return recommendations for the owner of the audited system, most important first.

    Without a leak there are none: the action of the decision says what to do.
    """
    if result.best is None and any(each.leaks for each in result.vocabulary):
        return [VOCABULARY, PERSONAL_DATA]
    if result.shown is None:
        return []
    return [NOISE, _more_samples(result.shown), ROUNDS, ROUNDING, PERSONAL_DATA]


def _more_samples(audited: LayerAudit) -> Advice:
    neurons = audited.layer.neurons
    return Advice(
        "Mix more samples into what the server sees",
        f"This update contained {audited.batch_size} samples, and the layer has {neurons} neurons. In measurements, up "
        f"to about {RECOVERED_RATIO} samples per neuron were recovered (here {int(RECOVERED_RATIO * neurons)}). With "
        f"{DETERMINED_RATIO:.0f} sample per neuron or more (here {int(DETERMINED_RATIO * neurons)}), the equations of "
        "the network no longer determine the samples. Let clients train on more samples, or sum the updates of more "
        "clients by secure aggregation, so that every sum contains more samples than that. A few clients with few "
        "samples each are not enough.",
    )
