"""Line and scatter plots as SVG text, without a plotting library.

A plot has two axes with ticks and a grid, series of points joined by lines, interval bars, reference lines and a
legend. Every element has SVG attributes for its colours, so the plot can be shown alone. Every element also has a
class (``axis``, ``grid``, ``mark`` or the class of its series), so the style sheet of a page can override the colours.

>>> series = Series("recovered", (Point(1, 0.9), Point(2, 0.5)))
>>> plot = draw("Share of recovered inputs", Axis("noise"), Axis("share", least=0, most=1), [series])
>>> plot.startswith("<svg"), plot.count("<circle")
(True, 2)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

COLOURS = ("#1f77b4", "#d1495b", "#3a7d44", "#8a5cc2", "#c77d0a", "#555555")
"""Colours of the series, in order. They are distinguishable on a white background."""
LEGEND_LINE_HEIGHT = 18
"""Pixels from one line of the legend to the next. Text of 13 pixels needs about 1.4 times its size."""
EMBEDDED_LINE_HEIGHT = 28
"""The same for a plot inside a page, whose style sheet sets text of 20 pixels on narrow screens."""
INTERVAL_SPREAD = 4.0
"""Pixels between the interval bars of neighbouring series at the same x, so that no bar hides another. Design choice:
half the width of a marker."""
OVERSHOOT = 0.02
"""Points outside the axes are drawn at this share of the axis length beyond its end, so that they stay visible."""


@dataclass(frozen=True)
class Point:
    """One marker, with an optional interval bar.

    Args:
        x: value on the x axis.
        y: value on the y axis.
        low: lower end of the interval bar, or None for no bar.
        high: upper end of the interval bar, or None for no bar.
        hollow: whether the marker is an empty circle.
        note: text that is shown when the mouse is over the marker. By default: series name, x and y.
    """

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    hollow: bool = False
    note: str = ""


@dataclass(frozen=True)
class Series:
    """Points of one kind, drawn in one colour.

    Args:
        name: text of the legend entry. A series without a name has no legend entry.
        points: the points, in the order in which the line joins them.
        line: how the points are joined.
        radius: radius of the markers in pixels; 0 draws no markers.
        colour: SVG colour. By default the series takes its colour from ``COLOURS``.
        css_class: class of the markers, for the style sheet of a page.
    """

    name: str
    points: tuple[Point, ...]
    line: Literal["solid", "dashed", "none"] = "solid"
    radius: float = 4.0
    colour: str | None = None
    css_class: str = ""


@dataclass(frozen=True)
class Axis:
    """One axis of a plot.

    Args:
        name: text beside the axis.
        logarithmic: whether the scale is logarithmic. Values must then be positive.
        least: value at the start of the axis; None takes the smallest value of the data.
        most: value at the end of the axis; None takes the largest value of the data.
        labels: ticks as (value, text) pairs. None chooses round numbers.
        grid: whether to draw a grid line at each tick.
    """

    name: str
    logarithmic: bool = False
    least: float | None = None
    most: float | None = None
    labels: tuple[tuple[float, str], ...] | None = None
    grid: bool = True

    def span(self, values: Sequence[float]) -> tuple[float, float]:
        """Return the first and the last value of the axis. They always differ.

        >>> Axis("x", least=0).span([1.0, 4.0])
        (0, 4.0)
        """
        shown = [value for value in values if value > 0] if self.logarithmic else list(values)
        low = min(shown, default=1.0) if self.least is None else self.least
        high = max(shown, default=1.0) if self.most is None else self.most
        if low == high:
            return (low / 2, high * 2) if self.logarithmic else (low - 0.5, high + 0.5)
        return low, high

    def tick_labels(self, low: float, high: float) -> Sequence[tuple[float, str]]:
        """Return the ticks as (value, text) pairs: ``labels``, or round numbers if there are none."""
        return [(tick, f"{tick:.6g}") for tick in self.ticks(low, high)] if self.labels is None else self.labels

    def ticks(self, low: float, high: float) -> list[float]:
        """Return round numbers between the ends: powers of ten, or multiples of 1, 2 or 5 times a power of ten.

        >>> Axis("x").ticks(0, 1)
        [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]
        """
        if self.logarithmic:
            powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            factors = (1,) if math.log10(high / low) > 2 else (1, 2, 5)
            values = [factor * 10.0**power for power in powers for factor in factors]
            return [value for value in values if low * 0.999 <= value <= high * 1.001] or [low, high]
        rough = (high - low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
        first = math.ceil(low / step - 1e-9)
        return [step * index for index in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class ReferenceLine:
    """A dashed line across the whole plot at one value, with a text beside it."""

    value: float
    label: str
    vertical: bool = False


@dataclass(frozen=True)
class Size:
    """Width, height and margins of a plot in pixels. The height does not include the legend.

    Args:
        embedded: whether the plot is part of a page that has its own caption and colours. Such a plot has neither a
            visible heading nor a background, and its legend has room for larger text.
    """

    width: int = 720
    height: int = 400
    left: int = 76
    right: int = 20
    top: int = 44
    bottom: int = 56
    embedded: bool = False

    @property
    def inner_right(self) -> int:
        """x of the right end of the x axis."""
        return self.width - self.right

    @property
    def inner_bottom(self) -> int:
        """y of the lower end of the y axis."""
        return self.height - self.bottom


def draw(
    title: str,
    x: Axis,
    y: Axis,
    series: Sequence[Series],
    *,
    reference_lines: Sequence[ReferenceLine] = (),
    note: str = "",
    spread: float | None = None,
    size: Size | None = None,
) -> str:
    """Draw a plot and return it as an SVG element.

    Args:
        title: heading of the plot, and its description for screen readers.
        x: the x axis.
        y: the y axis.
        series: what to draw.
        reference_lines: lines across the whole plot.
        note: text below the legend.
        spread: pixels between markers of neighbouring series at the same x. By default ``INTERVAL_SPREAD`` if a point
            has an interval bar, and 0 otherwise.
        size: size and margins.
    """
    size = size or Size()
    points = [point for each in series for point in each.points]
    x_span = x.span([point.x for point in points])
    y_span = y.span([v for point in points for v in (point.y, point.low, point.high) if v is not None])
    x_pixel = _scale(x, *x_span, size.left, size.inner_right)
    y_pixel = _scale(y, *y_span, size.inner_bottom, size.top)
    if spread is None:
        spread = INTERVAL_SPREAD if any(point.low is not None for point in points) else 0.0
    x_ticks = [(x_pixel(value), text) for value, text in x.tick_labels(*x_span)]
    y_ticks = [(y_pixel(value), text) for value, text in y.tick_labels(*y_span)]
    parts = _axes(x, y, x_ticks, y_ticks, size)
    for line in reference_lines:
        parts.append(_reference_line(line, x_pixel(line.value) if line.vertical else y_pixel(line.value), size))
    coloured = [(each, each.colour or COLOURS[index % len(COLOURS)]) for index, each in enumerate(series)]
    marked = [each for each in series if each.radius > 0]
    for each, colour in coloured:
        offset = spread * (marked.index(each) - (len(marked) - 1) / 2) if each.radius else 0.0
        parts += _series(each, colour, x_pixel, y_pixel, offset)
    legend = [pair for pair in coloured if pair[0].name]
    line_height = EMBEDDED_LINE_HEIGHT if size.embedded else LEGEND_LINE_HEIGHT
    for index, (each, colour) in enumerate(legend):
        parts.append(_legend_entry(each, colour, size.left, size.height + line_height * index + 6))
    if note:
        y_note = size.height + line_height * len(legend) + 6
        parts.append(f'<text x="{size.left}" y="{y_note}" fill="#666666">{escape(note)}</text>')
    height = size.height + line_height * (len(legend) + bool(note))
    return "\n".join([*_start(title, size, height), *parts, "</svg>", ""])


def _start(title: str, size: Size, height: int) -> list[str]:
    """Return the start of the SVG element, with a background and a heading unless the plot is part of a page."""
    start = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size.width} {height}" role="img" class="plot" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{escape(title)}</title>",
    ]
    background = f'<rect width="{size.width}" height="{height}" fill="#ffffff"/>'
    return start if size.embedded else [*start, background, _heading(title, size)]


def _heading(title: str, size: Size) -> str:
    """Return the heading in a font size at which it fits: bold letters are about 0.6 of the font size wide."""
    font_size = min(13.0, (size.inner_right - size.left) / (0.6 * max(1, len(title))))
    return f'<text x="{size.left}" y="20" font-weight="600" font-size="{font_size:.1f}">{escape(title)}</text>'


def _scale(axis: Axis, low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return the function from a value on the axis to its pixel."""

    def pixel(value: float) -> float:
        if axis.logarithmic:
            share = math.log(max(value, low / 10) / low) / math.log(high / low)
        else:
            share = (value - low) / (high - low)
        return start + min(1 + OVERSHOOT, max(-OVERSHOOT, share)) * (end - start)

    return pixel


_Ticks = Sequence[tuple[float, str]]
"""Pixel and text of each tick."""


def _axes(x: Axis, y: Axis, x_ticks: _Ticks, y_ticks: _Ticks, size: Size) -> list[str]:
    """Return the grid, the tick labels, the axis lines and the axis names."""
    left, right, top, bottom = size.left, size.inner_right, size.top, size.inner_bottom
    parts = []
    for place, text in x_ticks:
        parts += [f'<path d="M{place:.1f} {bottom}V{top}" stroke="#e6e6e6" class="grid"/>'] if x.grid else []
        parts.append(f'<text x="{place:.1f}" y="{bottom + 18}" text-anchor="middle">{escape(text)}</text>')
    for place, text in y_ticks:
        parts += [f'<path d="M{left} {place:.1f}H{right}" stroke="#e6e6e6" class="grid"/>'] if y.grid else []
        parts.append(f'<text x="{left - 8}" y="{place + 4:.1f}" text-anchor="end">{escape(text)}</text>')
    middle, half = (left + right) / 2, (top + bottom) / 2
    return [
        *parts,
        f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="#8a8a8a" class="axis"/>',
        f'<text x="{middle}" y="{size.height - 12}" text-anchor="middle">{escape(x.name)}</text>',
        f'<text x="16" y="{half}" text-anchor="middle" transform="rotate(-90 16 {half})">{escape(y.name)}</text>',
    ]


def _reference_line(line: ReferenceLine, place: float, size: Size) -> str:
    """Return a reference line at a pixel. Its text is on the side that has room."""
    if line.vertical:
        side = 1 if place < size.width * 0.6 else -1
        path = f"M{place:.1f} {size.top}V{size.inner_bottom}"
        where = f'x="{place + 6 * side:.1f}" y="{size.top + 12}" text-anchor="{"start" if side > 0 else "end"}"'
    else:
        path = f"M{size.left} {place:.1f}H{size.inner_right}"
        below = place + (-6 if place > size.top + 30 else 16)
        where = f'x="{size.left + 6}" y="{below:.1f}"'
    drawn = f'<path d="{path}" stroke="#a3122a" stroke-dasharray="4 3" class="mark"/>'
    return f"{drawn}<text {where}>{escape(line.label)}</text>"


def _series(
    series: Series, colour: str, x_pixel: Callable[[float], float], y_pixel: Callable[[float], float], offset: float
) -> list[str]:
    """Return the line, the interval bars and the markers of a series, all ``offset`` pixels to the right."""
    places = [(x_pixel(point.x) + offset, y_pixel(point.y)) for point in series.points]
    parts = []
    if places and series.line != "none":
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.6"{_dash(series)}/>')
    for point, (x, y) in zip(series.points, places, strict=True) if series.radius else ():
        if point.low is not None and point.high is not None:
            parts.append(f'<path d="M{x:.1f} {y_pixel(point.low):.1f}V{y_pixel(point.high):.1f}" stroke="{colour}"/>')
        note = point.note or (f"{series.name}: {point.x:.6g}, {point.y:.6g}" if series.name else "")
        circle = _marker(series, colour, x, y, hollow=point.hollow)
        parts.append(f"{circle}><title>{escape(note)}</title></circle>" if note else f"{circle}/>")
    return parts


def _marker(series: Series, colour: str, x: float, y: float, *, hollow: bool) -> str:
    """Return the start of the element of one marker."""
    css_class = f' class="{series.css_class}"' if series.css_class else ""
    fill = f'fill="#ffffff" stroke="{colour}" stroke-width="1.6"' if hollow else f'fill="{colour}"'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{series.radius:g}" {fill}{css_class}'


def _legend_entry(series: Series, colour: str, left: int, y: int) -> str:
    """Return one line of the legend: a sample of the line, or of the markers without a line, and the name."""
    sample = f'<path d="M{left} {y - 4}h22" stroke="{colour}" stroke-width="1.6"{_dash(series)}/>'
    if series.line == "none":
        sample = _marker(series, colour, left + 11, y - 4, hollow=any(point.hollow for point in series.points)) + "/>"
    return f'{sample}<text x="{left + 30}" y="{y}" fill="{colour}">{escape(series.name)}</text>'


def _dash(series: Series) -> str:
    return ' stroke-dasharray="6 5"' if series.line == "dashed" else ""
