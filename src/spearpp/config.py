"""Read ``spearpp.toml``: settings of an audit, thresholds of its gate, and accepted leaks.

[audit]
model = "net.py:Net"
budget = "2m"
batch_size = 12
loss = "cross-entropy"
fail_on = "leak"

[thresholds]
unproved = 2

[[accept]]
leak = "inputs/0"
most = 4
reason = "Synthetic test data, ticket PRIV-12"
expires = 2027-06-30
"""

import datetime
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from spearpp.errors import DataError
from spearpp.model.loss import LOSS_NAMES
from spearpp.update.source import read_file

NAME = "spearpp.toml"
"""Usual name of the file. A command reads the file only if the option ``--config`` names it."""
EXAMPLE = "docs/howto.md shows an example of spearpp.toml under 'Accept a leak for a limited time'"
"""Hint for a file with invalid entries."""
MAX_BYTES = 2**15
"""Largest size of the file. Design choice: 32 KiB hold about 200 accepted leaks. The worst file of this size that we
found, one key with 16,000 dots, is parsed in a second."""
DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|m|min|h)?\s*")
"""A time limit such as 60, 90s, 2m or 1h."""
SECONDS_PER_UNIT = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
MAX_FAULTS = 20
"""Largest number of invalid entries that an error names. Design choice: they fit on a screen."""
FailOn = Literal["leak", "certified", "never"]
"""Values of ``--fail-on`` and of ``fail_on``."""
FAIL_ON: tuple[FailOn, ...] = get_args(FailOn)
LeakKind = Literal["inputs", "features", "unproved", "vocabulary"]
LEAK_KINDS: tuple[LeakKind, ...] = get_args(LeakKind)
"""Kinds of leaks, most serious first: inputs of the model, features of an inner layer, inputs that fit the update
without proof that they are samples, and the rows of an embedding table that the training looked up."""


@dataclass(frozen=True)
class Acceptance:
    """One leak that somebody accepted, with the reason and the last day on which the acceptance holds."""

    leak: str
    """Identifier of the leak, such as ``inputs/0``."""
    most: int
    """Largest number of inputs or rows that is accepted. A larger leak counts as not accepted."""
    reason: str
    expires: datetime.date
    sha256: str | None = None
    """SHA-256 hash of the only audited file for which the acceptance holds. None means every file."""


@dataclass(frozen=True)
class Config:
    """The content of ``spearpp.toml``."""

    path: str | None = None
    audit: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of the options of an audit with the same names (``AUDIT_FIELDS``)."""
    thresholds: Mapping[str, int] = field(default_factory=dict)
    """Largest number of inputs or rows of each kind of leak that passes the gate. Kinds that are not named have 0."""
    accepted: tuple[Acceptance, ...] = ()

    @classmethod
    def read(cls, path: str | Path) -> "Config":
        """Read the file and check every entry.

        Raises:
            DataError: If the file cannot be read, is not valid TOML, or has invalid entries. The message names every
                invalid entry, one on each line.
        """
        try:
            content = tomllib.loads(read_file(Path(path), MAX_BYTES).decode())
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} is not valid TOML: {error}", hint=EXAMPLE) from error
        faults: list[str] = []
        audit = _entries("[audit]", content.get("audit", {}), AUDIT_FIELDS, faults)
        thresholds = _entries("[thresholds]", content.get("thresholds", {}), THRESHOLD_FIELDS, faults)
        accepted = tuple(_accepted(content.get("accept", []), faults))
        faults += [f"unknown table or key {key[:40]!r}" for key in content if key not in TABLES]
        if faults:
            more = [f"and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
            listed = "".join(f"\n- {fault}" for fault in faults[:MAX_FAULTS] + more)
            message = f"{path} has invalid entries:{listed}" if len(faults) > 1 else f"{path}: {faults[0]}"
            raise DataError(message, hint=EXAMPLE)
        return cls(str(path), audit, thresholds, accepted)


def seconds(text: str) -> float | None:
    """Parse a duration such as 60, 90s, 2m or 1h, and return seconds. None if it is not a positive duration.

    >>> seconds("90s"), seconds("2m"), seconds("soon")
    (90.0, 120.0, None)
    """
    match = DURATION.fullmatch(text)
    duration = 0.0 if match is None else float(match[1]) * SECONDS_PER_UNIT[match[2] or "s"]
    return duration or None


Check = tuple[Callable[[Any], object], str]
"""A function that returns whether a value is valid, and what the value should be."""
TEXT: Check = (lambda value: isinstance(value, str) and value.strip(), "a text that is not empty")
COUNT: Check = (lambda value: type(value) is int and value >= 0, "a whole number of 0 or more")
POSITIVE: Check = (lambda value: type(value) is int and value >= 1, "a whole number of 1 or more")
DATE: Check = (lambda value: type(value) is datetime.date, "a date without quotes, such as 2027-06-30")
HASH: Check = (lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value), "64 hexadecimal digits")
BUDGET: Check = (
    lambda value: isinstance(value, str) and seconds(value),
    "a time limit in quotes, such as '90s', '2m' or '1h'",
)
LEAK: Check = (
    lambda value: isinstance(value, str) and value.split("/")[0] in LEAK_KINDS and value.partition("/")[2],
    f"a kind ({', '.join(LEAK_KINDS)}), a slash, and a layer or table, such as 'inputs/0'",
)


def _one_of(values: Sequence[str]) -> Check:
    return lambda value: value in values, f"one of {', '.join(values)}"


AUDIT_FIELDS: dict[str, Check] = {
    "model": TEXT,
    "budget": BUDGET,
    "batch_size": POSITIVE,
    "loss": _one_of(LOSS_NAMES),
    "fail_on": _one_of(FAIL_ON),
}
THRESHOLD_FIELDS: dict[str, Check] = dict.fromkeys(LEAK_KINDS, COUNT)
ACCEPT_FIELDS: dict[str, Check] = {"leak": LEAK, "most": POSITIVE, "reason": TEXT, "expires": DATE, "sha256": HASH}
TABLES = ("audit", "thresholds", "accept")
REQUIRED = ("leak", "most", "reason", "expires")
"""Fields that every accepted leak must have."""


def _entries(where: str, table: Any, fields: Mapping[str, Check], faults: list[str]) -> dict[str, Any]:
    """Return the valid entries of a table, and add one fault for each of the others."""
    valid: dict[str, Any] = {}
    if not isinstance(table, dict):
        faults.append(f"{where[1:-1]} is not a table: write {where}")
        return valid
    for key, value in table.items():
        if key not in fields:
            faults.append(f"{where} has the unknown key {key[:40]!r}: expected one of {', '.join(fields)}")
        elif not fields[key][0](value):
            faults.append(f"{where} {key} is {str(value)[:60]!r}: expected {fields[key][1]}")
        else:
            valid[key] = value
    return valid


def _accepted(entries: Any, faults: list[str]) -> Iterator[Acceptance]:
    """Yield the valid entries of ``[[accept]]``, and add one fault for each of the others."""
    if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
        faults.append("accept is not a list of tables: write [[accept]] before each accepted leak")
        return
    seen: set[tuple[str, str | None]] = set()
    for number, entry in enumerate(entries, 1):
        where = f"[[accept]] number {number}"
        before = len(faults)
        valid = _entries(where, entry, ACCEPT_FIELDS, faults)
        missing = [key for key in REQUIRED if key not in entry]
        if missing:
            faults.append(f"{where} has no {' and no '.join(missing)}")
        if len(faults) > before:
            continue
        acceptance = Acceptance(**valid)
        if (acceptance.leak, acceptance.sha256) in seen:
            faults.append(f"{where} accepts {acceptance.leak!r} a second time")
        seen.add((acceptance.leak, acceptance.sha256))
        yield acceptance
