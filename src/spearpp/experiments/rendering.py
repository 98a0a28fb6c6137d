"""Renders the tables and figures of experiments: for the console, as Markdown, HTML, SVG plots and PNG pictures."""

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from spearpp.experiments.attack import pixels_of
from spearpp.experiments.intervals import Interval
from spearpp.experiments.reproduce import Reproduction, Result
from spearpp.experiments.store import Store
from spearpp.experiments.table import Table
from spearpp.pictures import data_uri, guess_shape, png
from spearpp.plotting import Axis, Point, Series, draw
from spearpp.report.html import template
from spearpp.types import Float, Tensor

Cells = tuple[tuple[str, str], ...]
"""One row of a table: the name of each column with its text. All rows of a table have the same columns."""
IMAGES_PER_LINE = 21
"""Images in a line of a contact sheet. The 210 images of Figure 1 fill ten lines."""


@dataclass(frozen=True)
class Figure:
    """A plot as SVG or a picture as PNG, with the name of its file."""

    file: str
    content: str | bytes
    caption: str = ""

    @property
    def source(self) -> str:
        """The picture as a data URI, or an empty string for a plot."""
        return "" if isinstance(self.content, str) else data_uri(self.content)


@dataclass(frozen=True)
class Section:
    """A table, with a sentence and a plot above it."""

    rows: Sequence[Cells]
    ours: Collection[int] = ()
    """Indices of the rows to highlight."""
    sentence: str = ""
    plot: Figure | None = None


@dataclass(frozen=True)
class Page:
    """What is written about an experiment: tables, then figures, then notes."""

    title: str
    sections: Sequence[Section]
    figures: Sequence[Figure]
    notes: Sequence[str]

    def markdown(self) -> str:
        """Return the sentences, tables and notes in Markdown."""
        parts = [f"# {self.title}"]
        for each in self.sections:
            parts += [f"**{each.sentence}**"] if each.sentence else []
            parts.append(markdown_table(each.rows))
        return "\n\n".join([*parts, *self.notes]) + "\n"

    def html(self) -> str:
        """Return one self-contained HTML page."""
        return template("experiment.html").render(page=self)


def _notes(reproduction: Reproduction) -> list[str]:
    """Return the notes below the table: threshold, data, code version, device, and what is missing."""
    table = reproduction.table
    thresholds = ", ".join(f"{each:g}" for each in sorted({row.setting.threshold for row in table.rows}))
    texts = [
        f"{table.reference}. Accuracy: share of batches with a mean PSNR above {thresholds} dB. "
        "Batches with all inputs: share of batches in which every input is above this threshold. "
        "Median: the number of starts used, the median over the batches. Seconds: the median over the batches.",
        f"Data: {reproduction.data}. The paper uses CIFAR-10, 100 batches and 1,000,000 starts. "
        f"Measured with spearpp {reproduction.code}, commit {', '.join(reproduction.commits)}"
        + (f", on {', '.join(reproduction.devices)}." if reproduction.devices else "."),
    ]
    if reproduction.data != "cifar10":
        texts.append("These are not the paper's images: use --data cifar10 to compare with the paper's numbers.")
    if table.left_out:
        texts.append(f"This run does not measure {table.left_out} rows of the paper.")
    missing = sum(each.wanted - each.batches for each in reproduction.results)
    if missing:
        batches = "batch is" if missing == 1 else "batches are"
        texts.append(f"{missing} {batches} not measured yet: run the same command again to continue.")
    for name in dict.fromkeys(each.row.name for each in reproduction.results) if table.growth else ():
        factor = _growth_factor(reproduction, name)
        if factor is not None:
            texts.append(f"{name}: the median number of draws or starts grows by a factor of {factor:.2f} per sample.")
    if reproduction.stale:
        texts.append(f"The store has {reproduction.stale} batches of other code versions, which are not used.")
    return texts


def page(reproduction: Reproduction, figures: Sequence[Figure] = ()) -> Page:
    """Return the page of a table, with figures below the table."""
    ours = [index for index, result in enumerate(reproduction.results) if result.row.ours]
    title = f"{reproduction.table.name}: {reproduction.table.title}"
    return Page(title, [Section([_line(each) for each in reproduction.results], ours)], figures, _notes(reproduction))


def markdown_table(rows: Sequence[Cells]) -> str:
    """Return a table in Markdown.

    >>> print(markdown_table([(("b", "20"), ("m", "200"))]))
    | b | m |
    | --- | --- |
    | 20 | 200 |
    """
    names = [name for name, _ in rows[0]]
    texts = [[text for _, text in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in (names, ["---"] * len(names), *texts))


def share(interval: Interval | None) -> str:
    """Return a share and its interval in %, or "-" for None.

    >>> share(Interval(0.5, 0.31, 0.69))
    '50 % (31 to 69)'
    """
    if interval is None:
        return "-"
    return f"{100 * interval.value:.0f} % ({100 * interval.low:.0f} to {100 * interval.high:.0f})"


def _line(each: Result) -> Cells:
    setting, claim = each.row.setting, each.row.claim
    psnr = "-" if each.psnr is None else f"{each.psnr.value:.1f}"
    if each.psnr is not None and not math.isnan(each.psnr.low):
        psnr += f" ({each.psnr.low:.1f} to {each.psnr.high:.1f})"
    if each.with_masks is not None:
        psnr += f"; with true patterns {each.with_masks:.1f}"
    return (
        ("method", each.row.name + (f", {each.row.note}" if each.row.note else "")),
        ("b", str(setting.b)),
        ("m", str(setting.m)),
        ("paper: accuracy", f"{claim.accuracy:g} %" if claim else "-"),
        ("paper: PSNR", f"{claim.psnr:.1f}" if claim else "-"),
        ("accuracy (95 %)", share(each.accuracy)),
        ("batches with all inputs", "-" if each.exact is None else f"{100 * each.exact.value:.0f} %"),
        ("PSNR (95 %)", psnr),
        ("certified (wrong)", f"{each.certified} of {each.inputs} ({each.wrong})" if each.batches else "-"),
        ("batches", f"{each.batches} of {each.wanted}"),
        ("starts: at most", f"{setting.search.starts:,}"),
        ("median", "-" if each.median_starts is None else f"{each.median_starts:,.0f}"),
        ("seconds", "-" if each.median_seconds is None else f"{each.median_seconds:.2f}"),
    )


def pictures(table: Table, store: Store) -> list[Figure]:
    """Draw, for each row, the stored batch with the most recovered inputs. Originals are above recovered inputs."""
    drawn = []
    for row in table.rows:
        with_images = [each for each in store.batches(row.setting, table.batches) if each.result.get("images")]
        if not with_images:
            continue
        best = max(with_images, key=lambda each: each.result["recovered"])
        originals, recovered = pixels_of(best.result["images"], row.setting.b)
        shape = guess_shape(originals.shape[1])
        if shape is None or shape[0] != 3:
            continue  # the inputs are not colour images
        sheet = contact_sheet(originals, recovered, shape)
        b, m = row.setting.b, row.setting.m
        caption = (
            f"{row.name}, b={b}, m={m}, seed {best.seed}: {best.result['recovered']} of {b} inputs above "
            f"{row.setting.threshold:g} dB, mean {best.result['mean_psnr']:.1f} dB; originals above recovered inputs"
        )
        method = "gated" if row.ours else "paper"
        content = png(sheet.reshape(-1), (3, sheet.shape[1], sheet.shape[2]))
        drawn.append(Figure(f"{table.name}-{method}-b{b}-m{m}.png", content, caption))
    return drawn


def contact_sheet(
    originals: Float[Tensor, "b n"], recovered: Float[Tensor, "b n"], shape: tuple[int, int, int]
) -> Float[Tensor, "3 height width"]:
    """Arrange the images in lines of 21. Each original has its recovered input below it."""
    pairs = torch.cat([originals.reshape(-1, *shape), recovered.reshape(-1, *shape)], dim=2).clamp(0, 1)
    framed = torch.nn.functional.pad(pairs, (1, 1, 1, 3), value=1.0)
    lines = [torch.cat(list(part), dim=2) for part in framed.split(IMAGES_PER_LINE)]
    width = max(line.shape[2] for line in lines)
    return torch.cat([torch.nn.functional.pad(line, (0, width - line.shape[2]), value=1.0) for line in lines], dim=1)


def growth(reproduction: Reproduction) -> list[Figure]:
    """Plot the medians of the work and of the time until the whole batch was recovered, by batch size."""
    done = [each for each in reproduction.results if each.batches and each.median_starts and each.median_seconds]
    sizes = sorted({each.row.setting.b for each in done})
    expected = tuple(Point(b, 2 ** (b - 1) * sum(1 / k for k in range(1, b + 1))) for b in sizes)
    theory = Series("expected draws of SPEAR, 2^(b-1) (1 + 1/2 + … + 1/b)", expected, "dashed", radius=0)
    x = Axis("b, samples in the batch")
    starts = draw(
        "Draws (SPEAR) or starts until the whole batch is recovered, median",
        x,
        Axis("draws or starts", logarithmic=True),
        [theory, *_by_method(done, lambda each: each.median_starts or 0.0)],
    )
    seconds = draw(
        "Seconds until the whole batch is recovered, median",
        x,
        Axis("seconds", logarithmic=True),
        _by_method(done, lambda each: each.median_seconds or 0.0),
    )
    name = reproduction.table.name
    return [Figure(f"{name}-starts.svg", starts), Figure(f"{name}-seconds.svg", seconds)]


def _growth_factor(reproduction: Reproduction, method: str) -> float | None:
    """Fit the factor by which the median number of draws or starts grows with each sample in the batch.

    The fit is one of least squares to log₂ of the medians. It needs at least two rows of the method.
    """
    done = [each for each in reproduction.results if each.row.name == method and each.median_starts]
    if len(done) < 2:
        return None
    x = [float(each.row.setting.b) for each in done]
    y = [math.log2(each.median_starts or 1.0) for each in done]
    return float(2 ** statistics.linear_regression(x, y).slope)


def _by_method(done: list[Result], value: Callable[[Result], float]) -> list[Series]:
    points: dict[str, list[Point]] = {}
    for each in done:
        points.setdefault(each.row.name, []).append(Point(each.row.setting.b, value(each)))
    return [Series(name, tuple(sorted(found, key=lambda point: point.x))) for name, found in points.items()]
