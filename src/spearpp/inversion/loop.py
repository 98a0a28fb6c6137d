"""Search loop for one layer.

The loop runs a search round by round. Each round proposes candidate directions. The loop adds them to the pool, selects
the best b of them and checks their evidence. It stops when a selection has λ = 1 or only consistent inputs, when b
inputs match two layers, at the deadline, when the search has no more rounds, or at Ctrl-C.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from spearpp.inversion.evidence import Evidence, certify, certify_whole
from spearpp.inversion.matches import Matches
from spearpp.inversion.pairs import Pairs
from spearpp.inversion.pool import Pool, admit, empty_pool
from spearpp.inversion.problem import Problem
from spearpp.inversion.result import Clock, Progress
from spearpp.inversion.selection import Selection, initial, polish, select
from spearpp.inversion.solutions import Solutions, no_solutions
from spearpp.linalg.time_limit import OutOfTimeError
from spearpp.search import Search

INTERRUPTED = "the search was interrupted"
OUT_OF_TIME = "the time budget was spent"


@dataclass(frozen=True)
class SearchOutcome:
    """What a search found, and why it stopped."""

    pool: Pool
    selection: Selection | None
    """The b directions selected from the whole pool; None if the selection has not been made."""
    stopped: str
    starts: int = 0
    steps: int = 0
    matches: Matches | None = None
    """Inputs that match the equations of two layers; None if the search did not use the next layer."""
    pairs: Pairs | None = None
    """Inputs that single rows of the gradient revealed."""
    solutions: Solutions | None = None
    """Inputs that satisfy the equations of the whole network; None if the search did not use them."""
    rounds: int = 0
    interrupted: bool = False
    evidence: Evidence | None = None
    """Evidence for the selection, if it ended the search."""


def search_loop(
    problem: Problem,
    search: Search,
    generator: torch.Generator,
    progress: Callable[[Progress], None] | None,
    clock: Clock,
    deadline: float,
) -> SearchOutcome:
    """Run a search until the whole batch is found, the search has no more rounds, or Ctrl-C interrupts it.

    The caller sets the ``time_limit``. At the deadline the round that is running is given up.
    """
    b = problem.batch_size
    pool, rank, starts, steps, rounds = empty_pool(problem), 0, 0, 0, 0
    selection: Selection | None = None
    evidence: Evidence | None = None
    matches: Matches | None = None
    pairs: Pairs | None = None
    solutions: Solutions | None = None
    stopped = "the search ended"
    try:
        for proposed in clock.each("search", search.propose(problem, generator, deadline)):
            starts, steps, rounds = starts + proposed.starts, steps + proposed.steps, rounds + 1
            if proposed.matches is not None:
                matches = proposed.matches if matches is None else matches.join(proposed.matches)
            if proposed.solutions is not None:
                solutions = proposed.solutions if solutions is None else solutions.join(proposed.solutions)
            pairs = pairs if proposed.pairs is None else proposed.pairs
            with clock("pool"):
                grown = admit(pool, problem, proposed.directions, solved=proposed.solved)
            grew, pool = len(grown) > len(pool), grown
            if grew:
                with clock("filter"):
                    rank = rank if rank == b else pool.rank
                    selection, evidence = _choose(problem, pool, selection) if rank == b else (None, None)
            matched = max(0 if each is None else len(each) for each in (matches, solutions))
            if progress is not None:
                score = selection.score if selection else None
                progress(Progress(b, max(rank, matched), starts, search.starts, score, rounds))
            if matched == b or (grew and selection is not None and evidence is not None):
                whole = "the whole batch was found"
                return SearchOutcome(
                    pool, selection, whole, starts, steps, matches, pairs, solutions, rounds, evidence=evidence
                )
            if time.monotonic() >= deadline:
                stopped = OUT_OF_TIME
                break
    except (KeyboardInterrupt, OutOfTimeError) as ended:
        stopped = INTERRUPTED if isinstance(ended, KeyboardInterrupt) else OUT_OF_TIME
        selection = None  # it may belong to an earlier pool
    interrupted = stopped == INTERRUPTED
    if problem.network is not None:
        solutions = no_solutions(problem) if solutions is None else solutions
        stopped += f" with {len(solutions)} of {b} inputs that satisfy the equations of the network"
        return SearchOutcome(
            pool, None, stopped, starts, steps, solutions=solutions, rounds=rounds, interrupted=interrupted
        )
    stopped += f" with {rank} of {b} independent directions"
    stopped += f" and λ = {selection.score:.4f}" if selection is not None else ""
    stopped += f"; {len(matches)} inputs match two layers" if matches else ""
    return SearchOutcome(pool, selection, stopped, starts, steps, matches, pairs, None, rounds, interrupted)


def only_direction(problem: Problem) -> SearchOutcome:
    """The outcome for a gradient of rank one, which has a single direction."""
    left = problem.factors.left
    one = left.new_ones(1, 1)
    return SearchOutcome(Pool(one, problem.tolerance.zeros(left.T, one)), None, "a single sample needs no search")


def _choose(problem: Problem, pool: Pool, before: Selection | None) -> tuple[Selection, Evidence | None]:
    """The best b candidates, and their evidence if further search cannot improve the selection.

    The sparsest candidates are mostly right. If their evidence holds, or if there are no other candidates, the
    selection keeps them.
    """
    first = polish(problem, initial(problem, pool)[0])
    final = _final_evidence(problem, first)
    # Drift can explain a wrong direction.
    holds = final is not None and (first.score == 1.0 or final.numbers["drift"] == 0)
    if holds or (first.full and len(pool) == problem.batch_size):
        return first, final
    chosen = polish(problem, select(problem, pool, before))
    return chosen, _final_evidence(problem, chosen)


def _final_evidence(problem: Problem, chosen: Selection) -> Evidence | None:
    """The evidence of a selection with λ = 1 or with every input consistent; None for any other selection."""
    if not chosen.full:
        return None
    return certify(problem, chosen) if chosen.score == 1.0 else certify_whole(problem, chosen)
