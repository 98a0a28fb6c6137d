"""Many updates of one model at once: what one round finds in all of them together, and the others one by one.

One small layer keeps a GPU waiting for its launches, and a hundred of them a hundred times as long. Here the stages of
one round run for all together: the factors, the descents, refinement, acceptance, the choice and its certificates.
A layer whose whole batch is certified by that is done; any other goes through ``invert`` as if it had come alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from spearpp.errors import SpearError
from spearpp.inversion.clock import Clock
from spearpp.inversion.evidence import certify_many
from spearpp.inversion.factors import SameRank, decompose_many
from spearpp.inversion.invert import invert
from spearpp.inversion.observation import Observation, observe
from spearpp.inversion.pool import weighted, weights
from spearpp.inversion.problem import Problem
from spearpp.inversion.result import Inversion, Stats
from spearpp.inversion.selection import Inverse, agreeing, inputs_at
from spearpp.inversion.tolerance import tolerance
from spearpp.linalg import sphere
from spearpp.linalg.nullspace import smallest_eigenvector
from spearpp.search import Gated, Search
from spearpp.search.gated.accept import SAME, acceptable
from spearpp.search.gated.descent import Effort, descend_many
from spearpp.search.gated.refine import concentrated, ranked, silent_neurons
from spearpp.types import Bool, Float, Int, Tensor, select_rows, to_device

Layer = tuple[Tensor, Tensor | None, Tensor, Tensor | None]
"""grad_weight, grad_bias, weight, bias: what ``invert`` takes."""
STARTS = 512
"""Of each layer."""
APART = 1e-4
"""Least distance of a direction from the span of those before it."""
SPARE = 2
"""End points that are refined, over the batch size."""
LARGEST = 512
"""Neurons, or inputs if those are fewer, of layers that are done together."""
BYTES = 2**32
"""Working set of the layers that are done together."""


def invert_many(
    layers: Sequence[Layer],
    *,
    search: Search | None = None,
    generator: torch.Generator | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Inversion]:
    """``invert`` for many layers, in the same order; fast where they are small, of one shape and on a GPU.

    Args:
        layers: the four tensors of each, as ``invert`` takes them. Those of another shape, dtype or device than the
            first are inverted one by one.
        search: how to look; None is ``spearpp.search.Gated()``, and only that is done together.
        generator: source of randomness; None is a generator with seed 0.
        progress: called with the number of layers that are done.

    Returns:
        One inversion for each layer.

    Raises:
        SpearError: one of its subclasses, for the first layer that is not a layer's gradient; it says which.

    >>> import torch, spearpp
    >>> from spearpp import simulate
    >>> model = simulate.mlp(30, [90, 90], 10, generator=torch.Generator().manual_seed(2))
    >>> draw = torch.Generator().manual_seed(1)
    >>> batches = [simulate.random_batch(6, features=30, generator=draw) for _ in range(3)]
    >>> results = spearpp.invert_many([simulate.fedsgd(model, batch)[0] for batch in batches])
    >>> [int(result.certified.sum()) for result in results]
    [6, 6, 6]
    """
    search = Gated() if search is None else search
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    done: dict[int, Inversion] = {}
    if isinstance(search, Gated):
        for at in _alike(layers):
            for place, result in one_round(stack([layers[i] for i in at]), search, generator):
                done[at[place]] = result
            if progress is not None:
                progress(len(done))
    for i, layer in enumerate(layers):
        if i not in done:
            try:
                done[i] = invert(*layer, search=search, generator=generator)
            except SpearError as error:
                raise type(error)(f"layer {i} of {len(layers)}: {error}") from error
            if progress is not None:
                progress(len(done))
    return [done[i] for i in range(len(layers))]


def _alike(layers: Sequence[Layer]) -> Iterator[list[int]]:
    """Layers like the first that hold numbers alone, by their place, as many at a time as memory should hold.

    None on a CPU, where one after the other is no slower, or if they are large.
    """
    if not layers or not isinstance(layers[0][0], Tensor) or not layers[0][0].is_cuda:
        return
    if layers[0][0].ndim != 2 or min(layers[0][0].shape) > LARGEST:
        return
    first = _form(layers[0])
    same = [i for i, layer in enumerate(layers) if _form(layer) == first]
    neurons, inputs = layers[0][0].shape
    numbers = 4 * neurons * inputs + STARTS * (STARTS + 6 * neurons)
    size = max(1, BYTES // (8 * numbers))
    for begin in range(0, len(same), size):
        part = same[begin : begin + size]
        try:
            observe(*layers[part[0]])
        except SpearError:  # the one by one says what is wrong, and with which
            return
        fine = torch.ones(len(part), dtype=torch.bool, device=layers[0][0].device)
        for tensors in zip(*(layers[i] for i in part), strict=True):
            if tensors[0] is not None:
                fine &= torch.isfinite(torch.stack(tensors)).flatten(1).all(1)
        yield [i for i, good in zip(part, fine.tolist(), strict=True) if good]


def _form(layer: Layer) -> tuple[object, ...]:
    return tuple((each.shape, each.dtype, each.device) if isinstance(each, Tensor) else None for each in layer)


def stack(layers: Sequence[Layer]) -> Observation:
    """The observations of layers alike along a first dimension."""
    one = observe(*layers[0])
    grad_weight, weight = torch.stack([each[0] for each in layers]), torch.stack([each[2] for each in layers])
    return replace(
        one,
        gradient=_with(grad_weight.detach().double(), [each[1] for each in layers]),
        weight=_with(weight.detach().double(), [each[3] for each in layers]),
    )


def _with(matrices: Float[Tensor, "u m n"], columns: list[Tensor | None]) -> Float[Tensor, "u m columns"]:
    given = [column for column in columns if column is not None]
    return torch.cat([matrices, torch.stack(given).detach().double()[:, :, None]], dim=2) if given else matrices


def one_round(seen: Observation, search: Gated, generator: torch.Generator) -> Iterator[tuple[int, Inversion]]:
    """Those layers, by their place, whose whole batch one round finds and certifies."""
    clock = Clock()
    with clock("decompose"):
        groups = decompose_many(seen.gradient, seen.gradient_epsilon)
    for group in _parts(groups):
        some = replace(seen, gradient=seen.gradient[group.which], weight=seen.weight[group.which])
        with clock("decompose"):
            problem = Problem(
                some,
                group.factors,
                tolerance(some, group.factors, search.sparsity),
                some.weight @ group.factors.right.mT,
            )
        with clock("search"):
            effort = search.efforts_for(problem)[0]
            points, directions = _ends(problem, search, effort, generator)
            chosen, whole = _choose(problem, points, directions)
        kept = whole.nonzero()[:, 0]
        if not len(kept):
            continue
        with clock("filter"):
            problem, directions = _some(problem, kept), chosen[kept]
            zeros = problem.tolerance.zeros(directions @ problem.factors.left.mT, directions)
            certificates = certify_many(problem, directions, zeros)
            inverse = Inverse.of(problem, directions)
            scores = (agreeing(problem, inverse, zeros) / zeros[0].numel()).tolist()
            inputs = inputs_at(problem, inverse.rows, zeros).to(seen.dtype)
        stats = Stats(
            starts=STARTS,
            steps=STARTS * effort.steps,
            candidates=problem.batch_size,
            found=problem.batch_size,
            seconds={stage: seconds / len(group.which) for stage, seconds in clock.seconds.items()},
            stopped="the whole batch was found",
            rounds=1,
        )
        for i, place in enumerate(group.which[kept].tolist()):
            if bool(certificates[i].exact.all()):
                yield (
                    place,
                    Inversion(
                        inputs=inputs[i],
                        certified=certificates[i].exact.to(seen.device),
                        score=scores[i],
                        batch_size=problem.batch_size,
                        directions=directions[i],
                        scale_known=seen.has_bias,
                        certificates=to_device(certificates[i], seen.device),
                        spectrum=problem.factors.spectrum[i],
                        zeros=certificates[i].zeros.to(seen.device),
                        fits=certificates[i].exact.to(seen.device),
                        next_layer="not given",
                        stats=stats,
                    ),
                )


def _parts(groups: list[SameRank]) -> Iterator[SameRank]:
    """Groups, those of many layers cut into as many at a time as their refinement has room for."""
    for group in groups:
        _, m, b = group.factors.left.shape
        size = max(1, BYTES // (48 * SPARE * b * b * m))
        for at in torch.arange(len(group.which), device=group.which.device).split(size):
            yield SameRank(group.which[at], select_rows(group.factors, at))


def _ends(problem: Problem, search: Gated, effort: Effort, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """End points and directions of one descent in every layer, from the same starts."""
    left, a = problem.factors.left, problem.preactivations
    updates, m, b = left.shape
    live = problem.factors.live[..., None]
    scale = a.square().mean((1, 2), keepdim=True).sqrt().clamp_min(torch.finfo(a.dtype).tiny)
    gates = torch.where(live, a / scale, 0.0).to(search.dtype)
    basis = torch.eye(b, dtype=search.dtype, device=left.device).expand(updates, b, b)
    starts = sphere.uniform(STARTS, b, generator, dtype=search.dtype, device=left.device)
    starts = starts.expand(updates, -1, -1).contiguous()
    counts = [m] * updates
    ends, directions = descend_many(left.to(search.dtype), gates, basis, starts, counts, effort, search.rate)
    return ends.double(), directions.double()


def _choose(
    problem: Problem, points: Float[Tensor, "u k b"], directions: Float[Tensor, "u k b"]
) -> tuple[Float[Tensor, "u b b"], Bool[Tensor, "u"]]:
    """The b sparsest directions of every layer, and where there are so many and they are independent."""
    b = problem.batch_size
    order, worth = ranked(problem, points, directions)
    none = directions.new_zeros(len(points), b, b), torch.zeros(len(points), dtype=torch.bool, device=points.device)
    if order.shape[1] < b:
        return none
    best = worth.int().argsort(dim=-1, descending=True, stable=True)[:, : SPARE * b]
    order, worth = order.gather(1, best), worth.gather(1, best)
    points, directions = (torch.take_along_dim(each, order[..., None], dim=1) for each in (points, directions))
    solved, good = _refined(problem, points, sphere.retract(directions))
    zeros = problem.tolerance.zeros(solved @ problem.factors.left.mT, solved).sum(-1)
    order = torch.where(good & worth, zeros, -1).argsort(dim=-1, descending=True, stable=True)
    solved = torch.take_along_dim(solved, order[..., None], dim=1)
    again = (solved @ solved.mT).abs() > SAME
    kept = (good & worth).gather(1, order) & ~again.tril(-1).any(-1)
    first = kept.int().argsort(dim=-1, descending=True, stable=True)[:, :b]
    chosen = torch.take_along_dim(solved, first[..., None], dim=1)
    last, found = _last(problem, chosen[:, :-1])
    alone = kept.sum(-1) == b - 1
    chosen[:, -1] = torch.where(alone[:, None], last, chosen[:, -1])
    factor, failed = torch.linalg.cholesky_ex(chosen @ chosen.mT)
    basis = (failed == 0) & (factor.diagonal(dim1=1, dim2=2).amin(1) > APART)
    return chosen, basis & ((kept.sum(-1) >= b) | (alone & found))


def _refined(problem: Problem, points: Tensor, directions: Tensor) -> tuple[Tensor, Bool[Tensor, "u k"]]:
    """Directions solved for their zeros, and which of them are determined and have the zeros of an input."""
    solved, apart = concentrated(problem, silent_neurons(problem, points), directions)
    for _ in range(2):
        solved = weighted(problem, weights(problem, solved))
    return solved, apart & acceptable(problem, points, solved)


def _last(problem: Problem, others: Float[Tensor, "u f b"]) -> tuple[Float[Tensor, "u b"], Bool[Tensor, "u"]]:
    """The direction whose p is orthogonal to all others, and whether it is one."""
    point = smallest_eigenvector(others.mT @ others)[:, None]
    end = point @ problem.factors.right[..., -1:]
    point = point * torch.where(end < 0, -1.0, 1.0)
    solved, good = _refined(problem, point, point)
    return solved[:, 0], good[:, 0] & problem.seen.has_bias  # without a bias the sign is not known


def _some(problem: Problem, which: Int[Tensor, "kept"]) -> Problem:
    return replace(
        problem,
        factors=select_rows(problem.factors, which),
        tolerance=select_rows(problem.tolerance, which),
        preactivations=problem.preactivations[which],
    )
