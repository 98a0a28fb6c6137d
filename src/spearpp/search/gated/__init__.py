"""The gated search, our default: it looks for inputs p with the zeros that the weights say they have.

The paper looks for q alone and uses the weights to filter. But the weights say where the zeros of
L q must be. Stages: ``descent`` of the ``objective`` from random starts, ``refine``, ``accept``,
deflate (``accept.complement``), and again; the filtering by λ finishes. Where the next layer is a
witness, its rounds come first (``reflect``, ``witnessed``), or those of its weights (``backward``); what
they leave, the others look for.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from spearpp import sphere
from spearpp.errors import OptionError
from spearpp.problem import Problem
from spearpp.search.base import Proposals, check_options
from spearpp.search.gated.accept import acceptable, complement, new_directions
from spearpp.search.gated.backward import BackwardRounds
from spearpp.search.gated.descent import Effort, descend
from spearpp.search.gated.objective import Gates
from spearpp.search.gated.refine import distinct, refine
from spearpp.search.gated.witnessed import WitnessedRounds
from spearpp.shapes import Float, Tensor

DRY_ROUNDS = 4
"""Rounds at the highest effort without a find before something found is doubted."""
DROPPED = (0.25, 0.5, 1.0)
"""Which share of what was found is looked for again, at the first, second and third doubt."""
EFFORTS = (Effort(150, 4, 1e-4), Effort(150, 12, 1e-5), Effort(300, 20, 1e-5))


@dataclass(frozen=True)
class Gated:
    """Search over p with rows gated by the weights; rounds shrink the problem by what was found.

    A round that finds little is followed by one with more careful steps, then by ones with more
    starts, until everything is found or the budget is spent.

    >>> Gated(seconds=30).round_starts
    128
    """

    starts: int = 16_384
    """Starts at most, over all rounds."""
    seconds: float | None = None
    """Wall-clock budget; None for none. With one, the result depends on the machine's speed."""
    round_starts: int = 128
    """Starts of a round at least; as many as there are samples left if that is more."""
    efforts: tuple[Effort, ...] = EFFORTS
    rate: float = 0.1
    sparsity: float | None = 0.1
    """τ: inputs with far fewer zeros than half are found too, so the pool takes them."""
    chunk: int | None = None
    """Starts of a round at most; None: 4096."""
    dtype: torch.dtype = torch.float32
    """Precision of the descent; directions are refined in float64."""

    def __post_init__(self) -> None:
        check_options(self, self.starts, self.sparsity, self.chunk)
        if self.round_starts < 1 or not self.efforts or self.rate <= 0:
            raise OptionError(
                f"Gated(round_starts={self.round_starts}, efforts={self.efforts}, rate={self.rate}): "
                "at least one start a round, one effort, and a positive rate"
            )
        if self.seconds is not None and self.seconds <= 0:
            raise OptionError(f"Gated(seconds={self.seconds}): a budget is positive, or None for none")

    def propose(self, problem: Problem, generator: torch.Generator) -> Iterator[Proposals]:
        """The new directions of each round.

        If all b were found and the caller still asks, λ is below 1 and something found is wrong. The
        inverse of the directions then gives a p for each, of which that of a wrong one is right if
        the others are: each is refined anew. If rounds find nothing more, something found may block
        the rest. Either way the least sparse of what was found are dropped and looked for again.
        """
        deadline = math.inf if self.seconds is None else time.monotonic() + self.seconds
        left, known = self.starts, problem.factors.left.new_zeros(0, problem.batch_size)
        first = self._next_layer(problem)
        if first is not None:
            while left > 0 and not first.over and time.monotonic() < deadline:
                proposed = first.run(min(left, first.size), generator)
                left -= proposed.starts
                yield proposed
            known = first.known
            if isinstance(first, WitnessedRounds) and len(known) and first.beyond_one_witness:
                return
            if not len(known):  # then its outputs are not what this layer feeds
                problem = replace(problem, outputs=None)
        rounds = _Rounds(problem, self, known)
        while left > 0 and time.monotonic() < deadline:
            if rounds.complete or rounds.stuck:
                if rounds.complete:
                    yield Proposals(rounds.repair(), starts=0, steps=0)
                if not rounds.drop():
                    return
            size = min(left, rounds.size)
            new, steps = rounds.run(size, generator)
            left -= size
            yield Proposals(new, starts=size, steps=steps)

    def _next_layer(self, problem: Problem) -> WitnessedRounds | BackwardRounds | None:
        """The rounds that the next layer allows, if it was given and says something."""
        if problem.witness is not None:
            return WitnessedRounds(problem, problem.witness, self.round_starts, self.dtype)
        if problem.outputs is not None:
            return BackwardRounds(problem, problem.outputs, self.round_starts, self.dtype)
        return None


class _Rounds:
    """What has been found, and how hard to look next."""

    def __init__(self, problem: Problem, search: Gated, known: Float[Tensor, "known b"]) -> None:
        self.problem = problem
        self.search = search
        self.found = known
        self.effort, self.more, self.dry, self.dropped = 0, 1, 0, 0
        scale = problem.preactivations.square().mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
        live = problem.factors.live
        self.rows = problem.live_rows.to(search.dtype)
        self.gates = problem.preactivations[live] / scale

    @property
    def stuck(self) -> bool:
        """Whether the last rounds found nothing although something had been found before."""
        last = self.problem.batch_size - len(self.found) == 1
        return len(self.found) > 0 and self.dry >= (1 if last else DRY_ROUNDS)

    def drop(self) -> bool:
        """Forget the least sparse quarter, then half, then all of what was found; the pool keeps it."""
        if self.dropped == len(DROPPED):
            return False
        zeros = self.problem.tolerance.zeros(self.found @ self.problem.factors.left.T, self.found).sum(1)
        kept = int(len(self.found) * (1 - DROPPED[self.dropped]))
        self.found = self.found[zeros.argsort(descending=True, stable=True)[:kept]]
        self.more, self.dry, self.dropped = 1, 0, self.dropped + 1
        return True

    @property
    def complete(self) -> bool:
        """Whether nothing is left to look for."""
        return len(self.found) >= self.problem.batch_size

    @property
    def size(self) -> int:
        """Starts of the next round: two where p is known up to sign."""
        missing = self.problem.batch_size - len(self.found)
        if missing == 1:
            return 2
        wanted = max(self.search.round_starts, missing) * self.more
        return min(wanted, self.search.chunk or 4096)

    def run(self, size: int, generator: torch.Generator) -> tuple[Float[Tensor, "new b"], int]:
        """One round: the directions it adds, and the start-steps it took."""
        basis = complement(self.found)
        dimension = basis.shape[1]
        if dimension == 1:
            points = torch.cat([basis.T, -basis.T])
            directions, steps = points, 0
            chosen = torch.arange(2, device=points.device)
        else:
            starts = sphere.uniform(size, dimension, generator, dtype=self.search.dtype, device=basis.device)
            confined = Gates(self.rows, (self.gates @ basis).to(self.search.dtype), basis.to(self.search.dtype))
            effort = self.search.efforts[self.effort]
            ends, directions = descend(confined, starts, effort, self.search.rate)
            points, directions, steps = ends.double() @ basis.T, directions.double(), size * effort.steps
            chosen = distinct(self.problem, points, directions)
        refined = refine(self.problem, points[chosen], directions[chosen])
        kept = refined[acceptable(self.problem, points[chosen], refined)]
        new = new_directions(self.problem, self.found, kept)[:dimension]
        self._adapt(len(new), dimension, size)
        self.found = torch.cat([self.found, new])
        return new, steps

    def repair(self) -> Float[Tensor, "k b"]:
        """Refine, for every input, what the inverse of all directions says its p is, with either sign."""
        inverse = sphere.retract(torch.linalg.pinv(self.found.T))
        points = torch.cat([inverse, -inverse])
        refined = refine(self.problem, points, torch.cat([self.found, self.found]))
        return refined[acceptable(self.problem, points, refined)]

    def _adapt(self, new: int, dimension: int, size: int) -> None:
        """Look harder if fewer came than a tenth of what is left, and of the starts."""
        self.dry = self.dry + 1 if new == 0 and self.effort + 1 == len(self.search.efforts) else 0
        if dimension == 1 and new == 0:
            self.dry = 1
        if new >= 0.1 * min(dimension, size):
            self.more = 1
        elif self.effort + 1 < len(self.search.efforts):
            self.effort += 1
        elif new == 0:
            self.more *= 2
