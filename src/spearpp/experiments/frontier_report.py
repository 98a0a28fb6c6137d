"""Renders frontiers: a sentence, a table and a plot for each, and JSON."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from spearpp.auditing.document import plain
from spearpp.experiments.cell import code_version
from spearpp.experiments.defence import LAYERS_USED
from spearpp.experiments.frontier import Line, Point, sentence
from spearpp.experiments.intervals import Interval
from spearpp.experiments.rendering import Cells, Figure, Page, Section, share
from spearpp.experiments.training import Training
from spearpp.plotting import Axis, ReferenceLine, Series, draw
from spearpp.plotting import Point as Marker


def lines(found: Line) -> list[Cells]:
    """Return one row of a table for every point. The point without the defence comes first."""
    baseline = [] if found.undefended is None or found.undefended in found.points else [found.undefended]
    return [_line(found, point) for point in (*baseline, *found.points)]


def headline(found: Line) -> str:
    """Return the sentence without its evidence in parentheses."""
    return sentence(found).split(" (")[0].split(":")[0]


def _plot(found: Line) -> str:
    """Plot the shares of batches that leak and the accuracy over the parameter, as SVG."""
    axis = found.axis
    series = [
        Series("batches that leak an input", _markers(found, "any")),
        Series("batches that are recovered completely", _markers(found, "whole")),
    ]
    if any(point.accuracy is not None for point in found.points):
        series.append(Series("accuracy of the training run", _markers(found, "accuracy")))
    baseline = None if found.undefended is None else found.undefended.accuracy
    marks = [] if baseline is None else [ReferenceLine(baseline.value, "accuracy without this defence")]
    x, y = Axis(axis.symbol, logarithmic=True), Axis("share", least=0, most=1)
    return draw(headline(found), x, y, series, reference_lines=marks)


def _boundary(found: Sequence[Line], along: str) -> str | None:
    """Plot the value at which recovery stops over a second parameter, as SVG; None if fewer than two lines stop."""
    stops = [
        Marker(float(getattr(each.points[0].defence, along)), each.axis.of(each.stop.defence))
        for each in found
        if each.stop is not None
    ]
    if len(stops) < 2:
        return None
    symbol = found[0].axis.symbol
    x, y = Axis(along, logarithmic=True), Axis(symbol, logarithmic=True)
    return draw(f"Where recovery stops: {symbol} over {along}", x, y, [Series("recovery stops", tuple(stops))])


def page(found: Sequence[Line], name: str, second_axis: str | None = None) -> Page:
    """Return the page of all frontiers. ``name`` is that of its files, without an ending.

    If several frontiers were measured for values of a second axis, a further plot shows where recovery stops over it.
    """
    sections = []
    for index, each in enumerate(found):
        file = f"{name}-{index}.svg" if len(found) > 1 else f"{name}.svg"
        sections.append(Section(lines(each), sentence=f"{sentence(each)}.", plot=Figure(file, _plot(each))))
    below = _boundary(found, second_axis) if second_axis else None
    return Page("What stops recovery", sections, [Figure(f"{name}.svg", below)] if below else [], _notes(found))


def _notes(found: Sequence[Line]) -> list[str]:
    """Return the notes: data, search, training runs, code version and devices."""
    plan = found[0].plan
    text = (
        f"Data: {plan.data.kind}. {plan.seeds} batches for each point. The search uses at most {plan.search.starts:,} "
        "starts and the gradients of two layers. "
        "A defence is not proven safe if nothing was recovered: a stronger search may recover more."
    )
    if plan.trainings:
        text += f" Accuracy: {plan.trainings} training runs of {plan.rounds} rounds on {Training.train:,} samples, "
        text += f"tested on {Training.test:,} samples. ε is the privacy budget of one training run."
    if any(point.defence.rounds for each in found for point in each.points):
        text += " Rounds: a client with the same samples in every round and one hidden layer; ε is composed over the "
        text += "rounds that are inverted together."
    where = f", on {', '.join(_all(found, 'devices'))}" if _all(found, "devices") else ""
    return [text, f"Measured with spearpp {code_version()}, commit {', '.join(_all(found, 'commits'))}{where}."]


def as_json(found: Sequence[Line]) -> Any:
    """Return all frontiers as JSON values."""
    content = {
        "code": code_version(),
        "commits": _all(found, "commits"),
        "devices": _all(found, "devices"),
        "lines": [
            {
                "axis": each.axis.name,
                "sentence": sentence(each),
                "stop": None if each.stop is None else each.axis.of(each.stop.defence),
                "undefended_accuracy": asdict(each.undefended)["accuracy"] if each.undefended else None,
                "data": each.plan.data.kind,
                "starts": each.plan.search.starts,
                "layers_used": LAYERS_USED,
                "points": [
                    {name: value for name, value in asdict(point).items() if name not in ("commits", "devices")}
                    for point in each.points
                ],
            }
            for each in found
        ],
    }
    return plain(content)


def _all(found: Sequence[Line], what: str) -> list[str]:
    """Return the commits or the devices of all points."""
    return sorted(frozenset[str]().union(*(getattr(point, what) for each in found for point in each.points)))


def _line(found: Line, point: Point) -> Cells:
    defence, accuracy = point.defence, share(point.accuracy)
    if point.accuracy is not None and math.isnan(point.accuracy.low):
        accuracy = f"{100 * point.accuracy.value:.1f} %"
    return (
        ("b", str(defence.batch * defence.clients)),
        ("m", str(defence.width)),
        (found.axis.symbol, "none" if point is found.undefended else f"{found.axis.of(defence):g}"),
        ("batches with an input recovered (95 %)", share(point.any)),
        ("batches with all inputs recovered (95 %)", share(point.whole)),
        ("inputs recovered", f"{100 * point.inputs:.0f} %"),
        ("mean PSNR", f"{point.psnr:.1f}"),
        ("batches", str(point.seeds)),
        ("ε", "-" if point.epsilon is None else f"{point.epsilon:.3g}"),
        ("accuracy (95 %)", accuracy),
    )


def _markers(found: Line, what: str) -> tuple[Marker, ...]:
    markers = []
    for point in found.points:
        interval: Interval | None = getattr(point, what)
        if interval is not None:
            known = not math.isnan(interval.low)
            low, high = (interval.low, interval.high) if known else (None, None)
            markers.append(Marker(found.axis.of(point.defence), interval.value, low, high))
    return tuple(markers)
