"""Draws the frontier: how large a batch comes back, by width.

    python -m benchmarks.plot docs/results/frontier.json docs/results/frontier.svg

Each row of the file is one measured row: who, m, b, batches and how many of them were exact. Filled marks have
90 % or more, hollow ones less.
"""

import json
import math
import sys
from pathlib import Path

COLOURS = {"paper": "#8a8a8a", "one witness": "#1f77b4", "two witnesses": "#d1495b"}
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 480, 64, 28, 24, 56
M_RANGE, B_RANGE = (150, 5200), (10, 2600)
GOOD = 0.9
FEWEST = 4
"""Batches a row needs to count."""
TICKS_M, TICKS_B = (200, 500, 1000, 2000, 4000), (10, 20, 50, 100, 200, 500, 1000, 2000)


def place(m: float, b: float) -> tuple[float, float]:
    """Where a point goes; both axes are logarithmic."""
    across = math.log(m / M_RANGE[0]) / math.log(M_RANGE[1] / M_RANGE[0])
    up = math.log(b / B_RANGE[0]) / math.log(B_RANGE[1] / B_RANGE[0])
    return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)


def frontier(rows: list[dict[str, object]], who: str) -> dict[int, int]:
    """b*(m): the largest batch size that was measured with 90 % of the batches exact, a lower bound."""
    best: dict[int, int] = {}
    for row in rows:
        m, b, batches, exact = (int(str(row[name])) for name in ("m", "b", "batches", "exact"))
        if row["who"] == who and row["inputs"] == "normalised" and batches >= FEWEST and exact >= GOOD * batches:
            best[m] = max(best.get(m, 0), b)
    return dict(sorted(best.items()))


def fit(points: dict[int, int]) -> tuple[float, float]:
    """c and α of b* = c m^α, by least squares of the logarithms."""
    x, y = [math.log(m) for m in points], [math.log(b) for b in points.values()]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)
    return math.exp(mean_y - slope * mean_x), slope


def draw(rows: list[dict[str, object]]) -> str:
    """The picture, as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="system-ui, sans-serif" font-size="13">',
        "<title>Largest batch that comes back exactly, by width of the layer</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for m in TICKS_M:
        x, low = place(m, B_RANGE[0])
        parts.append(f'<path d="M{x:.1f} {low:.1f}V{TOP}" stroke="#e6e6e6"/>')
        parts.append(f'<text x="{x:.1f}" y="{low + 20:.1f}" text-anchor="middle">{m}</text>')
    for b in TICKS_B:
        x, y = place(M_RANGE[0], b)
        parts.append(f'<path d="M{x:.1f} {y:.1f}H{WIDTH - RIGHT}" stroke="#e6e6e6"/>')
        parts.append(f'<text x="{x - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{b}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">m, neurons of the layer</text>')
    parts.append(f'<text x="18" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 18 {HEIGHT / 2})">b</text>')
    ends = [place(m, m / 2) for m in M_RANGE]
    parts.append(
        f'<path d="M{ends[0][0]:.1f} {ends[0][1]:.1f}L{ends[1][0]:.1f} {ends[1][1]:.1f}" stroke="#444" '
        'stroke-dasharray="6 5" fill="none"/>'
    )
    legend = [("counting limit, m/2", "#444", "")]
    for aside, (who, colour) in zip((-9, 0, 9), COLOURS.items(), strict=True):
        points = frontier(rows, who)
        c, power = fit(points)
        low, high = min(points), max(points)
        (x0, y0), (x1, y1) = place(low, c * low**power), place(high, c * high**power)
        parts.append(f'<path d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}" stroke="{colour}" stroke-opacity="0.45"/>')
        legend.append((f"{who}: b* ≥ {c:.2g} m^{power:.2f}", colour, "mark"))
        for row in rows:
            if row["who"] == who and row["inputs"] == "normalised":
                good = int(str(row["exact"])) >= GOOD * int(str(row["batches"]))
                x, y = place(float(str(row["m"])), float(str(row["b"])))
                parts.append(
                    f'<circle cx="{x + aside:.1f}" cy="{y:.1f}" r="5" stroke="{colour}" stroke-width="1.6" '
                    f'fill="{colour if good else "#ffffff"}"><title>{who}, m={row["m"]}, b={row["b"]}: '
                    f"{row['exact']} of {row['batches']} batches</title></circle>"
                )
    for index, (text, colour, mark) in enumerate(legend):
        y = TOP + 14 + 20 * index
        line = f'<path d="M{LEFT + 12} {y - 4}h22" stroke="{colour}" stroke-dasharray="{"" if mark else "6 5"}"/>'
        parts.append(line + f'<text x="{LEFT + 42}" y="{y}" fill="{colour}">{text}</text>')
    note = "filled: 90 % or more of the batches exact; hollow: fewer. Lines: fits to the largest b measured so far"
    corner = f'x="{WIDTH - RIGHT - 6}" y="{HEIGHT - BOTTOM - 10}"'
    parts.append(f'<text {corner} text-anchor="end" fill="#666">{note}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    source, target = (Path(name) for name in sys.argv[1:3])
    rows = json.loads(source.read_text())
    target.write_text(draw(rows))
    for who in COLOURS:
        points = frontier(rows, who)
        c, power = fit(points)
        shares = ", ".join(f"{m}: {b} ({b / m:.3f} m)" for m, b in points.items())
        print(f"{who:<14} b* = {c:.3g} m^{power:.2f}   {shares}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
