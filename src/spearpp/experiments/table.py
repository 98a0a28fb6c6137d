"""The tables of the paper as TOML files: the settings to measure, and the numbers that the paper reports."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, Literal, get_args

from spearpp.errors import OptionError
from spearpp.experiments.attack import Attack
from spearpp.experiments.cell import decode
from spearpp.experiments.source import Source
from spearpp.search import Gated, Search

TABLES = ("table1", "table2", "table3", "table4", "figure1", "spear")
"""Names of the TOML files."""
Scale = Literal["paper", "small"]
Method = Literal["paper", "gated", "both"]
GATED_NAME = "gated (ours)"


@dataclass(frozen=True)
class Claim:
    """Numbers that the paper reports for a row."""

    psnr: float
    """Mean PSNR over the paper's batches, in dB."""
    accuracy: float
    """Share of the paper's batches with a mean PSNR above the threshold, in %."""


@dataclass(frozen=True)
class Row:
    """One row of a table: the name of the method, and the setting to measure."""

    name: str
    note: str
    """Other properties of the setting, such as the client; "" if there are none."""
    setting: Attack
    claim: Claim | None
    """Numbers of the paper; None if the paper has no such row."""
    ours: bool = False
    """Whether the row uses the gated search, which is not in the paper."""


@dataclass(frozen=True)
class Table:
    """A table of the paper, with all settings to measure."""

    name: str
    title: str
    reference: str
    rows: tuple[Row, ...]
    batches: int
    left_out: int
    """Number of rows of the paper that are not measured at this scale."""
    picture: bool = False
    """Whether to draw the recovered batches."""
    growth: bool = False
    """Whether to plot how the work grows with the batch size."""


def load(
    name: str,
    *,
    method: Method = "both",
    scale: Scale = "paper",
    data: Source | None = None,
    batches: int | None = None,
    starts: Mapping[int, int] | None = None,
    widths: Sequence[int] = (),
) -> Table:
    """Load a table.

    Args:
        name: one of ``TABLES``.
        method: which searches to measure: those of the paper, the gated search, or both.
        scale: "paper" for all rows, or "small" for a few batches of the narrow layers.
        data: data set; None takes photographs.
        batches: number of batches for each row; None takes the number in the file.
        starts: number of starts of the paper's searches, by layer width. The key 0 stands for all other widths. None
            takes the number in the file. The gated search always uses its own default.
        widths: layer widths m to measure; empty takes all.

    Raises:
        OptionError: if an argument is not valid, or if no row matches.

    >>> table = load("table3", method="paper")
    >>> [(row.setting.b, row.setting.m, row.claim.accuracy) for row in table.rows]
    [(20, 200, 75), (150, 4000, 88)]
    """
    if name not in TABLES:
        raise OptionError(f"unknown experiment {name}: the paper's experiments are {', '.join(TABLES)}")
    if method not in get_args(Method) or scale not in get_args(Scale):
        expected = f"one of {', '.join(get_args(Method))}, and one of {', '.join(get_args(Scale))}"
        raise OptionError(f"method={method}, scale={scale}: expected {expected}")
    read = tomllib.loads((files(__package__) / "tables" / f"{name}.toml").read_text(encoding="utf-8"))
    chosen = read | (read["small"] if scale == "small" else {})
    batches = chosen["batches"] if batches is None else batches
    budget: dict[int, int] = {0: chosen["starts"], **(starts or {})}
    if batches < 1 or min(budget.values()) < 1:
        raise OptionError(f"batches={batches}, starts={starts}: both must be at least 1")
    fitting = [each for each in read["rows"] if _fits(each, scale, chosen)]
    kept = [each for each in fitting if not widths or each["m"] in widths]
    if not kept:
        available = sorted({each["m"] for each in fitting})
        raise OptionError(f"{name} has no row of width {', '.join(map(str, widths))}: it has {available}")
    rows = [row for each in kept for row in _rows(each, method, budget, read, data)]
    return Table(
        name=name,
        title=read["title"],
        reference=read["paper"],
        rows=tuple(_without_repeated_gated_rows(rows)),
        batches=batches,
        left_out=len([each for each in read["rows"] if each.get("only") != "small"]) - len(kept),
        picture=read.get("picture", False),
        growth=read.get("growth", False),
    )


def parse_starts(text: str | None) -> dict[int, int]:
    """Parse a command-line argument: a number of starts, or one number per width.

    >>> parse_starts("65536"), parse_starts("200:1000000,4000:20000")
    ({0: 65536}, {200: 1000000, 4000: 20000})
    """
    if text is None:
        return {}
    try:
        pairs = (each.split(":") for each in (text if ":" in text else f"0:{text}").split(","))
        return {int(width): int(count) for width, count in pairs}
    except ValueError as error:
        expected = "expected a number, or one per width as in 200:1000000,4000:20000"
        raise OptionError(f"--starts {text}: {expected}") from error


def _fits(row: Mapping[str, Any], scale: Scale, chosen: Mapping[str, Any]) -> bool:
    if scale == "small":
        return bool(row["m"] <= chosen["widest"])
    return row.get("only") != "small"


def _rows(
    each: Mapping[str, Any], method: Method, budget: Mapping[int, int], read: Mapping[str, Any], data: Source | None
) -> Iterator[Row]:
    """Yield the row of the paper's search and the row of the gated search for one entry of a file."""
    described = read["methods"][each["method"]]
    searches: dict[str, Search] = {}
    if method != "gated":
        search = decode(described["search"])
        searches[described["name"]] = replace(search, starts=budget.get(each["m"], budget[0]))
    if method != "paper":
        searches[GATED_NAME] = Gated()
    options: dict[str, Any] = {"data": data or Source(), "threshold": read["threshold"]}
    options |= {"bound": each.get("bound", False), "keep_images": read.get("picture", False)}
    options |= {"client": decode(each["client"])} if "client" in each else {}
    claim = Claim(**each["paper"]) if "paper" in each else None
    for name, search in searches.items():
        setting = Attack(each["b"], each["m"], search, **options)
        yield Row(name, each.get("note", ""), setting, claim, ours=name == GATED_NAME)


def _without_repeated_gated_rows(rows: list[Row]) -> list[Row]:
    """Keep one row of the gated search for each setting: the one beside the paper's best row for this setting."""
    best: dict[Attack, Row] = {}
    for row in rows:
        if row.ours:
            known = best.setdefault(row.setting, row)
            if known.claim and row.claim and row.claim.accuracy > known.claim.accuracy:
                best[row.setting] = row
    return [row for row in rows if not row.ours or best[row.setting] is row]
