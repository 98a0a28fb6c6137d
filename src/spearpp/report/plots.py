"""Plots as SVG, in the page's own colours, with words for those who cannot see them."""

import html
import math
from collections.abc import Iterable, Sequence

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 60, 16, 16, 44
POINTS = 600
"""Points of a curve at most."""


def spectrum(values: Sequence[float], batch_size: int) -> str:
    """Singular values on a logarithmic scale: those of samples, then noise."""
    positive = [value for value in values if value and value > 0]
    if len(positive) < 2:
        return ""
    logs = [math.log10(value) for value in positive]
    low, high = math.floor(min(logs)), math.ceil(max(logs))
    low = max(low, high - 20)
    frame = _Frame((1, len(logs)), (low, max(high, low + 1)))
    step = max(1, len(logs) // POINTS)
    kept = [i for i in range(len(logs)) if i < 2 * batch_size or i % step == 0]
    dots = [
        f'<circle class="{"signal" if i < batch_size else "noise"}" cx="{frame.x(i + 1):.1f}" '
        f'cy="{frame.y(max(logs[i], low)):.1f}" r="2.2"/>'
        for i in kept
    ]
    every = max(1, math.ceil((high - low) / 6))
    ticks = [(level, f"1e{level:+d}") for level in range(low, high + 1, every)]
    marks = [frame.vertical(batch_size + 0.5, f"{batch_size} samples")] if batch_size < len(logs) else []
    if batch_size < len(positive):
        drop = f"then they drop from {positive[batch_size - 1]:.2g} to {positive[batch_size]:.2g}, which is noise"
    else:
        drop = "no noise is left over"
    words = f"Singular values of the layer's gradient. {batch_size} stand for samples; {drop}."
    return frame.draw("singular value number", "size", words, [*marks, *dots], ticks)


def sparsity(zeros: Sequence[int], neurons: int, batch_size: int) -> str:
    """How many neurons each recovered sample leaves without a gradient, against what chance gives."""
    if not zeros or not neurons:
        return ""
    shares = sorted((count / neurons for count in zeros), reverse=True)
    chance = min(1.0, max(0, batch_size - 1) / neurons)
    frame = _Frame((0, len(shares) + 1), (0.0, 1.0))
    dots = [
        f'<circle class="signal" cx="{frame.x(i + 1):.1f}" cy="{frame.y(share):.1f}" r="2.6"/>'
        for i, share in enumerate(shares)
    ]
    words = (
        f"Share of the {neurons} neurons that have no gradient from each sample: {min(shares):.0%} to "
        f"{max(shares):.0%}. A direction that is no sample gets {chance:.0%} for nothing."
    )
    ticks = [(level / 4, f"{25 * level} %") for level in range(5)]
    line = frame.horizontal(chance, "what any direction has")
    return frame.draw("recovered samples, sparsest first", "silent neurons", words, [line, *dots], ticks)


class _Frame:
    """A coordinate system."""

    def __init__(self, across: tuple[float, float], up: tuple[float, float]) -> None:
        self.across, self.up = across, up

    def x(self, value: float) -> float:
        low, high = self.across
        return LEFT + (value - low) / max(high - low, 1e-12) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.up
        return HEIGHT - BOTTOM - (value - low) / max(high - low, 1e-12) * (HEIGHT - TOP - BOTTOM)

    def vertical(self, value: float, label: str) -> str:
        """A line at a value, with words on whichever side has room."""
        x = self.x(value)
        right = x < WIDTH * 0.6
        text = f'<text x="{x + (6 if right else -6):.1f}" y="{TOP + 12}" text-anchor="{"start" if right else "end"}">'
        lines = f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        return f"{lines}{text}{html.escape(label)}</text>"

    def horizontal(self, value: float, label: str) -> str:
        """The same across."""
        y = self.y(value)
        above = y > TOP + 30
        text = f'<text x="{WIDTH - RIGHT - 4}" y="{y + (-6 if above else 16):.1f}" text-anchor="end">'
        lines = f'<line class="mark" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        return f"{lines}{text}{html.escape(label)}</text>"

    def draw(self, across: str, up: str, words: str, parts: Iterable[str], ticks: Sequence[tuple[float, str]]) -> str:
        """The whole plot."""
        axes = [
            f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>',
            f'<line class="axis" x1="{LEFT}" x2="{LEFT}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>',
            f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">'
            f"{html.escape(across)}</text>",
            f'<text transform="translate(12 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)" text-anchor="middle">'
            f"{html.escape(up)}</text>",
        ]
        for value, label in ticks:
            y = self.y(value)
            axes.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            axes.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{html.escape(label)}</text>')
        low, high = self.across
        below = f'y="{HEIGHT - BOTTOM + 16}" text-anchor="middle"'
        axes += [f'<text x="{self.x(value):.1f}" {below}>{value:g}</text>' for value in (low, high)]
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" class="plot"><title>{html.escape(words)}</title>'
            f"{''.join(axes)}{''.join(parts)}</svg>"
        )
