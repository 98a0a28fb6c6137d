"""Search loop for one layer.

The loop runs a search round by round. Each round proposes candidate directions. The loop adds them to the pool,
selects the best b of them and checks their evidence. It stops when a selection has λ = 1 or only consistent inputs,
when b inputs match two layers or satisfy the equations of the network, at the deadline, when the search has no more
rounds, or at Ctrl-C. ``spearpp.inversion.assemble`` then computes the inputs, with the evidence for each.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from spearpp.inversion.evidence import Evidence
from spearpp.inversion.evidence.one_layer import certify, certify_whole
from spearpp.inversion.matches import Matches
from spearpp.inversion.network import Network
from spearpp.inversion.pool import Pool, admit, empty_pool
from spearpp.inversion.problem import Problem
from spearpp.inversion.result import Clock, Progress
from spearpp.inversion.selection import Selection, initial, refit_to_patterns, select
from spearpp.inversion.solutions import Pairs, Solutions, no_solutions
from spearpp.linalg.time_limit import OutOfTimeError
from spearpp.search import Proposals, Search
from spearpp.types import join_rows

INTERRUPTED = "the search was interrupted"
OUT_OF_TIME = "the time budget was spent"
MIN_UNRELATED_SHARE = 0.7
"""Share of a later layer's input outside the row space of the layer's gradient above which input and gradient are
unrelated. Design choice: above this share, at most about half of the squared norm of the input is inside. A random
vector is nearly completely outside."""


@dataclass
class SearchOutcome:
    """What a search has found so far, and why it stopped. ``search_loop`` updates it after every round."""

    pool: Pool
    stopped: str
    """Why the search ended, in words that continue a sentence: no capital letter and no full stop."""
    selection: Selection | None = None
    """The b directions selected from the whole pool; None if the selection has not been made."""
    starts: int = 0
    steps: int = 0
    matches: Matches | None = None
    """Inputs that match the equations of two layers; None if the search did not use the next layer."""
    pairs: Pairs | None = None
    """Inputs that single rows of the gradient revealed."""
    solutions: Solutions | None = None
    """Inputs that satisfy the equations of the whole network; None if the search did not use them."""
    rounds: int = 0
    """Number of passes of the search, each with one ``Proposals``."""
    interrupted: bool = False
    evidence: Evidence | None = None
    """Evidence for the selection, if it ended the search."""

    def add(self, problem: Problem, proposed: Proposals, clock: Clock) -> bool:
        """Add what one round of a search proposes. Return whether the pool of candidates has grown."""
        self.starts, self.steps = self.starts + proposed.starts, self.steps + proposed.steps
        self.rounds += 1
        if proposed.matches is not None:
            self.matches = proposed.matches if self.matches is None else join_rows(self.matches, proposed.matches)
        if proposed.solutions is not None:
            self.solutions = (
                proposed.solutions if self.solutions is None else join_rows(self.solutions, proposed.solutions)
            )
        self.pairs = self.pairs if proposed.pairs is None else proposed.pairs
        before = len(self.pool)
        with clock("pool"):
            self.pool = admit(self.pool, problem, proposed.directions, solved=proposed.solved)
        return len(self.pool) > before


def search_loop(
    problem: Problem,
    search: Search,
    generator: torch.Generator,
    progress: Callable[[Progress], None] | None,
    clock: Clock,
    deadline: float,
) -> SearchOutcome:
    """Run a search until the whole batch is found, the search has no more rounds, or Ctrl-C interrupts it.

    The caller sets the ``time_limit``, which discards the round that is running at the deadline.
    """
    b, rank = problem.batch_size, 0
    found = SearchOutcome(empty_pool(problem), stopped="the search ended")
    try:
        for proposed in clock.each("search", search.propose(problem, generator, deadline)):
            grew = found.add(problem, proposed, clock)
            if grew:
                with clock("filter"):
                    rank = rank if rank == b else found.pool.rank
                    before = found.selection
                    found.selection, found.evidence = (
                        _choose(problem, found.pool, before) if rank == b else (None, None)
                    )
            matched = max(0 if each is None else len(each) for each in (found.matches, found.solutions))
            if progress is not None:
                score = found.selection.score if found.selection else None
                progress(Progress(b, max(rank, matched), found.starts, search.starts, score, found.rounds))
            if matched == b or (grew and found.evidence is not None):
                found.stopped = "the whole batch was found"
                return found
            if time.monotonic() >= deadline:
                found.stopped = OUT_OF_TIME
                break
    except (KeyboardInterrupt, OutOfTimeError) as ended:
        found.interrupted = isinstance(ended, KeyboardInterrupt)
        found.stopped = INTERRUPTED if found.interrupted else OUT_OF_TIME
        found.selection = None  # it may belong to an earlier pool
    found.evidence = None  # the selection did not end the search
    if problem.network is not None:
        found.selection = found.matches = found.pairs = None
        found.solutions = no_solutions(problem) if found.solutions is None else found.solutions
        found.stopped += f" with {len(found.solutions)} of {b} inputs that satisfy the equations of the network"
        return found
    found.stopped += f" with candidates for {rank} of {b} samples"
    if found.selection is not None:
        found.stopped += f" and λ = {found.selection.score:.4f} (1 if all agree with the weights)"
    found.stopped += f"; {len(found.matches)} inputs match two layers" if found.matches else ""
    return found


def contradicts(network: Network, problem: Problem) -> bool:
    """Return whether later layers contradict the only input that a gradient of rank one allows.

    They contradict the input if it gives a later layer an input that lies far from the row space of this layer's
    gradient. This test does not need the loss. Local training alone does not move the input of a later layer so far. A
    wrong activation function in the model can, for example tanh instead of sigmoid.
    """
    spans = [span for span in network.spans if not span.signals]
    if problem.bias_functional is None or not spans:  # without a bias, the scale of the input is unknown
        return False
    z = (problem.coordinates_to_preactivations / problem.bias_functional).T
    vectors = network.vectors(z, torch.zeros_like(z[:, 0], dtype=torch.long), spans)
    return any(float(span.share_outside(each)) > MIN_UNRELATED_SHARE for span, each in zip(spans, vectors, strict=True))


def without_search(problem: Problem) -> SearchOutcome:
    """Return the outcome for a gradient of rank zero, which shows no sample, or of rank one, with a single direction.

    A problem of rank one has a network only if its equations contradict this direction.
    """
    if problem.batch_size == 0:
        why = "the gradient is zero: no sample activates a neuron of this layer"
        return SearchOutcome(empty_pool(problem), stopped=why)
    why = "a single sample needs no search"
    if problem.network is not None:
        why = "the gradients of later layers contradict the only input that the gradient of this layer allows"
    one = problem.factors.left.new_ones(1, 1)
    return SearchOutcome(Pool(one, problem.zeros(one)), stopped=why)


def _choose(problem: Problem, pool: Pool, before: Selection | None) -> tuple[Selection, Evidence | None]:
    """Return the best b candidates, and their evidence if it ends the search, else None.

    The sparsest candidates are usually the right ones. They are selected at once if their evidence holds, or if there
    are no other candidates.
    """
    first = refit_to_patterns(problem, initial(problem, pool)[0])
    final = _final_evidence(problem, first)
    # If local training seems to have moved the weights (drift), a wrong direction can look consistent, so the other
    # candidates are tried as well.
    holds = final is not None and (first.score == 1.0 or final.numbers["drift"] == 0)
    if holds or (first.full and len(pool) == problem.batch_size):
        return first, final
    chosen = refit_to_patterns(problem, select(problem, pool, before))
    return chosen, _final_evidence(problem, chosen)


def _final_evidence(problem: Problem, chosen: Selection) -> Evidence | None:
    """Return the evidence of a selection if λ = 1 or every input is consistent; None for any other selection."""
    if not chosen.full:
        return None
    return certify(problem, chosen) if chosen.score == 1.0 else certify_whole(problem, chosen)
