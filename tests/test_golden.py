"""Results of thirteen clients are those recorded in ``golden.json``: kinds and counts exactly, numbers up to rounding.

The file is written by ``tests/golden.py``.
"""

import json
from typing import Any

import pytest

from golden import CLIENTS, FILE, result_of

RECORDED = json.loads(FILE.read_text())
COUNTED = {"starts", "steps", "candidates", "rounds"}
"""What a search did: rounding on another processor may change it a little."""


def compare(found: Any, recorded: Any, where: str) -> None:
    if isinstance(recorded, dict):
        assert set(found) == set(recorded), where
        for key in recorded:
            compare(found[key], recorded[key], f"{where}.{key}")
    elif isinstance(recorded, list):
        assert len(found) == len(recorded), where
        for i, pair in enumerate(zip(found, recorded, strict=True)):
            compare(*pair, f"{where}[{i}]")
    elif isinstance(recorded, float) or where.rpartition(".")[2] in COUNTED:
        assert found == pytest.approx(recorded, rel=0.5, abs=1e-6), where
    else:
        assert found == recorded, where


def test_every_client_is_recorded() -> None:
    assert set(RECORDED) == set(CLIENTS)
    assert sum(each["verdict"] == "LEAKS" for each in RECORDED.values()) >= 8


@pytest.mark.parametrize("name", CLIENTS)
def test_results_are_those_recorded(name: str) -> None:
    compare(result_of(name), RECORDED[name], name)
