"""The search of one layer: fill the pool until a choice of it settles the batch, or the search is ended."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from spearpp.inversion.clock import Clock
from spearpp.inversion.evidence import Certificates, certify, certify_whole
from spearpp.inversion.matches import Matches
from spearpp.inversion.pairs import Pairs
from spearpp.inversion.pool import Pool, admit, empty_pool
from spearpp.inversion.problem import Problem
from spearpp.inversion.result import Progress
from spearpp.inversion.selection import Selection, initial, polish, select
from spearpp.search import Search

INTERRUPTED = "the search was interrupted"


@dataclass(frozen=True)
class SearchOutcome:
    """What a search left behind."""

    pool: Pool
    selection: Selection | None
    """The choice from the whole pool, polished, where it was made already."""
    stopped: str
    starts: int = 0
    steps: int = 0
    matches: Matches | None = None
    """What two witnesses have seen; None if the search did not ask the second."""
    pairs: Pairs | None = None
    """What single rows gave away."""
    rounds: int = 0
    interrupted: bool = False
    certificates: Certificates | None = None
    """Of the choice, where it settles the search."""


def search_loop(
    problem: Problem,
    search: Search,
    generator: torch.Generator,
    progress: Callable[[Progress], None] | None,
    clock: Clock,
) -> SearchOutcome:
    """Fill the pool until a choice of it scores λ = 1, the search ends or somebody ends it."""
    b = problem.batch_size
    pool, rank, starts, steps, rounds = empty_pool(problem), 0, 0, 0, 0
    selection: Selection | None = None
    certificates: Certificates | None = None
    matches: Matches | None = None
    pairs: Pairs | None = None
    stopped = "the search ended"
    try:
        for proposed in clock.each("search", search.propose(problem, generator)):
            starts, steps, rounds = starts + proposed.starts, steps + proposed.steps, rounds + 1
            if proposed.matches is not None:
                matches = proposed.matches if matches is None else matches.join(proposed.matches)
            pairs = pairs if proposed.pairs is None else proposed.pairs
            with clock("pool"):
                grown = admit(pool, problem, proposed.directions, solved=proposed.solved)
            grew, pool = len(grown) > len(pool), grown
            if grew:
                with clock("filter"):
                    rank = rank if rank == b else pool.rank
                    selection, certificates = _choose(problem, pool, selection) if rank == b else (None, None)
            sighted = 0 if matches is None else len(matches)
            if progress is not None:
                score = selection.score if selection else None
                progress(Progress(b, max(rank, sighted), starts, search.starts, score, rounds))
            if sighted == b or (grew and selection is not None and certificates is not None):
                whole = "the whole batch was found"
                return SearchOutcome(
                    pool, selection, whole, starts, steps, matches, pairs, rounds, certificates=certificates
                )
    except KeyboardInterrupt:
        stopped = INTERRUPTED
        selection = None  # of an earlier pool, perhaps
    interrupted = stopped == INTERRUPTED
    stopped += f" with {rank} of {b} independent directions"
    stopped += f" and λ = {selection.score:.4f}" if selection is not None else ""
    stopped += f"; two witnesses saw {len(matches)}" if matches else ""
    return SearchOutcome(pool, selection, stopped, starts, steps, matches, pairs, rounds, interrupted)


def only_direction(problem: Problem) -> SearchOutcome:
    """b = 1: there is one direction, and nothing to search."""
    left = problem.factors.left
    one = left.new_ones(1, 1)
    return SearchOutcome(Pool(one, problem.tolerance.zeros(left.T, one)), None, "a single sample needs no search")


def _choose(problem: Problem, pool: Pool, before: Selection | None) -> tuple[Selection, Certificates | None]:
    """The best b candidates, and their certificates if more searching could not improve the choice.

    The sparsest are mostly right: where they hold, or where there are no others, nothing is swapped.
    """
    first = polish(problem, initial(problem, pool)[0])
    settled = _settling(problem, first)
    holds = settled is not None and (first.score == 1.0 or settled.drift == 0)  # drift can explain a wrong direction
    if holds or (first.full and len(pool) == problem.batch_size):
        return first, settled
    chosen = polish(problem, select(problem, pool, before))
    return chosen, _settling(problem, chosen)


def _settling(problem: Problem, chosen: Selection) -> Certificates | None:
    """The certificates of a choice with λ = 1 or every input consistent; None for any other."""
    if not chosen.full:
        return None
    return certify(problem, chosen) if chosen.score == 1.0 else certify_whole(problem, chosen)
