"""Recover the inputs of one layer from its gradient and weights."""

import math
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from spearpp.errors import OptionError
from spearpp.inversion.assemble import Recovered, assemble, no_inputs
from spearpp.inversion.levels import with_input_noise
from spearpp.inversion.loop import SearchOutcome, contradicts, search_loop, without_search
from spearpp.inversion.matches import Matches
from spearpp.inversion.network import network_equations
from spearpp.inversion.next_layer import read_next_layer
from spearpp.inversion.observation import observe
from spearpp.inversion.problem import Problem, pose
from spearpp.inversion.result import Clock, Inversion, Progress, Stats
from spearpp.linalg.chunks import MIN_GRAM_ENTRIES_FOR_THREADS, single_thread_if_small
from spearpp.linalg.time_limit import time_limit
from spearpp.model.following import Following
from spearpp.search import Equations, Gated, Search
from spearpp.types import Tensor, to_device


def invert(
    grad_weight: Tensor,
    grad_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *,
    next_grad_weight: Tensor | None = None,
    next_weight: Tensor | None = None,
    following: Following | Sequence[Following] | None = None,
    search: Search | None = None,
    batch_size: int | None = None,
    generator: torch.Generator | None = None,
    dropout: bool = False,
    one_step: bool = False,
    rounds: int = 1,
    seconds: float | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Inversion:
    """Recover the inputs of a Linear layer from its gradient.

    If a ReLU follows the layer, the gradient is D Xᵀ, and about half of the entries of D are zero. For any
    factorisation L R of the gradient there is one matrix Q with D = L Q and Xᵀ = Q⁻¹ R. The columns of Q are the
    directions q for which L q is sparse. ``search`` proposes such directions, and the pool keeps the sparse ones. The
    weights of the layer decide which b of them belong together, by the score λ. ``spearpp.inversion.loop`` says when
    the search stops. If the search ends before the whole batch is found, an orthonormal basis of the complement takes
    the place of the missing directions, and all inputs are returned without certificates. But if single rows of the
    gradient revealed some inputs, only these inputs are returned.

    If the ReLU feeds another Linear layer, the gradient of that layer gives a second set of equations
    (``spearpp.inversion.next_layer``). Batches of nearly m/2 samples are then recovered, and each input is certified on
    its own. Only the gated search uses the next layer.

    If another activation follows, pass the rest of the network (``following``). The equations of all its layers then
    determine each input on its own (``spearpp.inversion.network``).

    A gradient of rank one is inverted whatever follows the layer, because its rows are multiples of the input. A
    certified input is one training sample, or the weighted mean of several samples that activate the same neurons with
    proportional signals. The gradient of one layer cannot distinguish these two cases.

    Ctrl-C ends the search, not the call: the inputs found until then are certified and returned, and
    ``stats.interrupted`` is True. A second Ctrl-C ends the call.

    Args:
        grad_weight: dℒ/dW, the gradient of the loss ℒ with respect to the weight, of shape (m, n). Any float dtype, on
            a CPU or a CUDA device.
        grad_bias: the gradient of the bias, of shape (m,). None together with ``bias`` for a layer without bias.
        weight: W, of shape (m, n), with which the client computed the gradient.
        bias: the bias, of shape (m,), with which the client computed the gradient.
        next_grad_weight: dℒ/dW₂ of the Linear layer that follows the ReLU, of shape (m₂, m), or None.
        next_weight: W₂, of shape (m₂, m). Pass both arguments of the next layer or neither.
        following: the rest of the network (``spearpp.model.following.Following``), for any activation. Its equations
            are solved instead of searching for sparse directions. With ``rounds`` above 1, a list with the rest of the
            network in each round.
        search: the search to run; None is ``spearpp.search.Equations()`` if ``following`` is given, else
            ``spearpp.search.Gated()``.
        batch_size: the number of samples in the batch, if it is known. It is used where the spectrum of the gradient
            does not show a clear rank. A clear rank may be smaller: samples may repeat or activate no neuron.
        generator: source of randomness; None is a generator with seed 0.
        dropout: whether Dropout follows the ReLU, so that active neurons may have no gradient.
        one_step: whether the gradient is known to come from one step, not from local training. Movement of the weights
            then cannot explain a contradiction. ``spearpp.audit`` passes True for the gradient of a single client.
        rounds: number of rounds of one client. The rows of all rounds form the layer, one round below the other. A
            sample may be absent from some rounds. The tensors of the next layer are those of all rounds side by side,
            of shape (m₂, rounds · m).
        seconds: wall-clock budget of the search; None for no limit. A round of the search that is still running at the
            end of the budget is discarded.
        progress: called after every round of the search.

    Returns:
        The inversion. If nothing is found, the inversion says so; this is not an error.

    Raises:
        SpearError: one of its subclasses, if the arguments are not the gradient of a layer.

    >>> import torch, spearpp
    >>> from spearpp import simulate
    >>> batch = simulate.random_batch(6, features=30, generator=torch.Generator().manual_seed(1))
    >>> model = simulate.mlp(30, [90, 90], 10, generator=torch.Generator().manual_seed(2))
    >>> result = spearpp.invert(*simulate.fedsgd(model, batch)[0], search=spearpp.search.RiemannianAdam(starts=2048))
    >>> bool(result.certified.all()), result.score
    (True, 1.0)
    """
    if search is None:
        search = Gated() if following is None else Equations()
    _check_arguments(search, generator, seconds)
    if rounds < 1 or len(grad_weight) % rounds:
        raise OptionError(f"rounds={rounds}: {len(grad_weight)} rows cannot be divided into as many equal parts")
    batch_size = _whole_number(batch_size)
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    clock = Clock()
    with clock("decompose"):
        seen = observe(grad_weight, grad_bias, weight, bias)
        with single_thread_if_small(min(seen.gradient.shape) ** 2, seen.device, MIN_GRAM_ENTRIES_FOR_THREADS):
            problem = pose(seen, batch_size=batch_size, sparsity=search.sparsity)
            reading = read_next_layer(next_grad_weight, next_weight, problem.preactivations, rounds)
            problem = replace(problem, next_layer=reading.next_layer, outputs=reading.outputs)
            problem = replace(problem, dropout=dropout, one_step=one_step, rounds=rounds)
            if following is not None and problem.batch_size > 0:
                rests = [following] if isinstance(following, Following) else following
                network = with_input_noise(network_equations(rests, problem.factors, seen), problem.factors, seen)
                if problem.batch_size > 1 or contradicts(network, problem):
                    problem = replace(problem, network=network)
    if problem.batch_size == 0:
        outcome, recovered = without_search(problem), no_inputs(problem)
    else:
        problem = search.place(problem)
        outcome, recovered = _search(problem, search, generator, seconds, progress, clock)
    next_layer = reading.why if problem.next_layer is None else _use_of_next_layer(outcome.matches)
    return _inversion(problem, outcome, recovered, next_layer, clock)


def _search(
    problem: Problem,
    search: Search,
    generator: torch.Generator,
    seconds: float | None,
    progress: Callable[[Progress], None] | None,
    clock: Clock,
) -> tuple[SearchOutcome, Recovered]:
    """Run the search, if the gradient has more than one sample, and assemble the inputs from what it found."""
    left = problem.factors.left
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    with single_thread_if_small(left.numel(), left.device):
        if problem.batch_size == 1:
            outcome = without_search(problem)
        else:
            with time_limit(deadline):
                outcome = search_loop(problem, search, generator, progress, clock, deadline)
        with clock("filter"):
            try:
                return outcome, assemble(problem, outcome)
            except KeyboardInterrupt:  # the search is over, and certifying its result does not take long
                outcome = replace(outcome, interrupted=True)
                return outcome, assemble(problem, outcome)


def _inversion(
    problem: Problem, outcome: SearchOutcome, recovered: Recovered, next_layer: str, clock: Clock
) -> Inversion:
    """Return the result on the device of the gradient."""
    seen = problem.seen
    zeros = problem.zeros(recovered.directions)
    zeros = (zeros & problem.factors.live).sum(1).to(seen.device)
    fits = recovered.certified if bool(recovered.certified.all()) else recovered.certified | recovered.fits(problem)
    recovered, factors = to_device(recovered, seen.device), to_device(problem.factors, seen.device)
    return Inversion(
        inputs=recovered.inputs.to(seen.dtype),
        certified=recovered.certified,
        score=recovered.score,
        batch_size=problem.batch_size,
        directions=recovered.directions,
        scale_known=seen.has_bias,
        evidence=recovered.evidence,
        spectrum=factors.spectrum,
        zeros=zeros,
        fits=fits.to(seen.device),
        next_layer=next_layer,
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


def _use_of_next_layer(matches: Matches | None) -> str:
    """Return whether the search used the next layer, in words."""
    if matches is None:
        return "not used by this search"
    if not len(matches):
        return "not used: no input matches it (Dropout or a skip connection between the layers, local steps, noise)"
    return "used"


def _check_arguments(search: Search, generator: torch.Generator | None, seconds: float | None) -> None:
    if isinstance(search, type) or not isinstance(search, Search):
        raise OptionError(f"search={search!r}: pass a search object, for example spearpp.search.RiemannianAdam()")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise OptionError(f"generator={generator!r}: pass a torch.Generator, or None for one with seed 0")
    if seconds is not None and not seconds > 0:
        raise OptionError(f"seconds={seconds!r}: expected a positive number of seconds, or None")


def _whole_number(batch_size: int | None) -> int | None:
    if batch_size is None:
        return None
    try:
        if isinstance(batch_size, bool):
            raise TypeError
        return operator.index(batch_size)
    except TypeError:
        message = f"batch_size={batch_size!r}: expected a whole number, or None to read it off the spectrum"
        raise OptionError(message) from None
