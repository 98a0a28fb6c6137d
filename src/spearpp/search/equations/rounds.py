"""The search that solves the equations of a network. A round is one pass of this search.

Every round draws random starting points, solves some of the equations in float32, finishes the solutions with all
equations in float64, and keeps those that satisfy every equation up to its noise. Samples that have been found restrict
the unknowns of later rounds, because the point p of a sample is orthogonal to the directions q of all others, and they
give one more equation for each space (``Span.without``). The last steps in float64 do without these restrictions, so
that errors of found samples do not add up.

Which equations find samples depends on the network: the backward equations alone for smooth activations, the forward
equations for nearly linear ones, and forward equations with smoothed activations for ReLU and for trained networks.
A set of equations, with or without smoothed activations, is a *strategy*. The search tries the strategies in this order
and continues with those that find samples.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from spearpp.inversion.network import SIGMAS, Network
from spearpp.inversion.problem import Problem, affine
from spearpp.inversion.residuals import Residuals
from spearpp.inversion.solutions import Solutions, no_solutions
from spearpp.inversion.spans import Span
from spearpp.linalg import sphere
from spearpp.linalg.least_squares import Options
from spearpp.linalg.nullspace import complement
from spearpp.model.loss import Loss
from spearpp.search.equations.descent import descend
from spearpp.search.equations.finish import Finish
from spearpp.search.equations.starts import STARTS_PER_ROUND, Starts, adapted
from spearpp.types import Float, Int, Tensor, join_rows

MIN_SUCCESS = 0.25
"""A strategy is used again, without trying the others, if its last round found at least this share of new samples: new
samples over starts, or over missing samples if these are fewer. Design choice: other strategies can then hardly be
better."""
MAX_EMPTY_ROUNDS = 6
"""Number of successive rounds without a new sample that end the search. Rounds count only after every strategy had its
first round. Design choice: starts are random, so a few empty rounds say little."""
MAX_STEPS = 40
"""Largest number of steps of a start. Measured: in smooth networks, a start reaches a sample in 5 to 10 steps."""
PATIENCE = 15
"""Number of steps after which a start ends if a step hardly changes its residual. Design choice: more than the 5 to 10
steps to a sample in smooth networks."""
SMOOTH_STEPS = 6
"""Number of steps for each width of the smoothed activations. Design choice: the next width starts close to the
solution of the last one, so few steps are enough."""
FIRST_WIDTHS = (0.12, 0.7)
"""First widths of smoothed activations that are tried, relative to the standard deviation of their arguments. Measured:
with 0.7 every start ends at a sample, but often at the same one; on raw pixels, 0.12 finds a batch of 60 in a fifth of
the time."""
LAST_WIDTH = 0.02
"""Smallest width of the smoothed activations, before the exact activations. Measured together with the factor."""
WIDTH_FACTOR = 0.5
"""Factor between two widths. Measured: a factor of 0.6 with 15 steps finds the same samples at three times
the cost."""
MAX_RESIDUAL = 1e-3
"""Largest norm of the residual of a candidate. Design choice: above the error that found directions cause, and far
below the residual of local minima, which is 1e-2 or more."""
FLOAT32_RESIDUAL = 3e-6
"""Norm of the residual at which a start ends, because float32 cannot resolve smaller residuals."""
RESIDUAL_BELOW_NOISE = 0.1
"""Norm of the residual, in units of the noise of the equations, at which a start ends."""
MIN_LABEL_WEIGHT = 0.3
"""Smallest weight of a label when labels of starts are drawn, in samples. Design choice: the counts of missing labels
are estimates, so a label that seems to be complete is still tried."""


@dataclass
class _Strategy:
    """A set of equations with the smoothing of its activations, and the success of its last round."""

    residuals: Residuals
    widest: float
    """First width of the smoothed activations; 0 for the exact activations only."""
    success: float | None = None
    """Number of new samples of the last round, over the number that it could have found: its starts, at most
    ``STARTS_PER_ROUND``, or the missing samples if these are fewer. None before the first round."""
    spread: float = 1.0
    """Typical norm of the next starts, relative to that of a sample. It stays 1 for smoothed activations, because
    nearly all of their starts reach a solution."""
    matrices: bool = True
    """Whether the last round computed the matrices JᵀJ."""
    new_per_step: float = 0.0
    """Number of new samples of the last round, over its steps."""


def run_rounds(
    problem: Problem,
    network: Network,
    generator: torch.Generator,
    deadline: float,
    inputs: Float[Tensor, "k n"] | None = None,
) -> Iterator[tuple[Solutions, int, int]]:
    """Search for samples, round by round, until the whole batch is found or no strategy finds more.

    The first round starts from the given inputs, if there are any.

    Yields:
        The new samples of a round, its starts, and its steps summed over the starts.
    """
    search = _EquationSearch(problem, network, generator)
    if not search.strategies:  # there are fewer equations than unknowns
        yield search.found, 0, 0
    elif inputs is not None and len(inputs):
        yield search.solve_from(inputs)
    while search.strategies and len(search.found) < problem.batch_size and search.empty < MAX_EMPTY_ROUNDS:
        yield search.round()
        if time.monotonic() >= deadline:
            return


class _EquationSearch:
    """The state of a search: the samples found so far, and the success of each strategy."""

    def __init__(self, problem: Problem, network: Network, generator: torch.Generator) -> None:
        self.problem, self.network, self.generator = problem, network, generator
        self.found, self.empty = no_solutions(problem), 0
        self.spans = network.usable_spans
        forward = [span for span in self.spans if not span.signals]
        backward = [span for span in self.spans if span.signals]
        every = list(self.spans)
        smoothed = [(forward, width) for width in FIRST_WIDTHS]
        sets = [(backward, 0.0), (forward, 0.0), *smoothed, (every, FIRST_WIDTHS[-1])]
        if not forward or not backward:
            sets = [(every, width) for width in (0.0, *FIRST_WIDTHS)]
        made: dict[tuple[Span, ...], Residuals] = {}
        self.strategies = []
        for spans, widest in sets:
            if sum(span.equations for span in spans) >= problem.batch_size:
                key = tuple(spans)
                made[key] = made.get(key) or Residuals(
                    network, spans, problem.coordinates_to_preactivations, torch.float32
                )
                self.strategies.append(_Strategy(made[key], widest))
        self._finish = Finish(problem, network)
        self.starts = Starts(problem, generator)

    def solve_from(self, inputs: Float[Tensor, "k n"]) -> tuple[Solutions, int, int]:
        """Solve all equations from inputs that are close to samples. Return what ``run_rounds`` yields."""
        rows = self.problem.factors.rows
        if rows.shape[1] > inputs.shape[1]:
            inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
        self.found = self._finish.new_samples(inputs.to(rows) @ rows.T, None, self.found)
        return self.found, len(inputs), 0

    def round(self) -> tuple[Solutions, int, int]:
        """Run one round with one strategy. Return what ``run_rounds`` yields."""
        strategy = self._choose()
        # The points of all missing samples are orthogonal to the directions found.
        remaining = complement(sphere.retract(self.found.directions / self.problem.factors.singular_values))
        ends: tuple[Tensor, Tensor | None]
        if remaining.shape[1] == 1 and self.problem.bias_functional is not None:  # only one point is left
            ends, starts, steps = (affine(remaining, self.problem.bias_functional)[0][None], None), 1, 0
        else:
            ends, starts, steps = self._solve(strategy, remaining)
        new = self._finish.new_samples(*ends, self.found)
        missing, reached = self.problem.batch_size - len(self.found), len(ends[0])
        strategy.success = len(new) / min(starts, missing, STARTS_PER_ROUND)
        strategy.new_per_step = len(new) / max(1, steps)
        if steps and not strategy.widest:
            strategy.spread = adapted(strategy.spread, reached / starts, len(new) / max(1, min(reached, missing)))
        if len(new):
            self.empty, self.found = 0, join_rows(self.found, new)
        elif all(each.success is not None for each in self.strategies):
            self.empty += 1
        return new, starts, steps

    def _choose(self) -> _Strategy:
        """Return the strategy for the next round."""
        for strategy in self.strategies:
            if strategy.success is None or strategy.success >= MIN_SUCCESS:
                return strategy
        best = max(self.strategies, key=lambda strategy: strategy.new_per_step)
        return best if best.new_per_step > 0 else self.strategies[self.empty % len(self.strategies)]

    def _solve(
        self, strategy: _Strategy, remaining: Float[Tensor, "b k"]
    ) -> tuple[tuple[Tensor, Tensor | None], int, int]:
        """Descend from random starts.

        Returns:
            The end points with a small residual, best first, with their labels, or None if the equations need no
            labels; the number of starts; and the number of steps.
        """
        equations = strategy.residuals
        origin, basis = affine(remaining, self.problem.bias_functional)
        equations.place(origin, basis, self._without_found(equations.spans) if not strategy.widest else ())
        unknowns = basis.shape[1]
        starts = self.starts.number(equations, unknowns, first=strategy.success is None, matrices=strategy.matrices)
        t = self.starts.draw(starts, basis, self.found, self.empty, strategy.spread).to(equations.dtype)
        labelled = any(span.signals for span in equations.spans)
        labels = self._draw_labels(starts) if labelled else torch.zeros_like(t[:, 0], dtype=torch.long)
        widths = _widths(self.network, equations.preactivations(t), strategy.widest)
        noise = math.hypot(*(span.typical_level for span in equations.spans))
        close, steps = max(MAX_RESIDUAL, SIGMAS * noise), 0
        for each in [*widths, None]:
            equations.widths = each
            options = Options(
                steps=MAX_STEPS if each is None else SMOOTH_STEPS,
                damping=1e-2 if each is None else 1e-3,
                tolerance=max(FLOAT32_RESIDUAL, RESIDUAL_BELOW_NOISE * noise),
                close=close,
                patience=PATIENCE,
                replaceable=True,
            )
            ends = descend(equations, t, labels, None, options, most=self.starts.with_matrices(equations, unknowns))
            t, steps = ends.points, steps + ends.steps
            labels, starts = labels[: len(t)], len(t)
        strategy.matrices = ends.matrices
        order = ends.squared.argsort()
        order = order[ends.squared[order] <= close**2]
        points = origin + t[order].to(basis) @ basis.T
        return (points, labels[order] if labelled else None), starts, steps

    def _without_found(self, spans: Sequence[Span]) -> list[Float[Tensor, "_ k"]]:
        """Return for each span directions to which the vectors of all missing samples are orthogonal."""
        if not len(self.found) or self.network.loss is None or self.empty % 2:
            return []
        later, signals = self._replay(self.found)
        inputs = [self.found.coordinates, *later]
        return [span.without(inputs[span.layer] if span.signals else signals[span.layer]) for span in spans]

    def _draw_labels(self, count: int) -> Int[Tensor, "count"]:
        """Draw the labels of starts, if possible in proportion to the estimated labels of the missing samples.

        For cross-entropy, the gradient of the output bias is the mean of softmax(o) - e_y, which shows about how often
        each label occurs.
        """
        network, classes = self.network, self.network.label_count
        weights = torch.ones(classes, dtype=torch.float64)
        if network.loss is Loss.CROSS_ENTROPY and network.output_gradient is not None:
            signals = network.output_gradient * self.problem.batch_size
            if len(self.found):
                signals = signals - self._replay(self.found)[1][-1].sum(0)[-classes:]
            missing = self.problem.batch_size - len(self.found)
            weights = (missing / classes - signals.cpu()).clamp_min(MIN_LABEL_WEIGHT)
        drawn = torch.multinomial(weights.to(self.generator.device), count, True, generator=self.generator)
        return drawn.to(self.problem.factors.left.device)

    def _replay(self, found: Solutions) -> tuple[list[Tensor], list[Tensor]]:
        return self.network.replay(found.coordinates @ self.problem.coordinates_to_preactivations.T, found.labels)


def _widths(network: Network, preactivations: Float[Tensor, "k m"], width: float) -> list[dict[str, float]]:
    """Return the widths of the smoothed activations, from wide to narrow. ``width`` is relative to their arguments."""
    scales = network.scales(preactivations) if width else {}
    widths = []
    while width >= LAST_WIDTH:
        widths.append({name: width * scale for name, scale in scales.items()})
        width *= WIDTH_FACTOR
    return widths
