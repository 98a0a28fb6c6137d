"""The gated search, the default of ``spearpp.invert``. ``docs/method.md#the-gated-search-default-for-relu`` explains it
in words, and ``docs/method.md#symbols`` its letters.

The paper searches for directions q without the weights of the layer, and uses the weights only to filter candidates.
But the weights determine where L q must be zero: at the neurons that are inactive for the input x̂ = Rᵀp. This search
looks for p, and the activation pattern of p selects (gates) the rows of L that must be zero.

One round minimises the ``objective`` from random starts (``descent``), solves the end points exactly (``refine``),
keeps those that fit (``accept``), and removes what was found from the problem (``one_layer``).

Before these rounds, the search uses cheaper sources:

- if the gradient of the next layer is informative, the equations of the next layer, by relaxed reflections between two
  sets (``two_layers``);
- otherwise, inputs that single rows of the gradient reveal (``peel_samples``), and then the weights of a next layer
  with few outputs (``backward``, or ``over_rounds`` for several rounds of one client).
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from spearpp.errors import OptionError
from spearpp.inversion.problem import Problem
from spearpp.inversion.solutions import Pairs, no_pairs
from spearpp.linalg import sphere
from spearpp.search.base import Proposals, Search, check_options
from spearpp.search.gated.backward import BackwardRounds
from spearpp.search.gated.descent import Effort
from spearpp.search.gated.one_layer import OneLayerRounds, RoundOptions
from spearpp.search.gated.over_rounds import BackwardOverRounds
from spearpp.search.gated.peel import peel_samples
from spearpp.search.gated.two_layers import TwoLayerRounds

MAX_STARTS = 4096
"""Largest number of starts in a round. A design choice: it bounds the memory of a round."""
MIN_STARTS, MIN_STARTS_GPU = 128, (256, 512)
"""Smallest number of starts in a round on a CPU; and on a GPU, if the host selects the candidates (``SMALL_FOR_GPU``)
and if the GPU does. A GPU descends from four times as many starts as a CPU in about the same time, and then needs fewer
rounds. If the host selects the candidates, twice as many starts are enough."""
SMALL_FOR_GPU = 8192
"""Largest number of entries of L for which the host selects and checks candidates faster than a GPU can launch kernels.
Measured on an H200 (``docs/lab/notebook.md``)."""
EFFORTS = (Effort(50, 4, 1e-4), Effort(150, 4, 1e-4), Effort(150, 12, 1e-5), Effort(300, 20, 1e-5))
"""Efforts from the cheapest to the most careful. After a round that finds little, the next effort is used."""
CHEAP_EFFORT = Effort(50, 2, 1e-4)
"""Cheaper first effort for large batches in wide layers. Measured: on such layers two conjugate-gradient iterations
found as many samples as four (``docs/lab/notebook.md``)."""
CHEAP_MIN_SAMPLES = 16
"""Smallest number of samples for which ``CHEAP_EFFORT`` comes first. Measured together with it."""
CHEAP_MIN_NEURONS = 8
"""Smallest number of neurons for each sample for which ``CHEAP_EFFORT`` comes first. Measured together with it."""


@dataclass(frozen=True)
class Gated(Search):
    """Search over points p. Only rows of L at neurons that p leaves inactive are used (gating).

    Each round removes what it found from the problem. After a round that finds little, the next rounds descend more
    carefully, and later rounds have more starts. The search ends when everything is found or the budget is spent.

    >>> Gated(seconds=30).starts
    16384
    """

    starts: int = 16_384
    """Largest number of starts, summed over all rounds of the search. If several rounds of a client are inverted
    together, the starts of the reflections (``over_rounds``) that find new directions are cheap and are not counted."""
    seconds: float | None = None
    """Wall-clock budget in seconds; None for no limit. With a limit, results depend on the speed of the machine."""
    round_starts: int | None = None
    """Smallest number of starts in a round. A round has more starts if more samples are missing. None: 128 on a CPU,
    256 or 512 on a GPU."""
    efforts: tuple[Effort, ...] | None = None
    """How carefully rounds descend, from the cheapest to the most careful. None: ``EFFORTS``, and ``CHEAP_EFFORT``
    before them for large batches in wide layers."""
    rate: float = 0.1
    """Learning rate of the first step of the descent. It then decreases by a cosine schedule."""
    sparsity: float | None = 0.1
    """τ: the smallest share of zeros of a candidate. This search also finds inputs with far fewer zeros than half."""
    chunk: int | None = None
    """Largest number of starts in a round; None: 4096."""
    dtype: torch.dtype = torch.float32
    """Precision of the descent; directions are refined in float64."""
    devices: tuple[str, ...] = ()
    """Devices that share the starts of a round; empty for the device of the update."""

    def __post_init__(self) -> None:
        check_options(self, self.starts, self.sparsity, self.chunk)
        least = 1 if self.round_starts is None else self.round_starts
        none = self.efforts is not None and not self.efforts
        if least < 1 or none or self.rate <= 0:
            raise OptionError(
                f"Gated(round_starts={self.round_starts}, efforts={self.efforts}, rate={self.rate}): "
                "expected at least one start per round, at least one effort, and a positive rate"
            )
        try:
            list(map(torch.device, self.devices))
        except RuntimeError as error:
            raise OptionError(
                f'Gated(devices={self.devices!r}): expected names of devices such as ("cuda:0", "cuda:1")'
            ) from error
        if self.seconds is not None and self.seconds <= 0:
            raise OptionError(f"Gated(seconds={self.seconds}): expected a positive number of seconds, or None")

    def place(self, problem: Problem) -> Problem:
        """Return the problem, on the CPU if it is small and has no next layer, because selection is faster there.

        The descents still run on the GPU.
        """
        alone = problem.next_layer is None and problem.outputs is None
        small = problem.seen.device.type == "cuda" and alone and problem.factors.left.numel() <= SMALL_FOR_GPU
        return problem.on(torch.device("cpu")) if small else problem

    def efforts_for(self, problem: Problem) -> tuple[Effort, ...]:
        """Return the efforts of successive rounds, from the cheapest to the most careful."""
        if self.efforts is not None:
            return self.efforts
        b, neurons = problem.batch_size, problem.factors.live_neurons
        return (CHEAP_EFFORT, *EFFORTS) if b >= CHEAP_MIN_SAMPLES and neurons >= CHEAP_MIN_NEURONS * b else EFFORTS

    def propose(self, problem: Problem, generator: torch.Generator, deadline: float = math.inf) -> Iterator[Proposals]:
        """Propose the new directions of each round, from three sources one after the other.

        1. Inputs that single rows of the gradient reveal (``peel_samples``), if the next layer is not used.
        2. Rounds that use the next layer or the weights of an output layer, if they were given. If two layers were
           necessary and found something, the search ends here.
        3. Rounds of descents on this layer alone, for the directions that are still missing.

        If all b directions were found and the caller still continues, λ is below 1 and some direction is wrong. The
        search then repairs the directions (``OneLayerRounds.repair``). If further rounds find nothing, a wrong
        direction may hide the missing ones. In both cases the least sparse directions are dropped and searched for
        again.
        """
        if self.seconds is not None:
            deadline = min(deadline, time.monotonic() + self.seconds)
        remaining, known = self.starts, problem.factors.left.new_zeros(0, problem.batch_size)
        peeled = no_pairs(problem) if problem.next_layer is not None else peel_samples(problem, deadline)
        if len(peeled):
            known = sphere.retract(peeled.directions)
            yield Proposals(known, starts=0, steps=0, pairs=peeled)
        first = self._next_layer(problem, peeled)
        if first is not None:
            tried = False
            while remaining > 0 and not first.over and time.monotonic() < deadline:
                proposed, tried = first.run(min(remaining, first.size), generator), True
                if not isinstance(first, BackwardOverRounds) or not len(proposed.directions):
                    remaining -= proposed.starts
                yield proposed
            known = first.known
            if isinstance(first, TwoLayerRounds) and len(known) and first.beyond_one_layer:
                return
            if tried and len(known) == len(peeled):  # nothing new: the outputs do not belong to the next layer
                problem = replace(problem, outputs=None)
        rounds = OneLayerRounds(
            problem,
            RoundOptions(
                self.round_starts or self._min_round_starts(problem),
                self.chunk or MAX_STARTS,
                self.efforts_for(problem),
                self.rate,
                self.dtype,
                tuple(map(torch.device, self.devices)) or (problem.seen.device,),
            ),
            known,
            peeled,
        )
        while remaining > 0 and time.monotonic() < deadline:
            if rounds.complete or rounds.stuck:
                if rounds.complete:
                    yield Proposals(rounds.repair(), starts=0, steps=0, solved=True)
                if not rounds.drop():
                    return
            size = min(remaining, rounds.size)
            remaining -= size
            yield rounds.run(size, generator)

    def _min_round_starts(self, problem: Problem) -> int:
        """Return the smallest number of starts in a round if ``round_starts`` is None."""
        if problem.seen.device.type != "cuda":
            return MIN_STARTS
        return MIN_STARTS_GPU[problem.factors.left.is_cuda]

    def _next_layer(self, problem: Problem, peeled: Pairs) -> TwoLayerRounds | BackwardRounds | None:
        """Return the rounds that use the next layer, if it was given and is informative."""
        starts = self.round_starts or MIN_STARTS
        if problem.next_layer is not None:
            return TwoLayerRounds(problem, problem.next_layer, starts, self.dtype)
        if problem.outputs is None:
            return None
        kind = BackwardOverRounds if problem.rounds > 1 else BackwardRounds
        return kind(problem, problem.outputs, starts, self.dtype, peeled)
