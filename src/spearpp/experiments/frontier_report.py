"""The frontier as text and pictures: a plot, a table, a sentence."""

import html
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from spearpp.experiments.frontier import Line, Point, sentence
from spearpp.experiments.intervals import Interval
from spearpp.experiments.plot import Axis, Series, draw
from spearpp.experiments.plot import Point as Mark
from spearpp.experiments.rendering import document, share
from spearpp.experiments.version import code_version

COLUMNS = (
    *("b", "m", "dial", "an input comes back (95 %)", "all inputs (95 %)", "of all inputs"),
    *("mean PSNR", "batches", "ε", "accuracy (95 %)"),
)


def lines(found: Line) -> list[tuple[str, ...]]:
    """One tuple of texts a point, in the order of COLUMNS."""
    return [_line(found, point) for point in found.points]


def headline(found: Line) -> str:
    """The sentence without what it rests on."""
    return sentence(found).split(" (")[0].split(":")[0]


def plot(found: Line) -> str:
    """Share of batches that give an input away and accuracy along the dial, as SVG."""
    axis = found.axis
    series = [
        Series("batches that give an input away", _marks(found, "any")),
        Series("batches that come back whole", _marks(found, "whole")),
    ]
    if any(point.accuracy is not None for point in found.points):
        series.append(Series("accuracy of the training run", _marks(found, "accuracy")))
    return draw(headline(found), Axis(axis.symbol, logarithmic=True), Axis("share", least=0, most=1), series)


def boundary(found: Sequence[Line], along: str) -> str | None:
    """Where recovery stops, over another dial; None with fewer than two places."""
    places = [
        Mark(float(getattr(each.points[0].defence, along)), each.axis.of(each.stop.defence))
        for each in found
        if each.stop is not None
    ]
    if len(places) < 2:
        return None
    symbol = found[0].axis.symbol
    title = f"Where recovery stops: {symbol} over {along}"
    return draw(
        title, Axis(along, logarithmic=True), Axis(symbol, logarithmic=True), [Series("stops here", tuple(places))]
    )


def markdown(found: Sequence[Line]) -> str:
    """A Markdown page."""
    parts = ["# What stops recovery"]
    for each in found:
        rows = [(*COLUMNS[:2], each.axis.symbol, *COLUMNS[3:]), tuple("---" for _ in COLUMNS), *lines(each)]
        parts += [f"**{sentence(each)}.**", "\n".join("| " + " | ".join(row) + " |" for row in rows)]
    return "\n\n".join([*parts, *notes(found)]) + "\n"


def page(found: Sequence[Line], extra: Sequence[str] = ()) -> str:
    """An HTML page that needs nothing beside it; ``extra`` are more plots."""
    body = ""
    for each in found:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in (*COLUMNS[:2], each.axis.symbol, *COLUMNS[3:]))
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in lines(each)
        )
        body += f"<p><b>{html.escape(sentence(each))}.</b></p>{plot(each)}<table><tr>{head}</tr>{rows}</table>"
    body += "".join(extra) + "".join(f"<p>{html.escape(note)}</p>" for note in notes(found))
    return document("What stops recovery", body)


def notes(found: Sequence[Line]) -> list[str]:
    """What a reader must know of how it was measured."""
    plan = found[0].plan
    said = (
        f"Data: {plan.data.kind}. {plan.seeds} batches a point; search with at most {plan.search.starts:,} starts, "
        f"{plan.witnesses} witness{'es' if plan.witnesses == 2 else ''}. Nothing found is not safe: it is what this "
        "search found with these starts."
    )
    if plan.trainings:
        said += (
            f" Accuracy: {plan.trainings} runs of {plan.rounds} rounds on {plan.train:,} samples, tested on "
            f"{plan.test:,}; ε is of such a run."
        )
    where = f", on {', '.join(_all(found, 'devices'))}" if _all(found, "devices") else ""
    return [said, f"Measured by {code_version()}, commit {', '.join(_all(found, 'commits'))}{where}."]


def as_json(found: Sequence[Line]) -> dict[str, Any]:
    """Everything as plain values, one entry a line."""
    return {
        "code": code_version(),
        "commits": _all(found, "commits"),
        "devices": _all(found, "devices"),
        "lines": [
            {
                "axis": each.axis.name,
                "sentence": sentence(each),
                "stop": None if each.stop is None else each.axis.of(each.stop.defence),
                "undefended_accuracy": _plain(each.undefended.accuracy) if each.undefended else None,
                "data": each.plan.data.kind,
                "starts": each.plan.search.starts,
                "witnesses": each.plan.witnesses,
                "points": [
                    {
                        "defence": asdict(point.defence),
                        "threshold": point.threshold,
                        "any": _plain(point.any),
                        "whole": _plain(point.whole),
                        "inputs": point.inputs,
                        "psnr": point.psnr,
                        "seeds": point.seeds,
                        "accuracy": _plain(point.accuracy),
                        "epsilon": point.epsilon,
                    }
                    for point in each.points
                ],
            }
            for each in found
        ],
    }


def _all(found: Sequence[Line], what: str) -> list[str]:
    """Commits or devices of all points."""
    return sorted(frozenset[str]().union(*(getattr(point, what) for each in found for point in each.points)))


def _line(found: Line, point: Point) -> tuple[str, ...]:
    defence = point.defence
    return (
        str(defence.batch * defence.clients),
        str(defence.width),
        f"{found.axis.of(defence):g}",
        share(point.any),
        share(point.whole),
        f"{100 * point.inputs:.0f} %",
        f"{point.psnr:.1f}",
        str(point.seeds),
        "-" if point.epsilon is None else f"{point.epsilon:.3g}",
        "-" if point.accuracy is None else _accuracy(point.accuracy),
    )


def _accuracy(interval: Interval) -> str:
    return f"{100 * interval.value:.1f} %" if math.isnan(interval.low) else share(interval)


def _marks(found: Line, what: str) -> tuple[Mark, ...]:
    marks = []
    for point in found.points:
        interval: Interval | None = getattr(point, what)
        if interval is not None:
            known = not math.isnan(interval.low)
            low, high = (interval.low, interval.high) if known else (None, None)
            marks.append(Mark(found.axis.of(point.defence), interval.value, low, high))
    return tuple(marks)


def _plain(interval: Interval | None) -> dict[str, float | None] | None:
    if interval is None:
        return None
    return {name: None if math.isnan(value) else value for name, value in asdict(interval).items()}
