"""Invert many layers of one shape at once, for example the same layer of many clients.

A small layer does not keep a GPU busy: most of the time the GPU waits for kernel launches. This module therefore runs
one round of the gated search for many layers in one batch: factorisation, descent, refinement, acceptance, selection
and certificates. A layer is done if this round certifies its whole batch. All other layers are inverted one by one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from spearpp.errors import SpearError
from spearpp.inversion.evidence.one_layer import certify_many
from spearpp.inversion.factors import Factors
from spearpp.inversion.factors.batched import decompose_many
from spearpp.inversion.invert import invert
from spearpp.inversion.observation import Observation, append_column, observe
from spearpp.inversion.pool import solve_weighted, zero_weights
from spearpp.inversion.problem import Problem, problem_of
from spearpp.inversion.result import Clock, Inversion, Stats
from spearpp.inversion.selection import agreeing, inputs_at
from spearpp.linalg import sphere
from spearpp.linalg.nullspace import MIN_BY_GRAM, smallest_eigenvector
from spearpp.search import Gated
from spearpp.search.gated import MIN_STARTS_GPU
from spearpp.search.gated.accept import SAME, acceptable
from spearpp.search.gated.descent import Effort, descend
from spearpp.search.gated.objective import Gates
from spearpp.search.gated.refine import concentrated, ranked, silent_neurons
from spearpp.types import Bool, Float, Int, LayerTensors, Tensor, select_rows, to_device

STARTS = MIN_STARTS_GPU[1]
"""Number of random starts in each layer. Measured for rounds on a GPU: 512 starts are as fast as 128 and find the whole
batch in one round at b=20 (``docs/lab/notebook.md``, "Speed")."""
SPARE = 2
"""Number of end points that are refined, for each sample. Design choice: some end points are wrong, and refinement is
the most expensive step."""
MAX_SIDE = 512
"""Largest number of neurons, or of inputs if there are fewer, of layers that are inverted at once. Design choice: a
larger layer keeps a GPU busy without a batch."""
BYTES = 2**32
"""Memory of the layers that are inverted at once: 4 GiB. Measured: a smaller limit that split 100 layers
into six batches gave a speed-up of 7.4 instead of 13 (``docs/lab/notebook.md``, "Speed")."""


def invert_many(
    layers: Sequence[LayerTensors],
    *,
    search: Gated | None = None,
    generator: torch.Generator | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Inversion]:
    """Invert many layers, as ``invert`` does for one layer.

    Small layers of one shape on a GPU are inverted at once, which is 12 to 14 times as fast as one after the other
    (100 layers with b=20, m=200). On a CPU, layers are inverted one after the other.

    Args:
        layers: the four tensors of each layer, as ``invert`` takes them. Layers whose shape, dtype or device differs
            from the first layer are inverted one by one.
        search: options of the gated search; None for ``spearpp.search.Gated()``. The gated search is the only search
            that can run for many layers at once. Call ``invert`` for each layer to use another search.
        generator: source of randomness; None for a generator with seed 0.
        progress: function that is called with the number of layers done so far.

    Returns:
        One inversion for each layer, in the same order.

    Raises:
        SpearError: one of its subclasses, if ``invert`` rejects the tensors of a layer. The message names the index of
            the layer.

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
    for indices in _batches(layers):
        for place, result in one_round(stack([layers[i] for i in indices]), search, generator):
            done[indices[place]] = result
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


def _batches(layers: Sequence[LayerTensors]) -> Iterator[list[int]]:
    """Yield the indices of finite layers with the shape, dtype and device of the first, in batches that fit ``BYTES``.

    Yield nothing if the layers are on a CPU, where batches are no faster, or if they are large. Also stop at an invalid
    layer, because ``invert`` then reports what is wrong with it.
    """
    if not layers or not isinstance(layers[0][0], Tensor) or not layers[0][0].is_cuda:
        return
    if layers[0][0].ndim != 2 or min(layers[0][0].shape) > MAX_SIDE:
        return
    first = _signature(layers[0])
    alike = [i for i, layer in enumerate(layers) if _signature(layer) == first]
    neurons, inputs = layers[0][0].shape
    numbers = 4 * neurons * inputs + STARTS * (STARTS + 6 * neurons)
    size = max(1, BYTES // (8 * numbers))
    for begin in range(0, len(alike), size):
        batch = alike[begin : begin + size]
        try:
            observe(*layers[batch[0]])
        except SpearError:
            return
        finite = torch.ones(len(batch), dtype=torch.bool, device=layers[0][0].device)
        for tensors in zip(*(layers[i] for i in batch), strict=True):
            if tensors[0] is not None:
                finite &= torch.isfinite(torch.stack(tensors)).flatten(1).all(1)
        yield [i for i, is_finite in zip(batch, finite.tolist(), strict=True) if is_finite]


def _signature(layer: LayerTensors) -> tuple[object, ...]:
    """Return the shape, dtype and device of each tensor of a layer."""
    return tuple((each.shape, each.dtype, each.device) if isinstance(each, Tensor) else None for each in layer)


def stack(layers: Sequence[LayerTensors]) -> Observation:
    """Return the observations of layers of one shape, stacked along a first dimension."""
    grad_weight, weight = torch.stack([each[0] for each in layers]), torch.stack([each[2] for each in layers])
    return replace(
        observe(*layers[0]),
        gradient=append_column(grad_weight, _stacked(each[1] for each in layers)),
        weight=append_column(weight, _stacked(each[3] for each in layers)),
    )


def _stacked(columns: Iterable[Tensor | None]) -> Tensor | None:
    given = [column for column in columns if column is not None]
    return torch.stack(given) if given else None


def one_round(seen: Observation, search: Gated, generator: torch.Generator) -> Iterator[tuple[int, Inversion]]:
    """Run one round of the gated search for stacked layers.

    Yield the index and the inversion of each layer whose whole batch is found and certified in this round.
    """
    clock = Clock()
    with clock("decompose"):
        groups = decompose_many(seen.gradient, seen.gradient_epsilon)
    for which, factors in _split(groups):
        grouped = replace(seen, gradient=seen.gradient[which], weight=seen.weight[which])
        with clock("decompose"):
            problem = problem_of(grouped, factors, search.sparsity)
        with clock("search"):
            effort = search.efforts_for(problem)[0]
            points, directions = _descend(problem, search, effort, generator)
            chosen, complete = _choose(problem, points, directions)
        kept = complete.nonzero()[:, 0]
        if not len(kept):
            continue
        with clock("filter"):
            problem, directions = _select_layers(problem, kept), chosen[kept]
            zeros = problem.zeros(directions)
            evidence = certify_many(problem, directions, zeros)
            points = torch.linalg.inv(directions.mT)
            scores = (agreeing(problem, points, zeros) / zeros[0].numel()).tolist()
            inputs = inputs_at(problem, points, zeros).to(seen.dtype)
        stats = Stats(
            starts=STARTS,
            steps=STARTS * effort.steps,
            candidates=problem.batch_size,
            found=problem.batch_size,
            seconds={stage: seconds / len(which) for stage, seconds in clock.seconds.items()},
            stopped="the whole batch was found",
            rounds=1,
        )
        for i, place in enumerate(which[kept].tolist()):
            if bool(evidence[i].exact.all()):
                yield (
                    place,
                    Inversion(
                        inputs=inputs[i],
                        certified=evidence[i].exact.to(seen.device),
                        score=scores[i],
                        batch_size=problem.batch_size,
                        directions=directions[i],
                        scale_known=seen.has_bias,
                        evidence=to_device(evidence[i], seen.device),
                        spectrum=problem.factors.spectrum[i],
                        zeros=evidence[i].details["zeros"].to(seen.device),
                        fits=evidence[i].exact.to(seen.device),
                        next_layer="not given",
                        stats=stats,
                    ),
                )


def _split(groups: list[tuple[Tensor, Factors]]) -> Iterator[tuple[Tensor, Factors]]:
    """Split each group so that the refinement of one part fits ``BYTES``."""
    for which, factors in groups:
        _, m, b = factors.left.shape
        size = max(1, BYTES // (48 * SPARE * b * b * m))
        for at in torch.arange(len(which), device=which.device).split(size):
            yield which[at], select_rows(factors, at)


def _descend(problem: Problem, search: Gated, effort: Effort, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Descend from the same random starts in every layer, and return the end points and their directions."""
    left, a = problem.factors.left, problem.preactivations
    updates, _, b = left.shape
    live = problem.factors.live[..., None]
    scale = a.square().mean((1, 2), keepdim=True).sqrt().clamp_min(torch.finfo(a.dtype).tiny)
    gates = torch.where(live, a / scale, 0.0).to(search.dtype)
    basis = torch.eye(b, dtype=search.dtype, device=left.device).expand(updates, b, b)
    starts = sphere.uniform(STARTS, b, generator, dtype=search.dtype, device=left.device)
    starts = starts.expand(updates, -1, -1).contiguous()
    ends = descend(Gates(left.to(search.dtype), gates, basis), starts, effort, search.rate)
    return ends.points.double(), ends.directions.double()


def _choose(
    problem: Problem, points: Float[Tensor, "u k b"], directions: Float[Tensor, "u k b"]
) -> tuple[Float[Tensor, "u b b"], Bool[Tensor, "u"]]:
    """Return the b sparsest directions of every layer, and for which layers there are b independent directions.

    If exactly one direction is missing, the point that belongs to it is orthogonal to the b-1 others (``_last``).
    """
    b = problem.batch_size
    order, worth = ranked(problem, points, directions)
    none = directions.new_zeros(len(points), b, b), torch.zeros(len(points), dtype=torch.bool, device=points.device)
    if order.shape[1] < b:
        return none
    best = worth.int().argsort(dim=-1, descending=True, stable=True)[:, : SPARE * b]
    order, worth = order.gather(1, best), worth.gather(1, best)
    points, directions = (torch.take_along_dim(each, order[..., None], dim=1) for each in (points, directions))
    solved, accepted = _refine(problem, points, sphere.retract(directions))
    accepted &= worth
    zeros = problem.zeros(solved).sum(-1)
    order = torch.where(accepted, zeros, -1).argsort(dim=-1, descending=True, stable=True)
    solved = torch.take_along_dim(solved, order[..., None], dim=1)
    kept = accepted.gather(1, order) & sphere.first_of_each(solved, SAME)
    first = kept.int().argsort(dim=-1, descending=True, stable=True)[:, :b]
    chosen = torch.take_along_dim(solved, first[..., None], dim=1)
    last, last_accepted = _last(problem, chosen[:, :-1])
    one_missing = kept.sum(-1) == b - 1
    chosen[:, -1] = torch.where(one_missing[:, None], last, chosen[:, -1])
    factor, failed = torch.linalg.cholesky_ex(chosen @ chosen.mT)
    basis = (failed == 0) & (factor.diagonal(dim1=1, dim2=2).amin(1) > MIN_BY_GRAM)
    return chosen, basis & ((kept.sum(-1) >= b) | (one_missing & last_accepted))


def _refine(problem: Problem, points: Tensor, directions: Tensor) -> tuple[Tensor, Bool[Tensor, "u k"]]:
    """Solve directions for their zeros. Also return which are determined by their zeros and acceptable as inputs."""
    solved, determined = concentrated(problem, silent_neurons(problem, points), directions)
    for _ in range(2):
        solved = solve_weighted(problem, zero_weights(problem, solved))
    return solved, determined & acceptable(problem, points, solved)


def _last(problem: Problem, others: Float[Tensor, "u f b"]) -> tuple[Float[Tensor, "u b"], Bool[Tensor, "u"]]:
    """Return the direction of the point that is orthogonal to all other directions, and whether it is acceptable.

    A layer without bias does not determine the sign of this point, so the direction is then not acceptable.
    """
    point = smallest_eigenvector(others.mT @ others)[:, None]
    end = point @ problem.factors.right[..., -1:]
    point = point * torch.where(end < 0, -1.0, 1.0)
    solved, accepted = _refine(problem, point, point)
    return solved[:, 0], accepted[:, 0] & problem.seen.has_bias


def _select_layers(problem: Problem, which: Int[Tensor, "kept"]) -> Problem:
    """Return the problem of some of the stacked layers, without their observations."""
    return replace(
        problem,
        factors=select_rows(problem.factors, which),
        tolerance=select_rows(problem.tolerance, which),
        preactivations=problem.preactivations[which],
    )
