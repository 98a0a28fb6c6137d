"""The main routine: one layer's gradients and weights in, the training batch out."""

import operator
from collections.abc import Callable
from dataclasses import replace

import torch

from spearpp.errors import OptionError
from spearpp.inversion.assemble import assemble
from spearpp.inversion.clock import Clock
from spearpp.inversion.loop import only_direction, search_loop
from spearpp.inversion.matches import Matches
from spearpp.inversion.next_layer import read_next_layer
from spearpp.inversion.observation import observe
from spearpp.inversion.problem import Problem, pose
from spearpp.inversion.result import Inversion, Progress, Stats
from spearpp.linalg.threads import single_thread_if_small
from spearpp.search import Gated, Search
from spearpp.types import Tensor, to_device


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
    dropout: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Inversion:
    """Recover the inputs of a Linear layer followed by ReLU from its gradient.

    The gradient is D Xᵀ with half of D zero. From any factorisation L R of it, the columns of the
    one Q with D = L Q are the directions q that make L q sparse; given them all, Xᵀ = Q⁻¹ R.
    ``search`` looks for such directions; the pool keeps the sparse ones; the weights tell which b of
    them belong together, by λ; at λ = 1, or once every input is certified, the search stops. If it
    ends before, what was found is completed by the orthogonal complement and returned, not certified; or
    only those inputs that single rows of the gradient gave away, where there are such.

    Where the ReLU feeds another Linear layer, that layer's gradient is a second witness (``next_layer``):
    batches of nearly m/2 samples then come back, and each input is exact and certified on its own.
    Only the gated search uses it; whether it helps is decided by what it finds.

    A gradient of rank one is inverted whatever follows the layer: its rows are multiples of the input. Such an
    input, and every other certified one, is one training sample or the weighted mean of several that activate the
    same neurons with proportional signals; nothing in one layer's gradient tells these apart.

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
        dropout: whether Dropout follows the ReLU, so that firing neurons may have no gradient.
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
        reading = read_next_layer(next_grad_weight, next_weight, problem.preactivations)
        problem = replace(problem, next_layer=reading.next_layer, outputs=reading.outputs, dropout=dropout)
    if problem.batch_size == 0:
        return _nothing(problem, reading.why, clock)
    if isinstance(search, Gated) and search.settles_on_host(problem):
        problem = problem.on(torch.device("cpu"))
    left = problem.factors.left
    with single_thread_if_small(left.numel(), left.device):
        outcome = (
            only_direction(problem)
            if problem.batch_size == 1
            else search_loop(problem, search, generator, progress, clock)
        )
        with clock("filter"):
            try:
                recovered = assemble(problem, outcome)
            except KeyboardInterrupt:  # the search is over: what it found is certified all the same
                outcome = replace(outcome, interrupted=True)
                recovered = assemble(problem, outcome)
    zeros = _zeros(problem, recovered.directions).to(seen.device)
    fits = recovered.certified if bool(recovered.certified.all()) else recovered.certified | recovered.fits(problem)
    recovered, factors = to_device(recovered, seen.device), to_device(problem.factors, seen.device)
    return Inversion(
        inputs=recovered.inputs.to(seen.dtype),
        certified=recovered.certified,
        score=recovered.score,
        batch_size=problem.batch_size,
        directions=recovered.directions,
        scale_known=seen.has_bias,
        certificates=recovered.certificates,
        spectrum=factors.spectrum,
        zeros=zeros,
        fits=fits.to(seen.device),
        next_layer=reading.why if problem.next_layer is None else _heard(outcome.matches),
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
        factors=factors,
    )


def _heard(matches: Matches | None) -> str:
    """What came of a witness, in words."""
    if matches is None:
        return "not used by this search"
    if not len(matches):
        return "set aside: no input fits it (dropout or a skip connection between the layers, local steps, noise)"
    return "used"


def _zeros(problem: Problem, directions: Tensor) -> Tensor:
    """Neurons that have a gradient, but none from the input of each direction."""
    zeros = problem.tolerance.zeros(directions @ problem.factors.left.T, directions)
    return (zeros & problem.factors.live).sum(1)


def _nothing(problem: Problem, next_layer: str, clock: Clock) -> Inversion:
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
        fits=torch.zeros(0, dtype=torch.bool, device=left.device),
        next_layer=next_layer,
        stats=Stats(seconds=clock.seconds, stopped="the gradient is zero: no sample fires a neuron of this layer"),
    )


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
