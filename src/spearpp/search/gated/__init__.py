"""The gated search, our default: it looks for inputs p with the zeros that the weights say they have.

The paper looks for q alone and uses the weights to filter. But the weights say where the zeros of
L q must be. Stages: ``descent`` of the ``objective`` from random starts, ``refine``, ``accept``,
deflate, and again (``rounds``); the filtering by λ finishes. Where the next layer is a witness, its rounds
come first (``reflect``, ``witnessed``); else inputs that lie open in single rows (``peel``), then what the next
layer's weights say (``backward``). What they leave, the others look for.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from spearpp.errors import OptionError
from spearpp.inversion.pairs import Pairs, no_pairs
from spearpp.inversion.problem import Problem
from spearpp.linalg import sphere
from spearpp.search.base import Proposals, check_options
from spearpp.search.gated.backward import BackwardRounds
from spearpp.search.gated.descent import Effort
from spearpp.search.gated.peel import peel
from spearpp.search.gated.rounds import Pace, Rounds
from spearpp.search.gated.two_layers import WitnessedRounds

MOST_STARTS = 4096
"""Starts of a round at most."""
LEAST_STARTS, ON_A_GPU = 128, (256, 512)
"""Starts of a round at least. A GPU descends from four times as many in about the same time, and needs fewer rounds
then; where the host looks through what it found, twice as many are enough."""
SMALL = 8192
"""Entries of L up to which a GPU's launches take longer than the host's arithmetic."""
EFFORTS = (Effort(50, 4, 1e-4), Effort(150, 4, 1e-4), Effort(150, 12, 1e-5), Effort(300, 20, 1e-5))
HASTY, MANY, WIDE = Effort(50, 2, 1e-4), 16, 8
"""The first effort for that many samples, which take time, with that many neurons for each; it finds as much there."""


@dataclass(frozen=True)
class Gated:
    """Search over p with rows gated by the weights; rounds shrink the problem by what was found.

    A round that finds little is followed by one with more careful steps, then by ones with more
    starts, until everything is found or the budget is spent.

    >>> Gated(seconds=30).starts
    16384
    """

    starts: int = 16_384
    """Starts at most, over all rounds."""
    seconds: float | None = None
    """Wall-clock budget; None for none. With one, the result depends on the machine's speed."""
    round_starts: int | None = None
    """Starts of a round at least, as many as there are samples left if that is more; None: 128, on a GPU 256 or 512."""
    efforts: tuple[Effort, ...] | None = None
    """How carefully rounds descend, the hardest last; None: ``EFFORTS``, after ``HASTY`` where that finds as much."""
    rate: float = 0.1
    sparsity: float | None = 0.1
    """τ: inputs with far fewer zeros than half are found too, so the pool takes them."""
    chunk: int | None = None
    """Starts of a round at most; None: 4096."""
    dtype: torch.dtype = torch.float32
    """Precision of the descent; directions are refined in float64."""
    devices: tuple[str, ...] = ()
    """Where to descend, each device from its share of a round's starts; none: where the update lies."""

    def __post_init__(self) -> None:
        check_options(self, self.starts, self.sparsity, self.chunk)
        least = 1 if self.round_starts is None else self.round_starts
        none = self.efforts is not None and not self.efforts
        if least < 1 or none or self.rate <= 0:
            raise OptionError(
                f"Gated(round_starts={self.round_starts}, efforts={self.efforts}, rate={self.rate}): "
                "at least one start a round, one effort, and a positive rate"
            )
        try:
            list(map(torch.device, self.devices))
        except RuntimeError as error:
            raise OptionError(f'Gated(devices={self.devices!r}): names of devices, as ("cuda:0", "cuda:1")') from error
        if self.seconds is not None and self.seconds <= 0:
            raise OptionError(f"Gated(seconds={self.seconds}): a budget is positive, or None for none")

    def settles_on_host(self, problem: Problem) -> bool:
        """Whether all but the descents is better done on the CPU, wherever the update lies."""
        alone = problem.next_layer is None and problem.outputs is None
        return problem.seen.device.type == "cuda" and alone and problem.factors.left.numel() <= SMALL

    def efforts_for(self, problem: Problem) -> tuple[Effort, ...]:
        """From the first to the hardest."""
        if self.efforts is not None:
            return self.efforts
        b, neurons = problem.batch_size, int(problem.factors.live.sum(-1).max())
        return (HASTY, *EFFORTS) if b >= MANY and neurons >= WIDE * b else EFFORTS

    def propose(self, problem: Problem, generator: torch.Generator) -> Iterator[Proposals]:
        """The new directions of each round.

        If all b were found and the caller still asks, λ is below 1 and something found is wrong. The
        inverse of the directions then gives a p for each, of which that of a wrong one is right if
        the others are: each is refined anew. If rounds find nothing more, something found may block
        the rest. Either way the least sparse of what was found are dropped and looked for again.
        """
        deadline = math.inf if self.seconds is None else time.monotonic() + self.seconds
        left, known = self.starts, problem.factors.left.new_zeros(0, problem.batch_size)
        peeled = no_pairs(problem) if problem.next_layer is not None else peel(problem, deadline)
        if len(peeled):
            known = sphere.retract(peeled.directions)
            yield Proposals(known, starts=0, steps=0, pairs=peeled)
        first = self._next_layer(problem, peeled)
        if first is not None:
            asked = False
            while left > 0 and not first.over and time.monotonic() < deadline:
                proposed, asked = first.run(min(left, first.size), generator), True
                left -= proposed.starts
                yield proposed
            known = first.known
            if isinstance(first, WitnessedRounds) and len(known) and first.beyond_one_witness:
                return
            if asked and len(known) == len(peeled):  # then its outputs are not what this layer feeds
                problem = replace(problem, outputs=None)
        rounds = Rounds(
            problem,
            Pace(
                self.round_starts or self._least(problem),
                self.chunk or MOST_STARTS,
                self.efforts_for(problem),
                self.rate,
                self.dtype,
                tuple(map(torch.device, self.devices)) or (problem.seen.device,),
            ),
            known,
            peeled,
        )
        while left > 0 and time.monotonic() < deadline:
            if rounds.complete or rounds.stuck:
                if rounds.complete:
                    yield Proposals(rounds.repair(), starts=0, steps=0, solved=True)
                if not rounds.drop():
                    return
            size = min(left, rounds.size)
            new, steps = rounds.run(size, generator)
            left -= size
            yield Proposals(new, starts=size, steps=steps, solved=True)

    def _least(self, problem: Problem) -> int:
        if problem.seen.device.type != "cuda":
            return LEAST_STARTS
        return ON_A_GPU[problem.factors.left.is_cuda]

    def _next_layer(self, problem: Problem, peeled: Pairs) -> WitnessedRounds | BackwardRounds | None:
        """The rounds that the next layer allows, if it was given and says something."""
        starts = self.round_starts or LEAST_STARTS
        if problem.next_layer is not None:
            return WitnessedRounds(problem, problem.next_layer, starts, self.dtype)
        if problem.outputs is not None:
            return BackwardRounds(problem, problem.outputs, starts, self.dtype, peeled)
        return None
