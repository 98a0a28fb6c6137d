"""Writes docs/models.md from the rows of ``benchmarks.zoo``."""

from collections.abc import Sequence
from typing import Any

from benchmarks.zoo_models import ZOO


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return the page."""
    return str(len(rows)) + str(len(ZOO))
