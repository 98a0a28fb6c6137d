"""What stops recovery: turn a dial of a defence up until nothing comes back, and see what it costs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from spearpp.errors import OptionError
from spearpp.experiments.cell import Cell, Setting, cells_of
from spearpp.experiments.defence import AXES, CLIP, RATE, Axis, Defence
from spearpp.experiments.intervals import Interval, mean, wilson
from spearpp.experiments.source import Source
from spearpp.experiments.store import Store, Stored
from spearpp.search import Gated, Search

FIRST = 5
"""Values that a dial is looked at first, ends included."""
WITHIN = 3
"""Values in a round that narrows down."""


@dataclass(frozen=True)
class Plan:
    """How a point is measured."""

    data: Source = Source()
    search: Search = Gated(starts=2048)
    witnesses: int = 2
    seeds: int = 20
    """Batches a point."""
    trainings: int = 3
    """Training runs a point, 0 for none."""
    rounds: int = 60
    """Of a training run."""
    train: int = 1000
    test: int = 500
    threshold: float | None = None
    """dB that count as recovered; None for the axis' own."""
    level: float = 0.0
    """Recovery has stopped where at most this share of the batches gives an input away."""

    def __post_init__(self) -> None:
        if self.seeds < 1 or self.trainings < 0 or not 0 <= self.level < 1:
            raise OptionError(
                f"seeds={self.seeds}, trainings={self.trainings}, level={self.level}: at least one seed, and a share"
            )


@dataclass(frozen=True)
class Point:
    """A defence and what was measured of it."""

    defence: Defence
    threshold: float
    any: Interval
    """Share of batches with at least one input over the threshold."""
    whole: Interval
    """Share of batches with every input over it."""
    inputs: float
    """Share of all inputs over it."""
    psnr: float
    """dB, mean over all inputs."""
    seeds: int
    accuracy: Interval | None
    """Of the training run; None where it was not asked for."""
    epsilon: float | None
    """Of the training run; None without noise."""
    commits: frozenset[str]
    devices: frozenset[str]


@dataclass(frozen=True)
class Line:
    """One dial turned, the rest fixed; points from the weakest defence to the strongest."""

    axis: Axis
    points: tuple[Point, ...]
    stop: Point | None
    """The weakest defence from which on nothing came back at any stronger one measured."""
    undefended: Point | None
    """The same without any defence on this dial, where there is such a thing; for the cost in accuracy."""
    plan: Plan


Measure = Callable[[Sequence[Cell]], None]
"""Sees to it that the store holds these cells."""


def bisect(
    axis: Axis, defence: Defence, plan: Plan, store: Store, measure: Measure, *, resolution: float = 1.3
) -> Line:
    """Find where recovery stops: five values over the whole dial, then ever closer around the place.

    It ends when neighbours differ by less than the factor ``resolution``, or by one where numbers are whole.
    """
    values = [axis.weak, *axis.between(axis.weak, axis.strong, FIRST - 2), axis.strong]
    known: dict[float, Point] = {}
    while True:
        new = [value for value in values if value not in known]
        points = evaluate([axis.on(defence, value) for value in new], axis, plan, store, measure)
        known |= dict(zip(new, points, strict=True))
        order = sorted(known, reverse=not axis.rising)
        stop = _stop([known[value] for value in order], plan.level)
        if stop is None or stop == 0:
            break
        weak, strong = order[stop - 1], order[stop]
        values = axis.between(weak, strong, WITHIN)
        if not values or max(strong / weak, weak / strong) < resolution:
            break
    return line(axis, [known[value] for value in order], defence, plan, store, measure)


def sweep(axis: Axis, values: Sequence[float], defence: Defence, plan: Plan, store: Store, measure: Measure) -> Line:
    """Measure the values given."""
    order = sorted(set(values), reverse=not axis.rising)
    points = evaluate([axis.on(defence, value) for value in order], axis, plan, store, measure)
    return line(axis, points, defence, plan, store, measure)


def line(axis: Axis, points: Sequence[Point], defence: Defence, plan: Plan, store: Store, measure: Measure) -> Line:
    """Points in order, with the place where recovery stops and what the undefended network does."""
    stop = _stop(points, plan.level)
    free = replace(defence, **{axis.name: getattr(Defence(), axis.name)})
    defends = axis.name not in ("batch", "width")  # these have no "off"
    undefended = evaluate([free], axis, plan, store, measure)[0] if defends and plan.trainings else None
    return Line(axis, tuple(points), None if stop is None else points[stop], undefended, plan)


def evaluate(defences: Sequence[Defence], axis: Axis, plan: Plan, store: Store, measure: Measure) -> list[Point]:
    """Measure these points, all their cells at once."""
    threshold = axis.threshold if plan.threshold is None else plan.threshold
    attacks = [
        each.attack(data=plan.data, search=plan.search, witnesses=plan.witnesses, threshold=threshold)
        for each in defences
    ]
    trainings = [
        each.training(data=plan.data, rounds=plan.rounds, train=plan.train, test=plan.test) for each in defences
    ]
    wanted = [cell for each in attacks for cell in cells_of(each, plan.seeds)]
    wanted += [cell for each in trainings for cell in _cells(each, plan.trainings)]
    measure(wanted)
    return [
        _point(each, threshold, _held(store, attack, plan.seeds), _held(store, training, plan.trainings), plan)
        for each, attack, training in zip(defences, attacks, trainings, strict=True)
    ]


def sentence(found: Line) -> str:
    """What was found, in words that stand alone."""
    first, axis, plan = found.points[0], found.axis, found.plan
    what = "exact recovery" if first.threshold >= 90 else f"recovery to {first.threshold:g} dB"
    shown = first.defence
    fixed = [f"b={shown.batch}" if axis.name != "batch" else "", f"m={shown.width}" if axis.name != "width" else ""]
    fixed += [f"{each.symbol}={each.of(shown):g}" for each in _turned(shown) if each.name != axis.name]
    fixed += [f"C={CLIP:g}"] if shown.noise and shown.clip is None else []
    fixed += [f"learning rate={RATE:g}"] if axis.name == "steps" and shown.rate is None else []
    where = "at " + ", ".join(each for each in fixed if each)
    if found.stop is None:
        last = found.points[-1]
        return (
            f"{where} {what} does not stop {'up' if axis.rising else 'down'} to {axis.symbol} = "
            f"{axis.of(last.defence):g}: "
            f"{last.any.value:.0%} of {last.seeds} batches still give an input away"
        )
    stop = found.stop
    text = f"{where} {what} stops at {axis.symbol} {axis.sign} {axis.of(stop.defence):g}"
    leaks = f"{round(stop.any.value * stop.seeds)} of {stop.seeds} batches give an input away"
    text += f" ({leaks}, at most {stop.any.high:.0%} at 95 %)"
    if stop.epsilon is not None:
        text += f", ε = {stop.epsilon:.3g} for {plan.rounds} rounds"
    if stop.accuracy is not None and found.undefended is not None and found.undefended.accuracy is not None:
        free = found.undefended.accuracy.value
        cost = 100 * (free - stop.accuracy.value)
        costing = f"costing {cost:.1f} points of accuracy" if cost > 0 else "costing no accuracy"
        text += f", {costing} ({free:.0%} to {stop.accuracy.value:.0%})"
    elif stop.accuracy is not None:
        text += f"; accuracy there {stop.accuracy.value:.0%}"
    return text


def _turned(defence: Defence) -> list[Axis]:
    """The other dials that are not where they defend nothing."""
    plain = Defence()
    return [
        axis
        for axis in AXES.values()
        if axis.name not in ("batch", "width") and getattr(defence, axis.name) != getattr(plain, axis.name)
    ]


def _stop(points: Sequence[Point], level: float) -> int | None:
    """The first place from which on every point is stopped; None if the last is not."""
    place = len(points)
    while place and points[place - 1].any.value <= level:
        place -= 1
    return place if place < len(points) else None


def _cells(setting: Setting, count: int) -> list[Cell]:
    return cells_of(setting, count) if count else []


def _held(store: Store, setting: Setting, count: int) -> list[Stored]:
    return [stored for cell in _cells(setting, count) if (stored := store.get(cell)) is not None]


def _point(defence: Defence, threshold: float, batches: list[Stored], trained: list[Stored], plan: Plan) -> Point:
    if not batches:
        raise OptionError(f"no batch of {defence} could be measured: the errors above say why")
    attacks, runs = [each.result for each in batches], [each.result for each in trained]
    total = sum(int(str(each["b"])) for each in attacks)
    over = [int(str(each["recovered"])) for each in attacks]
    return Point(
        defence=defence,
        threshold=threshold,
        any=wilson(sum(each > 0 for each in over), len(attacks)),
        whole=wilson(sum(bool(each["exact"]) for each in attacks), len(attacks)),
        inputs=sum(over) / total,
        psnr=math.fsum(float(str(each["mean_psnr"])) for each in attacks) / len(attacks),
        seeds=len(attacks),
        accuracy=mean([float(str(each["accuracy"])) for each in runs]).within(0, 1) if runs else None,
        epsilon=defence.epsilon(rounds=plan.rounds, train=plan.train),
        commits=frozenset(each.commit for each in batches + trained),
        devices=frozenset(each.versions.get("device", "") for each in batches + trained) - {""},
    )
