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
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import jinja2

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
    """One marker, with an interval bar from ``low`` to ``high`` if both are given."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    hollow: bool = False
    """Whether the marker is an empty circle."""
    note: str = ""
    """Text that is shown when the mouse is over the marker. By default: series name, x and y."""


@dataclass(frozen=True)
class Series:
    """Points of one kind, drawn in one colour, in the order in which the line joins them."""

    name: str
    """Text of the legend entry. A series without a name has no legend entry."""
    points: tuple[Point, ...]
    line: Literal["solid", "dashed", "none"] = "solid"
    radius: float = 4.0
    """Radius of the markers in pixels; 0 draws no markers."""
    colour: str | None = None
    """SVG colour. By default the series takes its colour from ``COLOURS``."""
    css_class: str = ""
    """Class of the markers, for the style sheet of a page."""


@dataclass(frozen=True)
class Axis:
    """One axis of a plot, with its name beside it. Values on a logarithmic axis must be positive."""

    name: str
    logarithmic: bool = False
    least: float | None = None
    """Value at the start of the axis; None takes the smallest value of the data. ``most`` is the value at the end."""
    most: float | None = None
    labels: tuple[tuple[float, str], ...] | None = None
    """Ticks as (value, text) pairs. None chooses round numbers."""
    grid: bool = True
    """Whether to draw a grid line at each tick."""

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
    """Width, height and margins of a plot in pixels. The height does not include the legend."""

    width: int = 720
    height: int = 400
    left: int = 76
    right: int = 20
    top: int = 44
    bottom: int = 56
    embedded: bool = False
    """Whether the plot is part of a page that has its own caption and colours. Such a plot has neither a visible
    heading nor a background, and its legend has room for larger text."""


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
    """Draw a plot and return it as an SVG element. The note is below the legend.

    ``spread`` is the distance in pixels between markers of neighbouring series at the same x. By default it is
    ``INTERVAL_SPREAD`` if a point has an interval bar, and 0 otherwise.
    """
    size = size or Size()
    right, bottom = size.width - size.right, size.height - size.bottom
    points = [point for each in series for point in each.points]
    x_span = x.span([point.x for point in points])
    y_span = y.span([v for point in points for v in (point.y, point.low, point.high) if v is not None])
    x_pixel = _scale(x, *x_span, size.left, right)
    y_pixel = _scale(y, *y_span, bottom, size.top)
    if spread is None:
        spread = INTERVAL_SPREAD if any(point.low is not None for point in points) else 0.0
    marked = [each for each in series if each.radius > 0]
    drawn = []
    for index, each in enumerate(series):
        offset = spread * (marked.index(each) - (len(marked) - 1) / 2) if each.radius else 0.0
        markers = [_marker(point, each.name, x_pixel(point.x) + offset, y_pixel) for point in each.points]
        colour = each.colour or COLOURS[index % len(COLOURS)]
        drawn.append({"series": each, "colour": colour, "markers": markers})
    legend = [each for each, one in zip(drawn, series, strict=True) if one.name]
    line_height = EMBEDDED_LINE_HEIGHT if size.embedded else LEGEND_LINE_HEIGHT
    return _template().render(
        title=title,
        heading_size=min(13.0, (right - size.left) / (0.6 * max(1, len(title)))),  # letters are 0.6 of it wide
        size=size,
        right=right,
        bottom=bottom,
        height=size.height + line_height * (len(legend) + bool(note)),
        x=x,
        y=y,
        x_ticks=[(x_pixel(value), text) for value, text in x.tick_labels(*x_span)],
        y_ticks=[(y_pixel(value), text) for value, text in y.tick_labels(*y_span)],
        reference_lines=[(each, (x_pixel if each.vertical else y_pixel)(each.value)) for each in reference_lines],
        drawn=drawn,
        legend=legend,
        line_height=line_height,
        note=note,
    )


@cache
def _template() -> jinja2.Template:
    """Return the template of a plot. It escapes every text."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, keep_trailing_newline=True)
    environment.filters["pixel"] = "{:.1f}".format
    return environment.from_string(files("spearpp").joinpath("plot.svg").read_text("utf-8"))


def _scale(axis: Axis, low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return the function from a value on the axis to its pixel."""

    def pixel(value: float) -> float:
        if axis.logarithmic:
            share = math.log(max(value, low / 10) / low) / math.log(high / low)
        else:
            share = (value - low) / (high - low)
        return start + min(1 + OVERSHOOT, max(-OVERSHOOT, share)) * (end - start)

    return pixel


def _marker(point: Point, series: str, x: float, y_pixel: Callable[[float], float]) -> dict[str, Any]:
    """Return where a point is drawn, and the text that is shown when the mouse is over it."""
    low, high = (None if end is None else y_pixel(end) for end in (point.low, point.high))
    note = point.note or (f"{series}: {point.x:.6g}, {point.y:.6g}" if series else "")
    return {"x": x, "y": y_pixel(point.y), "low": low, "high": high, "hollow": point.hollow, "note": note}
