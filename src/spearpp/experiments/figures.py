"""Figures of a table: the recovered batches, and plots of how the work grows with the batch size."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from spearpp.experiments.attack import pixels_of
from spearpp.experiments.cell import cells_of
from spearpp.experiments.reproduce import Reproduction, Result
from spearpp.experiments.store import Store
from spearpp.experiments.table import Table
from spearpp.pictures import png
from spearpp.plotting import Axis, Point, Series, draw
from spearpp.types import Float, Tensor

IMAGES_PER_LINE = 21
"""Images in a line of a contact sheet. The 210 images of Figure 1 fill ten lines."""


@dataclass(frozen=True)
class Picture:
    """A recovered batch as a PNG file."""

    name: str
    """File name without its extension."""
    caption: str
    content: bytes


def pictures(table: Table, store: Store) -> list[Picture]:
    """Draw, for each row, the stored batch with the most recovered inputs. Originals are above recovered inputs."""
    drawn = []
    for row in table.rows:
        cells = cells_of(row.setting, table.batches)
        with_images = [found for cell in cells if (found := store.get(cell)) is not None and found.result.get("images")]
        if not with_images:
            continue
        best = max(with_images, key=lambda each: each.result["recovered"])
        originals, recovered = pixels_of(best.result["images"], row.setting.b)
        shape = (3, row.setting.data.size, row.setting.data.size)
        if originals.shape[1] != math.prod(shape):
            continue  # the inputs are not colour images
        sheet = contact_sheet(originals, recovered, shape)
        b, m = row.setting.b, row.setting.m
        caption = (
            f"{row.name}, b={b}, m={m}, seed {best.seed}: {best.result['recovered']} of {b} inputs above "
            f"{row.setting.threshold:g} dB, mean {best.result['mean_psnr']:.1f} dB; originals above recovered inputs"
        )
        method = "gated" if row.ours else "paper"
        content = png(sheet.reshape(-1), (3, sheet.shape[1], sheet.shape[2]))
        drawn.append(Picture(f"{table.name}-{method}-b{b}-m{m}", caption, content))
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


def growth(reproduction: Reproduction) -> dict[str, str]:
    """Plot the work until the whole batch was recovered, by batch size.

    Returns:
        Two SVG plots: ``starts`` (draws of SPEAR or starts of the other searches) and ``seconds``, both medians.
    """
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
    return {"starts": starts, "seconds": seconds}


def doubling(reproduction: Reproduction, method: str) -> float | None:
    """Return the factor by which the median number of draws or starts grows with each sample in the batch.

    The factor is a least-squares fit to log₂ of the medians. It is None if the method has fewer than two rows.
    """
    done = [each for each in reproduction.results if each.row.name == method and each.median_starts]
    if len(done) < 2:
        return None
    x = [float(each.row.setting.b) for each in done]
    y = [math.log2(each.median_starts or 1.0) for each in done]
    return float(2 ** statistics.linear_regression(x, y).slope)


def _by_method(done: list[Result], value: Callable[[Result], float]) -> list[Series]:
    names = list(dict.fromkeys(each.row.name for each in done))
    return [
        Series(
            name,
            tuple(
                Point(each.row.setting.b, value(each))
                for each in sorted(done, key=lambda each: each.row.setting.b)
                if each.row.name == name
            ),
        )
        for name in names
    ]
