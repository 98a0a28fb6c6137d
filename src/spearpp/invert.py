"""The main routine: one layer's gradients and weights in, the training batch out."""

import operator
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from spearpp.candidates import Pool, admit, empty_pool
from spearpp.certificate import Certificates, WitnessCertificates, agreement, certify, certify_sighted
from spearpp.errors import DtypeError, OptionError, ShapeError
from spearpp.filtering import Selection, polish, recover, select
from spearpp.observation import observe
from spearpp.problem import Problem, pose
from spearpp.search import Gated, Search
from spearpp.shapes import Bool, Float, Tensor
from spearpp.sightings import Sightings, inputs_of, settle
from spearpp.tolerance import INDEPENDENT
from spearpp.witness import Witness, call, few_outputs

Item = TypeVar("Item")


@dataclass(frozen=True)
class Progress:
    """How far a search has come, for whoever shows it."""

    batch_size: int
    """b, as read off the spectrum."""
    found: int
    """Independent directions in the pool, at most b."""
    starts: int
    """Starts spent so far."""
    total_starts: int
    """Starts at most."""
    score: float | None
    """λ of the best choice so far; None until b directions are there."""


@dataclass(frozen=True)
class Stats:
    """What an inversion cost and why it ended."""

    starts: int = 0
    steps: int = 0
    """Gradient steps summed over starts."""
    candidates: int = 0
    """Directions in the pool at the end."""
    found: int = 0
    """Directions of the result that were found; the others complete the basis."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By stage: decompose, search, pool, filter."""
    stopped: str = ""
    """Why it ended, in words."""


@dataclass(frozen=True, eq=False)
class Inversion:
    """What came out of a gradient.

    ``inputs[i]`` belongs to ``directions[i]``. With one witness and fewer directions found than samples,
    the last inputs come from the orthogonal complement and all of them are approximate. With two,
    every input that was seen is exact on its own, and only those are returned.
    """

    inputs: Float[Tensor, "k n"]
    """Recovered inputs. Where only the second witness certifies them, just the k it has seen."""
    certified: Bool[Tensor, "k"]
    """Exact by certificate, which needs no truth; see ``certificates``."""
    score: float
    """λ, the sparsity matching coefficient: the share of entries of D that are zero just where the
    recovered inputs silence the neuron."""
    batch_size: int
    """b: the samples visible in the gradient. Repeated samples count once, samples that fire no
    neuron not at all."""
    directions: Float[Tensor, "found b"]
    """The unit directions q found and used, one a row."""
    scale_known: bool
    """False for a layer without bias: inputs are then known up to a positive factor, and given with
    unit norm."""
    certificates: Certificates | WitnessCertificates | None
    """The evidence for each input; None if one witness found fewer directions than samples."""
    witness: str
    """What became of the next layer's gradient, in words: "not given", "used", or why not used."""
    stats: Stats

    @property
    def missing(self) -> int:
        """How many samples of the batch have not come back certified."""
        return self.batch_size - int(self.certified.sum())

    def __repr__(self) -> str:
        scale = "" if self.scale_known else ", up to scale"
        return (
            f"Inversion({int(self.certified.sum())} of {self.batch_size} inputs certified{scale}, "
            f"λ = {self.score:.6g}, {self.stats.starts:,} starts, {self.stats.stopped})"
        )


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
    ends before, what was found is completed by the orthogonal complement and returned, not certified.

    Where the ReLU feeds another Linear layer, that layer's gradient is a second witness (``witness``):
    batches of nearly m/2 samples then come back, and each input is exact and certified on its own.
    Only the gated search uses it; whether it helps is decided by what it finds.

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
    >>> result = spearpp.invert(*simulate.fedsgd(model, batch), search=spearpp.search.RiemannianAdam(starts=2048))
    >>> bool(result.certified.all()), result.score
    (True, 1.0)
    """
    search = Gated() if search is None else search
    _check_arguments(search, generator)
    batch_size = _whole_number(batch_size)
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    clock = _Clock()
    with clock("decompose"):
        seen = observe(grad_weight, grad_bias, weight, bias)
        problem = pose(seen, batch_size=batch_size, sparsity=search.sparsity)
        problem, witness = _with_witness(problem, next_grad_weight, next_weight)
    if problem.batch_size == 0:
        return _nothing(problem, witness, clock)
    outcome = (
        _only_direction(problem) if problem.batch_size == 1 else _search(problem, search, generator, progress, clock)
    )
    with clock("filter"):
        chosen = polish(problem, outcome.selection or select(problem, outcome.pool))
        inputs = recover(problem, chosen)
        certificates: Certificates | WitnessCertificates | None = certify(problem, chosen) if chosen.full else None
        certified = torch.zeros(len(inputs), dtype=torch.bool, device=inputs.device)
        certified = certified if certificates is None else certificates.exact
        directions, score = chosen.directions[: chosen.found], chosen.score
        whole = certificates is not None and bool(certificates.consistent.all())
        if problem.witness is not None and outcome.sightings and not whole:
            sighted = _from_sightings(problem, problem.witness, outcome.sightings)
            if int(sighted[1].consistent.sum()) > int(certified.sum()):
                inputs, certificates, score = sighted
                certified, directions = certificates.exact, outcome.sightings.directions
    return Inversion(
        inputs=inputs.to(seen.dtype),
        certified=certified,
        score=score,
        batch_size=problem.batch_size,
        directions=directions,
        scale_known=seen.has_bias,
        certificates=certificates,
        witness=witness if problem.witness is None else _heard(outcome.sightings),
        stats=Stats(
            starts=outcome.starts,
            steps=outcome.steps,
            candidates=len(outcome.pool),
            found=len(directions),
            seconds=clock.seconds,
            stopped=outcome.stopped,
        ),
    )


@dataclass(frozen=True)
class _Outcome:
    """What a search left behind."""

    pool: Pool
    selection: Selection | None
    """The choice from the whole pool, where it was made already."""
    stopped: str
    starts: int = 0
    steps: int = 0
    sightings: Sightings | None = None
    """What two witnesses have seen; None if the search did not ask the second."""


def _with_witness(problem: Problem, next_grad_weight: Tensor | None, next_weight: Tensor | None) -> tuple[Problem, str]:
    """The problem with its second witness, if there is one, and what became of it in words."""
    if (next_grad_weight is None) != (next_weight is None):
        missing = "next_grad_weight" if next_grad_weight is None else "next_weight"
        raise ShapeError(f"{missing} is missing: the second witness needs the next layer's gradient and its weight")
    if next_grad_weight is None or next_weight is None:
        return problem, "not given"
    for name, tensor in (("next_grad_weight", next_grad_weight), ("next_weight", next_weight)):
        if not isinstance(tensor, Tensor):
            raise DtypeError(f"{name} is a {type(tensor).__name__}, not a torch.Tensor")
        if tensor.device != problem.seen.weight.device:
            raise DtypeError(f"{name} is on {tensor.device}, weight on {problem.seen.weight.device}: use one device")
    if problem.batch_size < 2:
        observe(next_grad_weight, None, next_weight, None, prefix="next_")
        return problem, "not needed"
    witness, why = call(next_grad_weight, next_weight, problem.preactivations.shape[0], problem.batch_size)
    if witness is None:
        back = few_outputs(next_grad_weight, next_weight, problem.batch_size)
        if back is not None:
            why = f"{why}; its weights leave {back.shape[1]} unknowns to a column of D"
        return replace(problem, back=back), why
    for name, matrix in (("this layer's weights", problem.preactivations), ("the next layer's", witness.back)):
        pivots = torch.linalg.qr(matrix)[1].diagonal().abs()
        if bool(pivots.min() <= INDEPENDENT * pivots.max()):
            return problem, f"not used: {name} do not tell {problem.batch_size} samples apart"
    return replace(problem, witness=witness), why


def _heard(sightings: Sightings | None) -> str:
    if sightings is None:
        return "not used by this search"
    if not len(sightings):
        return "set aside: no input fits it (dropout or a skip connection between the layers, local steps, noise)"
    return "used"


def _from_sightings(problem: Problem, witness: Witness, seen: Sightings) -> tuple[Tensor, WitnessCertificates, float]:
    """Inputs from their own points, their evidence, and the share of masks that agree."""
    settled = settle(problem, witness, seen.points, seen, own=True)
    inputs = inputs_of(problem, settled.points)
    return inputs, certify_sighted(problem, witness, seen, settled), agreement(problem, seen, settled)


def _only_direction(problem: Problem) -> _Outcome:
    """b = 1: there is one direction, and nothing to search."""
    left = problem.factors.left
    one = left.new_ones(1, 1)
    return _Outcome(Pool(one, problem.tolerance.zeros(left.T, one)), None, "a single sample needs no search")


def _search(
    problem: Problem,
    search: Search,
    generator: torch.Generator,
    progress: Callable[[Progress], None] | None,
    clock: "_Clock",
) -> _Outcome:
    """Fill the pool until a choice of it scores λ = 1 or the search ends."""
    b = problem.batch_size
    pool, rank, starts, steps = empty_pool(problem), 0, 0, 0
    selection: Selection | None = None
    sightings: Sightings | None = None
    for proposed in clock.each("search", search.propose(problem, generator)):
        starts, steps = starts + proposed.starts, steps + proposed.steps
        if proposed.sightings is not None:
            sightings = proposed.sightings if sightings is None else sightings.join(proposed.sightings)
        with clock("pool"):
            grown = admit(pool, problem, proposed.directions)
        grew, pool = len(grown) > len(pool), grown
        if grew:
            with clock("filter"):
                rank = rank if rank == b else pool.rank
                selection = select(problem, pool) if rank == b else None
        sighted = 0 if sightings is None else len(sightings)
        if progress is not None:
            score = selection.score if selection else None
            progress(Progress(b, max(rank, sighted), starts, search.starts, score))
        if sighted == b or (grew and selection is not None and _settled(problem, selection)):
            return _Outcome(pool, selection, "the whole batch was found", starts, steps, sightings)
    stopped = f"the search ended with {rank} of {b} independent directions"
    stopped += f" and λ = {selection.score:.4f}" if selection is not None else ""
    stopped += f"; two witnesses saw {len(sightings)}" if sightings else ""
    return _Outcome(pool, selection, stopped, starts, steps, sightings)


def _nothing(problem: Problem, witness: str, clock: "_Clock") -> Inversion:
    left, n = problem.factors.left, problem.seen.weight.shape[1] - problem.seen.has_bias
    return Inversion(
        inputs=left.new_zeros(0, n, dtype=problem.seen.dtype),
        certified=torch.zeros(0, dtype=torch.bool, device=left.device),
        score=0.0,
        batch_size=0,
        directions=left.new_zeros(0, 0),
        scale_known=problem.seen.has_bias,
        certificates=None,
        witness=witness,
        stats=Stats(seconds=clock.seconds, stopped="the gradient is zero: no sample fires a neuron of this layer"),
    )


def _settled(problem: Problem, selection: Selection) -> bool:
    """Whether more searching could not improve the choice: λ = 1, or every input certified."""
    if not selection.full:
        return False
    return selection.score == 1.0 or bool(certify(problem, polish(problem, selection)).consistent.all())


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


class _Clock:
    """Seconds by stage, of the host and of whatever the stage left running on a GPU."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - began

    def each(self, stage: str, items: Iterator[Item]) -> Iterator[Item]:
        """The same items, with the time each takes to arrive counted for the stage."""
        while True:
            with self(stage):
                item = next(items, None)
            if item is None:
                return
            yield item
