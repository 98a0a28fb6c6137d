"""Draws the frontier of recovery: the largest batch that is recovered exactly, by layer width.

    python -m benchmarks.plot docs/results/frontier.json docs/results/frontier.svg

Each entry of the JSON file is one measured row: the method (``who``), the layer width m, the batch size b, the number
of batches, and the number of batches that were recovered exactly. A filled marker means that at least 90 % of the
batches were exact, a hollow marker that fewer were.
"""

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from spearpp.plotting import Axis, Point, Series, Size, draw

METHODS = {
    "paper": "#8a8a8a",
    "one layer": "#1f77b4",
    "two layers": "#d1495b",
}
"""Methods as the JSON file names them, with their colour."""
WIDTHS, BATCH_SIZES = (150, 5200), (10, 2600)
"""Ends of the two axes. They enclose all rows of ``docs/results/frontier.json``."""
WIDTH_TICKS, BATCH_SIZE_TICKS = (200, 500, 1000, 2000, 4000), (10, 20, 50, 100, 200, 500, 1000, 2000)
GOOD_SHARE = 0.9
"""Share of batches that must be exact for a row to count as recovered. Design choice."""
FEWEST_BATCHES = 4
"""Rows with fewer batches are not used for the frontier: one lucky batch would move it."""
SPREAD = 9.0
"""Pixels between the markers of two methods at the same width, a little less than the diameter of a marker."""


def frontier(rows: list[dict[str, Any]], who: str) -> dict[int, int]:
    """Return b*(m) by width m: the largest measured batch size of which at least 90 % of the batches were exact.

    Larger batches were not measured, so b* is a lower bound.
    """
    best: dict[int, int] = {}
    for row in rows:
        if row["who"] == who and row["inputs"] == "normalised" and row["batches"] >= FEWEST_BATCHES and _good(row):
            best[row["m"]] = max(best.get(row["m"], 0), row["b"])
    return dict(sorted(best.items()))


def fit(points: dict[int, int]) -> tuple[float, float]:
    """Return c and α of b* = c m^α, fitted to the logarithms by least squares."""
    line = statistics.linear_regression([math.log(m) for m in points], [math.log(b) for b in points.values()])
    return math.exp(line.intercept), line.slope


def picture(rows: list[dict[str, Any]]) -> str:
    """Return the plot as SVG."""
    limit = tuple(Point(m, m / 2) for m in WIDTHS)
    fits, markers = [], []
    for name, colour in METHODS.items():
        best = frontier(rows, name)
        c, power = fit(best)
        ends = tuple(Point(m, c * m**power) for m in (min(best), max(best)))
        fits.append(Series(f"{name}: b* ≥ {c:.2g} m^{power:.2f}", ends, radius=0, colour=colour))
        shown = [row for row in rows if row["who"] == name and row["inputs"] == "normalised"]
        points = tuple(Point(row["m"], row["b"], hollow=not _good(row), note=_note(name, row)) for row in shown)
        markers.append(Series("", points, "none", 5, colour))
    return draw(
        "Largest batch that is recovered exactly, by layer width",
        Axis("m, neurons of the layer", True, *WIDTHS, labels=tuple((tick, str(tick)) for tick in WIDTH_TICKS)),
        Axis("b, samples in the batch", True, *BATCH_SIZES, labels=tuple((t, str(t)) for t in BATCH_SIZE_TICKS)),
        [Series("counting limit, m/2", limit, "dashed", radius=0, colour="#444444"), *fits, *markers],
        note="Filled: at least 90 % of the batches are exact. Hollow: fewer. Lines: fits to the largest filled b.",
        spread=SPREAD,
        size=Size(width=760, height=440),
    )


def _good(row: dict[str, Any]) -> bool:
    return bool(row["exact"] >= GOOD_SHARE * row["batches"])


def _note(name: str, row: dict[str, Any]) -> str:
    return f"{name}, m={row['m']}, b={row['b']}: {row['exact']} of {row['batches']} batches"


def main() -> int:
    source, target = (Path(name) for name in sys.argv[1:3])
    rows = json.loads(source.read_text())
    target.write_text(picture(rows))
    for name in METHODS:
        points = frontier(rows, name)
        c, power = fit(points)
        shares = ", ".join(f"{m}: {b} ({b / m:.3f} m)" for m, b in points.items())
        print(f"{name:<14} b* = {c:.3g} m^{power:.2f}   {shares}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
