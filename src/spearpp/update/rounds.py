"""Read several rounds of one client from a folder."""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from spearpp.errors import DataError
from spearpp.update import KINDS, ClientUpdate, Kind
from spearpp.update.files import READERS, FileName
from spearpp.update.source import read_file

MANIFEST = "rounds.json"
"""Name of the file that lists the rounds of a folder."""
MAX_ROUNDS = 1000
"""Largest number of rounds of a folder. Design choice: far more than an audit can use."""
MAX_MANIFEST_BYTES = 2**20
"""Largest size of a manifest: 1 MiB. Design choice: enough for ``MAX_ROUNDS`` rounds."""


Load = Callable[[], ClientUpdate]
"""Loads one round."""


def load_rounds(
    folder: FileName, *, kind: Kind = "weights", lr: float | None = None, steps: int | None = None
) -> list[ClientUpdate]:
    """Load the updates of one client in several rounds, oldest first. Nothing in the files is run.

    A round is a file that ``ClientUpdate.save`` wrote, or a pair of files whose names differ only in the words
    "before" and "after" (``3-before.pt`` and ``3-after.pt``, or ``round3/before.pt`` and ``round3/after.pt``). The
    rounds are ordered by name, and numbers in names count as numbers. If the folder contains ``rounds.json``, only the
    rounds that it lists are read, in its order: a list of objects with ``after``, and optionally ``before``, ``kind``,
    ``lr`` and ``steps``. File names are relative to the folder.

    Args:
        folder: the folder.
        kind: what the files of other programs contain, unless the manifest says so.
        lr: the learning rate of the client, if known.
        steps: number of passes over the client's data in a round, if known.

    Raises:
        DataError: if the folder contains no rounds, or a file is missing or damaged.
    """
    path = Path(folder)
    if not path.is_dir():
        raise DataError(f"{folder} is not a folder")
    found = list(_listed(path, kind, lr, steps) if (path / MANIFEST).exists() else _paired(path, kind, lr, steps))
    if not found:
        raise DataError(f"{folder} contains no rounds: expected updates, or pairs of files named before and after")
    if len(found) > MAX_ROUNDS:
        raise DataError(f"{folder} contains {len(found)} rounds, more than the {MAX_ROUNDS} allowed")
    return [load() for load in found]


def _round(after: Path, before: Path | None, kind: Kind, lr: float | None, steps: int | None) -> Load:
    if before is None:
        return partial(ClientUpdate.load, after, kind=kind)
    return partial(ClientUpdate.load, after, before=before, kind=kind, lr=lr, steps=steps)


def _paired(folder: Path, kind: Kind, lr: float | None, steps: int | None) -> Iterator[Load]:
    """Yield the rounds of a folder without a manifest, ordered by name."""
    files = [each for each in folder.rglob("*") if each.suffix.lower() in READERS and each.is_file()]
    named = {str(each.relative_to(folder)): each for each in files if not _hidden(each, folder)}
    for name in sorted(named, key=by_number):
        if "before" in name.lower():
            continue
        is_after = "after" in name.lower()
        partner = next(
            (each for each in named if is_after and _as_after(each) == _as_after(name) and each != name), None
        )
        if is_after and partner is None:
            raise DataError(f"{folder / name} has no partner: expected a file with 'before' instead of 'after'")
        yield _round(named[name], None if partner is None else named[partner], kind, lr, steps)


def _listed(folder: Path, kind: Kind, lr: float | None, steps: int | None) -> Iterator[Load]:
    """Yield the rounds of a manifest."""
    file = folder / MANIFEST
    try:
        content = json.loads(read_file(file, MAX_MANIFEST_BYTES))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, list) or not all(isinstance(each, dict) for each in content):
        raise DataError(f"{file} is not a list of rounds")
    for number, each in enumerate(content, start=1):
        unknown = set(each) - {"after", "before", "kind", "lr", "steps"}
        if unknown or "after" not in each:
            what = f"unknown field {min(unknown)!r}" if unknown else "no field 'after'"
            raise DataError(f"{file}: round {number} has {what[:80]}")
        chosen = each.get("kind", kind)
        if chosen not in KINDS:
            raise DataError(f"{file}: round {number} has kind {str(chosen)[:20]!r}, expected {', '.join(KINDS)}")
        before = None if each.get("before") is None else _inside(folder, each["before"], number)
        after = _inside(folder, each["after"], number)
        yield _round(after, before, chosen, each.get("lr", lr), each.get("steps", steps))


def _inside(folder: Path, name: Any, number: int) -> Path:
    """Return the path of a file of the manifest, which must be inside the folder."""
    path = folder / str(name)
    if not isinstance(name, str) or not path.resolve().is_relative_to(folder.resolve()):
        raise DataError(f"{folder / MANIFEST}: round {number} names a file outside of the folder")
    return path


def _as_after(name: str) -> str:
    return re.sub("before|after", "after", name.lower())


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def by_number(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts names with numbers by the numbers: round9 before round10.

    >>> sorted(["round10", "round9"], key=by_number)
    ['round9', 'round10']
    """
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,18})", name)]
