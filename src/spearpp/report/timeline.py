"""The audits of a federation over time: a list in ``timeline.jsonl``, and the page ``timeline.html``."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from spearpp.plotting import Axis, Point, Series, draw
from spearpp.report.html import template
from spearpp.report.plots import SIZE
from spearpp.update.files import write_whole
from spearpp.update.source import reading

ENTRIES, PAGE = "timeline.jsonl", "timeline.html"
MAX_SHOWN = 500
"""Largest number of audits on the page, the latest ones. Design choice: the plot is 520 pixels wide inside, and a
browser opens such a table quickly."""
MAX_BYTES = 2**26
"""Bytes read from the end of the list. Design choice: 64 MiB hold far more audits than the page shows."""
MAX_TICKS = 8
"""Labels on the axis of audits. Design choice: they do not overlap on narrow screens."""
WHOLE_TICKS_BELOW = 5
"""Largest value below which every whole number gets a tick. Derived: from 5 on, the chosen ticks are whole numbers."""


@dataclass(frozen=True)
class Entry:
    """One audit."""

    date: str
    """Time at which the audit ended, in UTC."""
    name: str
    """Name of the audit: a file, or a round and a client."""
    verdict: str | None
    """LEAKS, NOT_FOUND or NOT_APPLICABLE. None if the update was not audited."""
    summary: str
    recovered: int = 0
    samples: int = 0
    """Number of samples in the update. 0 if it is unknown."""
    fitting: int = 0
    seconds: float = 0.0
    report: str | None = None
    """Path of the folder of the report, relative to the folder of the timeline."""
    accepted: bool = False
    """Whether every leak of the update was accepted in ``spearpp.toml``."""


def add(folder: Path, entries: Iterable[Entry]) -> Path:
    """Append audits to the list in a folder of reports, render the page again, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(asdict(each)) + "\n" for each in entries)
    with (folder / ENTRIES).open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                lines = "\n" + lines  # An earlier run was killed while it wrote.
        file.write(lines.encode())
    return render(folder)


def contains(folder: Path, entry: Entry) -> bool:
    """Return whether the list in a folder has an audit with the same name and the same summary."""
    if not (folder / ENTRIES).exists():
        return False
    return any((each.name, each.summary) == (entry.name, entry.summary) for each in read(folder)[0])


def read(folder: Path) -> tuple[list[Entry], int]:
    """Return the audits in the list of a folder, oldest first, and the number of lines that cannot be read."""
    path = folder / ENTRIES
    with reading(path), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MAX_BYTES))
        lines = file.read(MAX_BYTES).splitlines()
    found = [entry for line in lines if (entry := _entry(line)) is not None]
    return found, len(lines) - len(found)


def _entry(line: bytes) -> Entry | None:
    """Return the audit in a line, or None if the line is damaged."""
    try:
        content = json.loads(line)
        entry = Entry(**content)
    except (ValueError, TypeError, RecursionError):
        return None
    numbers = (entry.recovered, entry.samples, entry.fitting)
    valid = all(type(each) is int and 0 <= each < 2**31 for each in numbers)
    valid &= isinstance(entry.date, str) and isinstance(entry.name, str) and isinstance(entry.summary, str)
    valid &= isinstance(entry.seconds, int | float) and isinstance(entry.report, str | None)
    return entry if valid and entry.verdict in ("LEAKS", "NOT_FOUND", "NOT_APPLICABLE", None) else None


def render(folder: Path) -> Path:
    """Render the page from the list in a folder, and return its path."""
    entries, damaged = read(folder)
    shown = entries[-MAX_SHOWN:]
    first = len(entries) - len(shown) + 1
    leaking = sum(each.verdict == "LEAKS" for each in entries)
    page = template("timeline.html").render(
        plot=plot(shown, first),
        rows=list(enumerate(shown, first))[::-1],
        count=len(entries),
        leaking=leaking,
        accepted=sum(each.accepted for each in entries),
        failed=sum(each.verdict is None for each in entries),
        damaged=damaged,
        list_name=ENTRIES,
    )
    write_whole(folder / PAGE, page.encode())
    return folder / PAGE


def plot(entries: list[Entry], first: int = 1) -> str:
    """Plot how many samples each update contained, and how many inputs were recovered from it, in order of time.

    The audits are in this order, and the first one has the number ``first``. Without an audit, the result is empty.
    """
    if not entries:
        return ""
    numbers = range(first, first + len(entries))
    most = max(1, *(max(each.samples, each.recovered, each.fitting) for each in entries))
    every = -(-len(entries) // MAX_TICKS)
    levels = None if most >= WHOLE_TICKS_BELOW else tuple((float(level), str(level)) for level in range(most + 1))

    def series(name: str, values: list[int | None], css_class: str, hollow: bool) -> Series:
        points = tuple(
            Point(number, value, hollow=hollow, note=f"{each.name}: {each.summary}"[:300])
            for number, each, value in zip(numbers, entries, values, strict=True)
            if each.verdict is not None and value is not None
        )
        return Series(name if points else "", points, "none", 5.5 if hollow else 3.2, css_class=css_class)

    recovered = sum(each.verdict == "LEAKS" for each in entries)
    return draw(
        f"Samples in each of {len(entries)} audited updates, and inputs recovered from them. {recovered} updates leak.",
        Axis(
            "audit, in order of time",
            least=first - 0.5,
            most=first + len(entries) - 0.5,
            labels=tuple((float(number), str(number)) for number in numbers[::every]),
            grid=False,
        ),
        Axis("number", least=0, most=most, labels=levels),
        [
            series("samples in the update", [each.samples or None for each in entries], "batch", True),
            series("inputs that fit without proof", [each.fitting or None for each in entries], "unproved", True),
            series("recovered inputs", [each.recovered or None for each in entries], "leak", False),
            series("nothing recovered", [None if each.recovered else 0 for each in entries], "noise", False),
        ],
        size=SIZE,
    )
