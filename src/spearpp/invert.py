"""The main routine: one layer's gradients and weights in, the training batch out."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from spearpp import sphere
from spearpp.candidates import Pool, admit, empty_pool
from spearpp.certificate import (
    Certificates,
    WitnessCertificates,
    agreement,
    certify,
    certify_sighted,
    certify_strongest,
)
from spearpp.clock import Clock
from spearpp.errors import OptionError
from spearpp.filtering import Selection, fix_scale, initial, inputs_at, polish, recover, select, steadiest_first
from spearpp.observation import observe
from spearpp.pairs import Pairs, fits
from spearpp.problem import Problem, pose
from spearpp.result import Inversion, Progress, Stats
from spearpp.search import Gated, Search
from spearpp.shapes import Tensor, pick
from spearpp.sightings import Sightings, inputs_of, settle
from spearpp.witness import consult

INTERRUPTED = "the search was interrupted"


def invert(
    grad_weight: Tensor,
    grad_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *,
    next_grad_weight: Tensor | None = None,
    next_weight: Tensor | None = None,
    search: Search | None = None,
    batch_size: int | None = None,
    generator: torch.Generator | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Inversion:
    """Recover the inputs of a Linear layer followed by ReLU from its gradient.

    The gradient is D Xᵀ with half of D zero. From any factorisation L R of it, the columns of the
    one Q with D = L Q are the directions q that make L q sparse; given them all, Xᵀ = Q⁻¹ R.
    ``search`` looks for such directions; the pool keeps the sparse ones; the weights tell which b of
    them belong together, by λ; at λ = 1, or once every input is certified, the search stops. If it
    ends before, what was found is completed by the orthogonal complement and returned, not certified; or
    only those inputs that single rows of the gradient gave away, where there are such.

    Where the ReLU feeds another Linear layer, that layer's gradient is a second witness (``witness``):
    batches of nearly m/2 samples then come back, and each input is exact and certified on its own.
    Only the gated search uses it; whether it helps is decided by what it finds.

    Ctrl-C ends the search, not the call: what was found until then is certified and returned, and
    ``stats.interrupted`` says so. A second one ends the call.

    Args:
        grad_weight: dL/dW, (m, n), any float dtype, CPU or CUDA.
        grad_bias: dL/db, (m,), or None together with ``bias`` for a layer without bias.
        weight: W, (m, n), as the client had it.
        bias: b, (m,).
        next_grad_weight: dL/dW₂ of the Linear layer that takes this one's ReLU, (m₂, m), or None.
        next_weight: W₂, (m₂, m); both or neither.
        search: how to look; None is ``spearpp.search.Gated()``.
        batch_size: b; None reads it off the spectrum.
        generator: source of randomness; None is a generator with seed 0.
        progress: called after every chunk of starts.

    Returns:
        The inversion. "Not found" is a result, not an error.

    Raises:
        SpearError: one of its subclasses, for input that is not a layer's gradient.

    >>> import torch, spearpp
    >>> from spearpp import simulate
    >>> batch = simulate.random_batch(6, features=30, generator=torch.Generator().manual_seed(1))
    >>> model = simulate.mlp(30, [90, 90], 10, generator=torch.Generator().manual_seed(2))
    >>> result = spearpp.invert(*simulate.fedsgd(model, batch)[0], search=spearpp.search.RiemannianAdam(starts=2048))
    >>> bool(result.certified.all()), result.score
    (True, 1.0)
    """
    search = Gated() if search is None else search
    _check_arguments(search, generator)
    batch_size = _whole_number(batch_size)
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    clock = Clock()
    with clock("decompose"):
        seen = observe(grad_weight, grad_bias, weight, bias)
        problem = pose(seen, batch_size=batch_size, sparsity=search.sparsity)
        next_layer = consult(next_grad_weight, next_weight, problem.preactivations)
        problem = replace(problem, witness=next_layer.witness, outputs=next_layer.outputs)
    if problem.batch_size == 0:
        return _nothing(problem, next_layer.why, clock)
    outcome = (
        _only_direction(problem) if problem.batch_size == 1 else _search(problem, search, generator, progress, clock)
    )
    with clock("filter"):
        try:
            recovered = _finish(problem, outcome)
        except KeyboardInterrupt:  # the search is over: what it found is certified all the same
            outcome = replace(outcome, interrupted=True)
            recovered = _finish(problem, outcome)
    return Inversion(
        inputs=recovered.inputs.to(seen.dtype),
        certified=recovered.certified,
        score=recovered.score,
        batch_size=problem.batch_size,
        directions=recovered.directions,
        scale_known=seen.has_bias,
        certificates=recovered.certificates,
        spectrum=problem.factors.spectrum,
        zeros=_zeros(problem, recovered.directions),
        witness=next_layer.why if problem.witness is None else _heard(outcome.sightings),
        stats=Stats(
            starts=outcome.starts,
            steps=outcome.steps,
            candidates=len(outcome.pool),
            found=len(recovered.directions),
            seconds=clock.seconds,
            stopped=outcome.stopped,
            rounds=outcome.rounds,
            interrupted=outcome.interrupted,
        ),
    )


@dataclass(frozen=True)
class _Outcome:
    """What a search left behind."""

    pool: Pool
    selection: Selection | None
    """The choice from the whole pool, polished, where it was made already."""
    stopped: str
    starts: int = 0
    steps: int = 0
    sightings: Sightings | None = None
    """What two witnesses have seen; None if the search did not ask the second."""
    pairs: Pairs | None = None
    """What single rows gave away."""
    rounds: int = 0
    interrupted: bool = False
    certificates: Certificates | None = None
    """Of the choice, where it settles the search."""


def _heard(sightings: Sightings | None) -> str:
    """What came of a witness, in words."""
    if sightings is None:
        return "not used by this search"
    if not len(sightings):
        return "set aside: no input fits it (dropout or a skip connection between the layers, local steps, noise)"
    return "used"


@dataclass(frozen=True)
class _Recovered:
    """Inputs with their evidence, row by row."""

    inputs: Tensor
    certified: Tensor
    directions: Tensor
    certificates: Certificates | WitnessCertificates | None
    score: float


def _finish(problem: Problem, outcome: _Outcome) -> _Recovered:
    """Inputs from all directions together if these hold; else the strongest ones, or those that two witnesses saw."""
    chosen = outcome.selection or polish(problem, select(problem, outcome.pool))
    best = _together(problem, chosen, outcome.certificates)
    whole = best.certificates is not None and bool(best.certificates.consistent.all())
    if whole and (bool(best.certified.all()) or not outcome.sightings):
        return best
    if not whole:
        best = _most_certified(best, _strongest(problem, chosen))
        chosen = polish(problem, select(problem, outcome.pool, order=steadiest_first(problem, outcome.pool)))
        best = _most_certified(best, _together(problem, chosen))
        best = _most_certified(best, _strongest(problem, chosen))
        if outcome.pairs is not None and best.certificates is None:
            best = _peeled(problem, outcome.pairs, chosen.score) or best
    if problem.witness is None or not outcome.sightings:
        return best
    seen = outcome.sightings
    settled = settle(problem, problem.witness, seen.points, seen, own=True)
    testimony = certify_sighted(problem, problem.witness, seen, settled)
    # Where all are in the batch up to their error, only more exact ones are worth the others.
    if int((testimony.exact if whole else testimony.consistent).sum()) <= int(best.certified.sum()):
        return best
    score = agreement(problem, seen, settled)
    return _certified_first(inputs_of(problem, settled.points), seen.directions, testimony, score)


def _together(problem: Problem, chosen: Selection, certificates: Certificates | None = None) -> _Recovered:
    """The inputs that all directions give together; without a certificate if some were not found."""
    inputs = recover(problem, chosen)
    if chosen.full:
        certificates = certificates or certify(problem, chosen)
        return _certified_first(inputs, chosen.directions, certificates, chosen.score)
    none = torch.zeros(len(inputs), dtype=torch.bool, device=inputs.device)
    return _Recovered(inputs, none, chosen.directions[: chosen.found], None, chosen.score)


def _peeled(problem: Problem, pairs: Pairs, score: float) -> _Recovered | None:
    """The inputs that single rows gave away, where others were not found; None if none of them holds by itself.

    They are not certified: that a faint sample hides in such a row cannot be ruled out.
    """
    units = sphere.retract(pairs.directions)
    zeros = problem.tolerance.zeros(units @ problem.factors.left.T, units)
    held = fits(problem, pairs.points, zeros) & (fix_scale(problem, pairs.points, zeros) > 0)
    if not bool(held.any()):
        return None
    none = torch.zeros(int(held.sum()), dtype=torch.bool, device=units.device)
    return _Recovered(inputs_at(problem, pairs.points[held], zeros[held]), none, units[held], None, score)


def _strongest(problem: Problem, chosen: Selection) -> _Recovered | None:
    """The strongest inputs, where weaker ones do not hold."""
    found = certify_strongest(problem, chosen)
    if found is None:
        return None
    inputs = inputs_at(problem, found.relied.points, found.zeros)
    return _certified_first(inputs, found.relied.directions, found.certificates, chosen.score)


def _most_certified(first: _Recovered, other: _Recovered | None) -> _Recovered:
    """The other if it certifies more."""
    return first if other is None or int(other.certified.sum()) <= int(first.certified.sum()) else other


def _certified_first(
    inputs: Tensor, directions: Tensor, certificates: Certificates | WitnessCertificates, score: float
) -> _Recovered:
    order = certificates.exact.int().argsort(descending=True, stable=True)
    certificates = pick(certificates, order)
    return _Recovered(inputs[order], certificates.exact, directions[order], certificates, score)


def _only_direction(problem: Problem) -> _Outcome:
    """b = 1: there is one direction, and nothing to search."""
    left = problem.factors.left
    one = left.new_ones(1, 1)
    return _Outcome(Pool(one, problem.tolerance.zeros(left.T, one)), None, "a single sample needs no search")


def _zeros(problem: Problem, directions: Tensor) -> Tensor:
    """Neurons that have a gradient, but none from the input of each direction."""
    zeros = problem.tolerance.zeros(directions @ problem.factors.left.T, directions)
    return (zeros & problem.factors.live).sum(1)


def _search(
    problem: Problem,
    search: Search,
    generator: torch.Generator,
    progress: Callable[[Progress], None] | None,
    clock: Clock,
) -> _Outcome:
    """Fill the pool until a choice of it scores λ = 1, the search ends or somebody ends it."""
    b = problem.batch_size
    pool, rank, starts, steps, rounds = empty_pool(problem), 0, 0, 0, 0
    selection: Selection | None = None
    certificates: Certificates | None = None
    sightings: Sightings | None = None
    pairs: Pairs | None = None
    stopped = "the search ended"
    try:
        for proposed in clock.each("search", search.propose(problem, generator)):
            starts, steps, rounds = starts + proposed.starts, steps + proposed.steps, rounds + 1
            if proposed.sightings is not None:
                sightings = proposed.sightings if sightings is None else sightings.join(proposed.sightings)
            pairs = pairs if proposed.pairs is None else proposed.pairs
            with clock("pool"):
                grown = admit(pool, problem, proposed.directions)
            grew, pool = len(grown) > len(pool), grown
            if grew:
                with clock("filter"):
                    rank = rank if rank == b else pool.rank
                    selection, certificates = _choose(problem, pool, selection) if rank == b else (None, None)
            sighted = 0 if sightings is None else len(sightings)
            if progress is not None:
                score = selection.score if selection else None
                progress(Progress(b, max(rank, sighted), starts, search.starts, score, rounds))
            if sighted == b or (grew and selection is not None and certificates is not None):
                whole = "the whole batch was found"
                return _Outcome(
                    pool, selection, whole, starts, steps, sightings, pairs, rounds, certificates=certificates
                )
    except KeyboardInterrupt:
        stopped = INTERRUPTED
        selection = None  # of an earlier pool, perhaps
    interrupted = stopped == INTERRUPTED
    stopped += f" with {rank} of {b} independent directions"
    stopped += f" and λ = {selection.score:.4f}" if selection is not None else ""
    stopped += f"; two witnesses saw {len(sightings)}" if sightings else ""
    return _Outcome(pool, selection, stopped, starts, steps, sightings, pairs, rounds, interrupted)


def _nothing(problem: Problem, witness: str, clock: Clock) -> Inversion:
    left, n = problem.factors.left, problem.seen.weight.shape[1] - problem.seen.has_bias
    return Inversion(
        inputs=left.new_zeros(0, n, dtype=problem.seen.dtype),
        certified=torch.zeros(0, dtype=torch.bool, device=left.device),
        score=0.0,
        batch_size=0,
        directions=left.new_zeros(0, 0),
        scale_known=problem.seen.has_bias,
        certificates=None,
        spectrum=left.new_zeros(0),
        zeros=torch.zeros(0, dtype=torch.int64, device=left.device),
        witness=witness,
        stats=Stats(seconds=clock.seconds, stopped="the gradient is zero: no sample fires a neuron of this layer"),
    )


def _choose(problem: Problem, pool: Pool, before: Selection | None) -> tuple[Selection, Certificates | None]:
    """The best b candidates, and their certificates if more searching could not improve the choice.

    The sparsest are mostly right: where they hold, nothing is swapped.
    """
    first = polish(problem, initial(problem, pool)[0])
    settled = _settling(problem, first)
    if settled is not None and (first.score == 1.0 or settled.drift == 0):  # drift can explain a wrong direction
        return first, settled
    chosen = polish(problem, select(problem, pool, before))
    return chosen, _settling(problem, chosen)


def _settling(problem: Problem, chosen: Selection) -> Certificates | None:
    """The certificates of a choice with λ = 1 or every input consistent; None for any other."""
    if not chosen.full:
        return None
    certificates = certify(problem, chosen)
    return certificates if chosen.score == 1.0 or bool(certificates.consistent.all()) else None


def _check_arguments(search: Search, generator: torch.Generator | None) -> None:
    if isinstance(search, type) or not isinstance(search, Search):
        raise OptionError(f"search={search!r}: pass a search object, for example spearpp.search.RiemannianAdam()")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise OptionError(f"generator={generator!r}: pass a torch.Generator, or None for one with seed 0")


def _whole_number(batch_size: int | None) -> int | None:
    if batch_size is None:
        return None
    try:
        if isinstance(batch_size, bool):
            raise TypeError
        return operator.index(batch_size)
    except TypeError:
        message = f"batch_size={batch_size!r}: a whole number, or None to read it off the spectrum"
        raise OptionError(message) from None
