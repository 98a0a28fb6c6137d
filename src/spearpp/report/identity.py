"""What was audited, and when: the date, and the SHA-256 hashes of the files."""

import datetime
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

MAX_FILES = 1000
"""Largest number of files of one audit that are hashed. Design choice: a folder of rounds has fewer, and a wrong folder
does not take minutes."""


def now() -> str:
    """Return the time in UTC, as ISO 8601 with seconds."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def fingerprints(sources: Iterable[str]) -> list[dict[str, Any]]:
    """Return the name, size and SHA-256 hash of each file.

    Args:
        sources: Files, or folders with files, such as the rounds of a client. A source that does not exist is skipped.
    """
    found: list[dict[str, Any]] = []
    for path in _files(sources):
        if len(found) == MAX_FILES:
            break
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            found.append({"name": str(path), "bytes": path.stat().st_size, "sha256": digest})
        except OSError:
            continue  # The file was deleted or cannot be read any more. The audit itself is not affected.
    return found


def _files(sources: Iterable[str]) -> Iterator[Path]:
    """Yield the named files and the files in the named folders, without hidden files in folders."""
    for source in sources:
        path = Path(source)
        if path.is_dir():
            yield from (each for each in sorted(path.iterdir()) if each.is_file() and not each.name.startswith("."))
        elif path.is_file():
            yield path
