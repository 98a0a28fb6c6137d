"""The paper's tables as declarative files: what to measure, and what the paper got."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, Literal

from spearpp.errors import OptionError
from spearpp.experiments.attack import Attack
from spearpp.experiments.codec import decode
from spearpp.experiments.source import Source
from spearpp.search import Gated, Search

TABLES = ("table1", "table2", "table3", "table4", "figure1", "spear")
Scale = Literal["paper", "small"]
Method = Literal["paper", "gated", "both"]
GATED_NAME = "gated (ours)"


@dataclass(frozen=True)
class Claim:
    """What the paper reports."""

    psnr: float
    """dB, mean over its batches."""
    accuracy: float
    """% of its batches."""


@dataclass(frozen=True)
class Row:
    """One row of a table and the setting that measures it."""

    name: str
    """Of the method."""
    note: str
    """What else is special, "" for nothing."""
    setting: Attack
    claim: Claim | None
    ours: bool = False
    """Whether this is the gated search, which the paper does not have."""


@dataclass(frozen=True)
class Table:
    """A table of the paper, ready to measure."""

    name: str
    title: str
    reference: str
    rows: tuple[Row, ...]
    batches: int
    left_out: int
    """Rows that this scale leaves out."""
    picture: bool = False
    growth: bool = False


def load(
    name: str,
    *,
    method: Method = "both",
    scale: Scale = "paper",
    data: Source | None = None,
    batches: int | None = None,
    starts: int | Mapping[int, int] | None = None,
    widths: Sequence[int] = (),
) -> Table:
    """Read one of the files in this package and cut it to what was asked for.

    ``starts`` is for the paper's searches, one number or one for each width (0 for all others); None is what the
    file says, and the gated search keeps its own. ``widths`` are the m to measure, all if there are none.

    >>> table = load("table3", method="paper")
    >>> [(row.setting.b, row.setting.m, row.claim.accuracy) for row in table.rows]
    [(20, 200, 75), (150, 4000, 88)]
    """
    if name not in TABLES:
        raise OptionError(f"{name}: the paper's experiments are {', '.join(TABLES)}")
    if method not in ("paper", "gated", "both") or scale not in ("paper", "small"):
        raise OptionError(f"method={method}, scale={scale}: paper, gated or both; paper or small")
    read = tomllib.loads((files(__package__) / "tables" / f"{name}.toml").read_text(encoding="utf-8"))
    chosen = read | (read["small"] if scale == "small" else {})
    batches = chosen["batches"] if batches is None else batches
    budget: dict[int, int] = {0: chosen["starts"]}
    if starts is not None:
        budget.update(starts if isinstance(starts, Mapping) else {0: starts})
    if batches < 1 or min(budget.values()) < 1:
        raise OptionError(f"batches={batches}, starts={starts}: at least one of each")
    rows: list[Row] = []
    kept = [each for each in read["rows"] if _fits(each, scale, chosen) and (not widths or each["m"] in widths)]
    if not kept:
        there = sorted({each["m"] for each in read["rows"] if _fits(each, scale, chosen)})
        raise OptionError(f"{name} has no row of width {', '.join(map(str, widths))}: it has {there}")
    for each in kept:
        searches = read["methods"][each["method"]]
        theirs = replace(decode(searches["search"]), starts=budget.get(each["m"], budget[0]))
        if method != "gated":
            rows.append(_row(each, searches["name"], theirs, read, data))
        if method != "paper":
            rows.append(_row(each, GATED_NAME, Gated(), read, data))
    return Table(
        name=name,
        title=read["title"],
        reference=read["paper"],
        rows=tuple(_once(rows)),
        batches=batches,
        left_out=len([each for each in read["rows"] if each.get("only") != "small"]) - len(kept),
        picture=read.get("picture", False),
        growth=read.get("growth", False),
    )


def _fits(row: Mapping[str, Any], scale: Scale, chosen: Mapping[str, Any]) -> bool:
    if scale == "small":
        return bool(row["m"] <= chosen["widest"])
    return row.get("only") != "small"


def _row(each: Mapping[str, Any], name: str, search: Search, read: Mapping[str, Any], data: Source | None) -> Row:
    ours = isinstance(search, Gated)
    client = {"client": decode(each["client"])} if "client" in each else {}
    setting = Attack(
        b=each["b"],
        m=each["m"],
        search=search,
        data=data or Source(),
        threshold=read["threshold"],
        bound=each.get("bound", False),
        keep_images=read.get("picture", False),
        **client,
    )
    claim = Claim(**each["paper"]) if "paper" in each else None
    return Row(name, each.get("note", ""), setting, claim, ours)


def _once(rows: list[Row]) -> list[Row]:
    """Our search stands once for each setting, beside the best that the paper has for it."""
    best: dict[Attack, Row] = {}
    for row in rows:
        if row.ours:
            held = best.setdefault(row.setting, row)
            if held.claim and row.claim and row.claim.accuracy > held.claim.accuracy:
                best[row.setting] = row
    return [row for row in rows if not row.ours or best[row.setting] is row]
