"""The leaks of an audit, each with an identifier that stays the same from one audit to the next."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from spearpp.config import LEAK_KINDS, LeakKind


@dataclass(frozen=True)
class Leak:
    """What one layer or one embedding table reveals, proved or not (kind ``unproved``).

    >>> Leak("inputs", "0", 3, 3, 8).id
    'inputs/0'
    """

    kind: LeakKind
    where: str
    """Name of the layer or of the embedding table."""
    count: int
    """Number of inputs or rows."""
    exact: int
    """Number of these that are certified as exact. The rows of an embedding table count as exact."""
    total: int | None
    """Number of samples that the update shows, or number of rows of the table. None if it is unknown."""

    @property
    def id(self) -> str:
        """Identifier for the file of accepted leaks: the kind, and the name of the layer or table."""
        return f"{self.kind}/{self.where}"


def leaks(content: Mapping[str, Any]) -> list[Leak]:
    """Return all leaks in the content of ``report.json``, most serious kind first."""
    found = [*_of_layers(content["layers"]), *_of_tables(content.get("vocabulary") or [])]
    return sorted(found, key=lambda each: (LEAK_KINDS.index(each.kind), -each.count, each.where))


def _of_layers(layers: Iterable[Mapping[str, Any]]) -> Iterable[Leak]:
    for layer in layers:
        name, total = str(layer["name"]), None if layer["batch_size"] is None else int(layer["batch_size"])
        exact, fitting = int(layer["exact"]), int(layer["fitting"])
        count = exact + int(layer["approximate"])
        if count:
            yield Leak("features" if layer["sees"] == "features" else "inputs", name, count, exact, total)
        if fitting:
            yield Leak("unproved", name, fitting, 0, total)


def _of_tables(tables: Iterable[Mapping[str, Any]]) -> Iterable[Leak]:
    for table in tables:
        count = int(table["count"])
        if count and not table["positions"]:
            yield Leak("vocabulary", str(table["table"]), count, count, int(table["rows"]))
