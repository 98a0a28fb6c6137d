"""The measured effect of defences, on which the advice of the report is based."""

import json
from functools import cache
from importlib import resources
from typing import Any

RECOVERED_RATIO = 0.7
"""Largest measured number of samples per neuron that were recovered: 140 samples with 200 neurons, and three hidden
layers (docs/results/equations.md). With ReLU it is 0.45 (docs/lab/notebook.md)."""


@cache
def defences() -> dict[str, Any]:
    """Return the table of measured defences: the setting, the command that repeats it, and the rows."""
    return json.loads(resources.files("spearpp.report").joinpath("defences.json").read_text("utf-8"))
