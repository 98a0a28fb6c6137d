"""Line plots as inline SVG: no library, readable in any browser and in Markdown."""

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 400, 76, 44, 20, 56
LEGEND = 18
"""Height of a line of the legend, which stands below, where no data is."""
APART = 4
"""Pixels between marks of the same x, so that one interval does not hide another."""
COLOURS = ("#1f77b4", "#d1495b", "#3a7d44", "#8a5cc2", "#c77d0a", "#555555")


@dataclass(frozen=True)
class Point:
    """A mark, with the ends of its interval where there is one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """Points joined by a line; a dashed one has no marks."""

    name: str
    points: tuple[Point, ...]
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """Its name, and whether it is logarithmic."""

    name: str
    logarithmic: bool = False
    least: float | None = None
    most: float | None = None

    def span(self, values: Sequence[float]) -> tuple[float, float]:
        """From where to where it runs."""
        shown = [value for value in values if value > 0] if self.logarithmic else list(values)
        low = min(shown, default=1.0) if self.least is None else self.least
        high = max(shown, default=1.0) if self.most is None else self.most
        if low == high:
            return (low / 2, high * 2) if self.logarithmic else (low - 0.5, high + 0.5)
        return low, high

    def ticks(self, low: float, high: float) -> list[float]:
        """Round numbers between the ends: powers of ten, or steps of 1, 2 or 5.

        >>> Axis("x").ticks(0, 1)
        [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]
        """
        if self.logarithmic:
            powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            factors = (1,) if math.log10(high / low) > 2 else (1, 2, 5)
            marks = [factor * 10.0**power for power in powers for factor in factors]
            return [mark for mark in marks if low * 0.999 <= mark <= high * 1.001] or [low, high]
        rough = (high - low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
        first = math.ceil(low / step - 1e-9)
        return [step * index for index in range(first, math.floor(high / step + 1e-9) + 1)]


def draw(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """The plot as an SVG element."""
    points = [point for each in series for point in each.points]
    (x_low, x_high), (y_low, y_high) = (
        x.span([point.x for point in points]),
        y.span([v for point in points for v in (point.y, point.low, point.high) if v is not None]),
    )
    across = _scale(x, x_low, x_high, LEFT, WIDTH - RIGHT)
    up = _scale(y, y_low, y_high, HEIGHT - BOTTOM, TOP)
    height = HEIGHT + LEGEND * len(series)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<title>{html.escape(title)}</title><rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-weight="600" font-size="{_fitting(title):.1f}">{html.escape(title)}</text>',
    ]
    for mark in x.ticks(x_low, x_high):
        parts.append(f'<path d="M{across(mark):.1f} {HEIGHT - BOTTOM}V{TOP}" stroke="#e6e6e6"/>')
        parts.append(f'<text x="{across(mark):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{mark:.6g}</text>')
    for mark in y.ticks(y_low, y_high):
        parts.append(f'<path d="M{LEFT} {up(mark):.1f}H{WIDTH - RIGHT}" stroke="#e6e6e6"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{up(mark) + 4:.1f}" text-anchor="end">{mark:.6g}</text>')
    middle, half = LEFT + (WIDTH - LEFT - RIGHT) / 2, TOP + (HEIGHT - TOP - BOTTOM) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 14}" text-anchor="middle">{html.escape(x.name)}</text>')
    turned = f'transform="rotate(-90 16 {half})"'
    parts.append(f'<text x="16" y="{half}" text-anchor="middle" {turned}>{html.escape(y.name)}</text>')
    for index, each in enumerate(series):
        aside = APART * (index - (len(series) - 1) / 2) if any(point.low is not None for point in points) else 0.0
        parts += _series(each, COLOURS[index % len(COLOURS)], across, up, aside)
        parts.append(_legend(each, COLOURS[index % len(COLOURS)], index))
    return "\n".join([*parts, "</svg>", ""])


def _fitting(title: str) -> float:
    """The size at which a bold title fits into its line; letters are about 0.6 of it wide."""
    return min(13.0, (WIDTH - LEFT - RIGHT) / (0.6 * max(1, len(title))))


def _scale(axis: Axis, low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    def place(value: float) -> float:
        if axis.logarithmic:
            value = max(value, low / 10)
            share = math.log(value / low) / math.log(high / low)
        else:
            share = (value - low) / (high - low)
        return start + min(1.02, max(-0.02, share)) * (end - start)

    return place


def _series(
    each: Series, colour: str, across: Callable[[float], float], up: Callable[[float], float], aside: float
) -> list[str]:
    places = [(across(point.x) + aside, up(point.y)) for point in each.points]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places) if places else ""
    dash = ' stroke-dasharray="6 5"' if each.dashed else ""
    drawn = [f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>'] if places else []
    if each.dashed:
        return drawn
    for point, (x, y) in zip(each.points, places, strict=True):
        if point.low is not None and point.high is not None:
            drawn.append(f'<path d="M{x:.1f} {up(point.low):.1f}V{up(point.high):.1f}" stroke="{colour}"/>')
        label = html.escape(f"{each.name}: {point.x:.6g}, {point.y:.6g}")
        drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{label}</title></circle>')
    return drawn


def _legend(each: Series, colour: str, index: int) -> str:
    y, dash = HEIGHT + LEGEND * index + 6, ' stroke-dasharray="6 5"' if each.dashed else ""
    line = f'<path d="M{LEFT} {y - 4}h22" stroke="{colour}" stroke-width="1.6"{dash}/>'
    return line + f'<text x="{LEFT + 30}" y="{y}" fill="{colour}">{html.escape(each.name)}</text>'
