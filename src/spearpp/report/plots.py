"""The plots of the report page, as SVG in the page's colours, with a description for screen readers."""

import math
from collections.abc import Sequence

from spearpp.auditing.result import History
from spearpp.plotting import Axis, Point, ReferenceLine, Series, Size, draw

SIZE = Size(width=640, height=282, left=92, right=24, top=16, bottom=66, embedded=True)
"""Size of a plot. The margins have room for the tick labels in the font size of narrow screens, 20 pixels."""
MOST_POINTS = 600
"""Largest number of points drawn for a spectrum, in addition to twice the batch size. A plot is about 520 pixels wide
inside, so more points would lie on top of each other and only enlarge the file."""
MOST_DECADES = 20
"""Largest range of the logarithmic axis, in powers of ten. float64 has 16 digits: smaller values are rounding."""


def spectrum(values: Sequence[float], batch_size: int) -> str:
    """Plot the singular values of a gradient, largest first, on a logarithmic scale.

    The first ``batch_size`` values belong to samples, and the others are noise. If fewer than two values are positive,
    the result is empty.
    """
    positive = [value for value in values if value and value > 0]
    count = len(positive)
    if count < 2:
        return ""
    high = math.ceil(math.log10(max(positive)))
    low = max(math.floor(math.log10(min(positive))), high - MOST_DECADES)
    stride = max(1, count // MOST_POINTS)
    points = [Point(index, max(value, 10.0**low)) for index, value in enumerate(positive, 1)]
    signal = tuple(points[:batch_size])
    noise = tuple(each for each in points[batch_size:] if each.x <= 2 * batch_size or (each.x - 1) % stride == 0)
    if batch_size < count:
        drop = f"then they drop from {positive[batch_size - 1]:.2g} to {positive[batch_size]:.2g}, which is noise"
    else:
        drop = "no singular value is noise"
    tick_every = max(1, math.ceil((high - low) / 6))
    ticks = tuple((10.0**level, f"1e{level:+d}") for level in range(low, high + 1, tick_every))
    ends = ((1.0, "1"), (float(count), str(count)))
    marks = [ReferenceLine(batch_size + 0.5, f"{batch_size} samples", vertical=True)] if batch_size < count else []
    return draw(
        f"Singular values of the layer's gradient. {batch_size} belong to samples; {drop}.",
        Axis("singular value number", least=1, most=count, labels=ends, grid=False),
        Axis("size", logarithmic=True, least=10.0**low, most=10.0 ** max(high, low + 1), labels=ticks),
        [Series("", signal, "none", 2.2, css_class="signal"), Series("", noise, "none", 2.2, css_class="noise")],
        reference_lines=marks,
        size=SIZE,
    )


def sparsity(zeros: Sequence[int], neurons: int, batch_size: int) -> str:
    """Plot the share of neurons that receive no gradient from each candidate. ``zeros`` is their number.

    Any direction can have b - 1 zeros by chance for a batch of b samples, and the plot marks this level. Without
    candidates, the result is empty.
    """
    if not zeros or not neurons:
        return ""
    shares = sorted((count / neurons for count in zeros), reverse=True)
    chance = min(1.0, max(0, batch_size - 1) / neurons)
    ends = ((1.0, "1"), (float(len(shares)), str(len(shares)))) if len(shares) > 1 else ((1.0, "1"),)
    return draw(
        f"Share of the {neurons} neurons that receive no gradient from each candidate: {min(shares):.0%} to "
        f"{max(shares):.0%}. A direction that is not a sample reaches {chance:.0%} by chance.",
        Axis("candidate inputs, sparsest first", least=0.5, most=len(shares) + 0.5, labels=ends, grid=False),
        Axis("silent neurons", least=0, most=1, labels=tuple((level / 4, f"{25 * level} %") for level in range(5))),
        [Series("", tuple(Point(i + 1, s) for i, s in enumerate(shares)), "none", 2.6, css_class="signal")],
        reference_lines=[ReferenceLine(chance, "reached by chance")],
        size=SIZE,
    )


def rounds(history: History) -> str:
    """Plot how many inputs are known after each round, and how many each round gives alone.

    If there is only one round or nothing was recovered, the result is empty.
    """
    count = len(history.rounds)
    known = [history.known_after(index) for index in range(count)]
    if count < 2 or not known[-1]:
        return ""
    most = max(known[-1], history.samples or 0, history.recovered_alone)
    every = max(1, math.ceil(count / 12))
    ticks = tuple((float(number), str(number)) for number in range(1, count + 1, every))
    levels = tuple((round(most * part / 4), str(round(most * part / 4))) for part in range(5))
    together = tuple(Point(index + 1, each) for index, each in enumerate(known))
    alone = tuple(Point(index + 1, each.recovered) for index, each in enumerate(history.rounds))
    return draw(
        f"Inputs known after each of {count} rounds: {known[0]} after the first, {known[-1]} after the last. "
        f"A single round gives at most {history.recovered_alone}.",
        Axis("round", least=1, most=count, labels=ticks, grid=False),
        Axis("recovered inputs", least=0, most=most, labels=levels),
        [
            Series("rounds so far together", together, "solid", 3.2, css_class="signal"),
            Series("this round alone", alone, "dashed", 3.2, css_class="noise"),
        ],
        size=SIZE,
    )
