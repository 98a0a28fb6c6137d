"""Finds the frontier: the weakest defence that stops recovery, and its cost in accuracy."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from spearpp.errors import OptionError
from spearpp.experiments.cell import Cell, cells_of
from spearpp.experiments.defence import AXES, CLIP, RATE, Axis, Defence
from spearpp.experiments.intervals import Interval, mean, wilson
from spearpp.experiments.source import Source
from spearpp.experiments.store import Store, Stored
from spearpp.experiments.training import Training
from spearpp.metrics import PAPER_PSNR
from spearpp.search import Gated, Search

FIRST_VALUES = 5
"""Number of values in the first round, over the whole range of a parameter. Design choice: one a decade for noise."""
VALUES_PER_ROUND = 3
"""Number of new values in each later round.

Three values leave a quarter of the interval and run in parallel; one value would leave half of it.
"""
RESOLUTION = 1.3
"""Factor between two neighbouring values at which a search ends. Design choice: closer values matter to nobody."""


@dataclass(frozen=True)
class Plan:
    """How each point of a frontier is measured."""

    data: Source = Source()
    search: Search = Gated(starts=2048)
    seeds: int = 20
    """Number of batches."""
    trainings: int = 3
    """Number of training runs; 0 measures no accuracy."""
    rounds: int = 60
    """Number of rounds of a training run."""
    threshold: float | None = None
    """PSNR in dB above which an input counts as recovered; None takes the threshold of the axis."""
    level: float = 0.0
    """A defence stops recovery if at most this share of the batches leaks an input."""


@dataclass(frozen=True)
class Point:
    """A defence with its measured numbers, and the Git commits and devices that measured it."""

    defence: Defence
    threshold: float
    any: Interval
    """Share of batches with at least one input above the threshold."""
    whole: Interval
    """Share of batches in which every input is above the threshold."""
    inputs: float
    """Share of all inputs that are above the threshold."""
    psnr: float
    """Mean PSNR over all inputs, in dB."""
    seeds: int
    accuracy: Interval | None
    """Accuracy of the training runs; None if not measured."""
    epsilon: float | None
    """ε of a training run, or of the rounds that are inverted together; None without noise."""
    commits: frozenset[str]
    devices: frozenset[str]


@dataclass(frozen=True)
class Line:
    """Measured points along one parameter, all others fixed, from the weakest defence to the strongest."""

    axis: Axis
    points: tuple[Point, ...]
    stop: Point | None
    """The weakest measured defence that stops recovery, as all stronger ones do; None if the strongest does not."""
    undefended: Point | None
    """The point without this defence, to compute the cost in accuracy.

    None for batch size, width and rounds, which have no value without effect, and if no accuracy is measured.
    """
    plan: Plan


Measure = Callable[[Sequence[Cell]], None]
"""Measures those of the given cells that the store does not hold."""


def measure_line(
    axis: Axis, values: Sequence[float] | None, defence: Defence, plan: Plan, store: Store, measure: Measure
) -> Line:
    """Measure values of a parameter, and the network without the defence.

    Without given values, find the value at which recovery stops. The first round then measures five values over the
    whole range. Each further round measures three values between the strongest value that leaks and the weakest value
    from which on recovery stops. The search ends when the two differ by less than ``RESOLUTION``, or by 1 for whole
    numbers. ``defence`` holds the values of all other parameters.
    """
    wanted = [axis.weak, *axis.between(axis.weak, axis.strong, FIRST_VALUES - 2), axis.strong]
    wanted = wanted if values is None else sorted(set(values), reverse=not axis.rising)
    known: dict[float, Point] = {}
    while wanted:
        points = evaluate([axis.on(defence, value) for value in wanted], axis, plan, store, measure)
        known |= dict(zip(wanted, points, strict=True))
        order = sorted(known, reverse=not axis.rising)
        points, wanted = [known[value] for value in order], []
        stop = _stop(points, plan.level)
        if values is None and stop:  # neither None nor the first point
            weak, strong = order[stop - 1], order[stop]
            if max(strong / weak, weak / strong) >= RESOLUTION:
                wanted = axis.between(weak, strong, VALUES_PER_ROUND)
    free = replace(defence, **{axis.name: getattr(Defence(), axis.name)})
    defends = axis.name not in ("batch", "width", "rounds")  # these have no value without effect
    undefended = evaluate([free], axis, plan, store, measure)[0] if defends and plan.trainings else None
    return Line(axis, tuple(points), None if stop is None else points[stop], undefended, plan)


def evaluate(defences: Sequence[Defence], axis: Axis, plan: Plan, store: Store, measure: Measure) -> list[Point]:
    """Measure the points of several defences, all their cells in one call, so that they run in parallel."""
    threshold = axis.threshold if plan.threshold is None else plan.threshold
    attacks = [each.attack(data=plan.data, search=plan.search, threshold=threshold) for each in defences]
    trainings = [
        Training(each.batch * each.clients, each.width, each.client, plan.data, rounds=plan.rounds) for each in defences
    ]
    wanted = [cell for each in attacks for cell in cells_of(each, plan.seeds)]
    wanted += [cell for each in trainings for cell in cells_of(each, plan.trainings)]
    measure(wanted)
    return [
        _point(each, threshold, store.batches(attack, plan.seeds), store.batches(training, plan.trainings), plan)
        for each, attack, training in zip(defences, attacks, trainings, strict=True)
    ]


def sentence(found: Line) -> str:
    """Return the result as one sentence, without a full stop."""
    first, axis, plan = found.points[0], found.axis, found.plan
    what = "exact recovery" if first.threshold >= PAPER_PSNR else f"recovery to {first.threshold:g} dB"
    shown, plain = first.defence, Defence()
    fixed = []
    for each in AXES.values():
        differs = getattr(shown, each.name) != getattr(plain, each.name)
        if each.name != axis.name and (differs or each.name in ("batch", "width")):
            fixed.append(f"{each.symbol}={each.of(shown):g}")
    fixed += [f"C={CLIP:g}"] if shown.noise and shown.clip is None else []
    fixed += [f"learning rate={RATE:g}"] if axis.name == "steps" and shown.lr is None else []
    where = "at " + ", ".join(fixed)
    if found.stop is None:
        last = found.points[-1]
        end = f"{'up' if axis.rising else 'down'} to {axis.symbol} = {axis.of(last.defence):g}"
        leaks = f"{last.any.value:.0%} of {last.seeds} batches still leak an input"
        return f"{where} {what} does not stop {end}: {leaks}"
    stop = found.stop
    text = f"{where} {what} stops at {axis.symbol} {'≥' if axis.rising else '≤'} {axis.of(stop.defence):g}"
    leaks = f"{round(stop.any.value * stop.seeds)} of {stop.seeds} batches leak an input"
    text += f" ({leaks}, at most {stop.any.high:.0%} with 95 % confidence)"
    if stop.epsilon is not None:
        rounds = stop.defence.rounds or plan.rounds
        text += f", ε = {stop.epsilon:.3g} for {rounds} round{'s' if rounds > 1 else ''}"
    if stop.accuracy is not None and found.undefended is not None and found.undefended.accuracy is not None:
        text += f", {_cost(found.undefended.accuracy, stop.accuracy, plan)}"
    elif stop.accuracy is not None:
        text += f"; accuracy there {stop.accuracy.value:.0%}"
    return text


def _cost(free: Interval, stopped: Interval, plan: Plan) -> str:
    """Return what a defence costs in accuracy, or that the training runs do not show it.

    ``free`` is the accuracy without the defence, and ``stopped`` the accuracy with it.

    >>> from spearpp.experiments.intervals import mean
    >>> _cost(mean([0.80, 0.81, 0.82]), mean([0.70, 0.71, 0.72]), Plan(Source("digits")))
    'costing 10.0 points of accuracy (81% to 71%)'
    >>> _cost(mean([0.25]), mean([0.26]), Plan(Source("digits"), trainings=1))
    'the cost in accuracy is not measurable with 1 training run of 60 rounds (25% to 26%)'
    """
    change = f"({free.value:.0%} to {stopped.value:.0%})"
    if free.low > stopped.high:  # False if an interval is unknown
        return f"costing {100 * (free.value - stopped.value):.1f} points of accuracy {change}"
    runs = f"{plan.trainings} training run{'s' if plan.trainings > 1 else ''}"
    return f"the cost in accuracy is not measurable with {runs} of {plan.rounds} rounds {change}"


def _stop(points: Sequence[Point], level: float) -> int | None:
    """Return the index of the first point from which on no point leaks; None if the last point leaks."""
    index = len(points)
    while index and points[index - 1].any.value <= level:
        index -= 1
    return index if index < len(points) else None


def _point(defence: Defence, threshold: float, batches: list[Stored], trained: list[Stored], plan: Plan) -> Point:
    if not batches:
        raise OptionError(f"no batch of {defence} could be measured: see the errors above")
    attacks, runs = [each.result for each in batches], [each.result for each in trained]
    recovered = [each["recovered"] for each in attacks]
    return Point(
        defence=defence,
        threshold=threshold,
        any=wilson(sum(each > 0 for each in recovered), len(attacks)),
        whole=wilson(sum(bool(each["exact"]) for each in attacks), len(attacks)),
        inputs=sum(recovered) / sum(each["b"] for each in attacks),
        psnr=statistics.fmean(each["mean_psnr"] for each in attacks),
        seeds=len(attacks),
        accuracy=mean([each["accuracy"] for each in runs], 0, 1) if runs else None,
        epsilon=defence.epsilon(rounds=plan.rounds, train=Training.train),
        commits=frozenset(each.commit for each in batches + trained),
        devices=frozenset(each.versions.get("device", "") for each in batches + trained) - {""},
    )
