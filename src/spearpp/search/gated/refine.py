"""From the end point of a descent to an exact direction, in float64."""

import torch

from spearpp.inversion.pool import refit
from spearpp.inversion.problem import Problem
from spearpp.linalg import sphere
from spearpp.linalg.chunks import chunk_size
from spearpp.linalg.nullspace import (
    gather_rows,
    gather_weighted,
    kernel_vectors,
    smallest_eigenvector,
    two_smallest_eigenvectors,
)
from spearpp.types import Bool, Float, Int, Tensor

ALIKE = 0.9
"""Cosine from which two end points are taken for the same direction; what is lost by that a later round finds."""
PROMISING = 0.5
"""Share of the rows that p calls silent that must be small already."""
SPARE = 3.0
"""Silent rows for each unknown from which the smallest of them determine a direction."""
KEPT = (0.6, 0.8)
"""Share of the silent rows that are solved for, at first and then."""
APART = 0.1
"""Least second singular value of the rows solved for; below, they leave more than one direction open."""
_REWEIGHTINGS = 12
_SHRINK = 0.4


def silent_neurons(problem: Problem, points: Float[Tensor, "*u k b"]) -> Bool[Tensor, "*u k m"]:
    """Neurons with a gradient that are silent for x̂ = Rᵀp."""
    return (points @ problem.preactivations.mT <= 0) & problem.factors.live[..., None, :]


def distinct(problem: Problem, points: Float[Tensor, "k b"], directions: Float[Tensor, "k b"]) -> Int[Tensor, "kept"]:
    """Which end points are worth refining: promising, and each direction once, the most promising first."""
    order, worth = ranked(problem, points, directions)
    return order[worth]


def ranked(
    problem: Problem, points: Float[Tensor, "*u k b"], directions: Float[Tensor, "*u k b"]
) -> tuple[Int[Tensor, "*u n"], Bool[Tensor, "*u n"]]:
    """Promising end points, the most promising first, and which of them are that and not alike an earlier one.

    Promising: half of the rows that p calls silent are under a tenth of the root mean square of L q already.
    """
    unit = sphere.retract(directions)
    small = (unit @ problem.factors.left.mT).abs() <= 0.1 / problem.factors.left.shape[-2] ** 0.5
    silent = silent_neurons(problem, points)
    share = (small & silent).sum(-1) / silent.sum(-1).clamp_min(1)
    share, order = share.sort(dim=-1, descending=True, stable=True)
    promising = share >= PROMISING
    most = int(promising.sum(-1).max())
    order, promising = order[..., :most], promising[..., :most]
    unit = torch.take_along_dim(unit, order[..., None], dim=-2)
    alike = (unit @ unit.mT).abs() > ALIKE
    return order, promising & ~alike.tril(-1).any(-1)


def refine(problem: Problem, points: Float[Tensor, "k b"], directions: Float[Tensor, "k b"]) -> Float[Tensor, "k b"]:
    """The direction whose zeros are among the rows that p calls silent, where one is found.

    p is not exact, so some of these rows are not zero and must lose their say. Where there are many, the
    smallest of them are solved for (``concentrated``), and what is zero in half of them is solved again for all its
    zeros (``refit``). Where there are few, or the zeros leave more than one direction open, all rows are solved for, by
    weights (``_reweighted``), and then the zeros.
    """
    m, b = problem.factors.left.shape
    size = chunk_size(points.device, 8 * m * b)
    solved = sphere.retract(directions)
    silent = silent_neurons(problem, points)
    unsure = silent.sum(1) < SPARE * b
    for part in _parts(~unsure, size):
        said = silent[part]
        found, apart = concentrated(problem, said, solved[part])
        zeros = problem.tolerance.look_zero(found @ problem.factors.left.T, found) & said
        held = (zeros.sum(1) >= PROMISING * said.sum(1)).nonzero()[:, 0]
        part, apart, found = part[held], apart[held], refit(problem, found[held])
        doubted = (~apart).nonzero()[:, 0]
        if len(doubted):
            apart[doubted] = _told_apart(problem, found[doubted])
        solved[part] = torch.where(apart[:, None], found, solved[part])
        unsure[part] = ~apart
    for part in _parts(unsure, size):
        solved[part] = refit(problem, _reweighted(problem, points[part], solved[part]))
    return solved


def _parts(which: Bool[Tensor, "k"], size: int) -> list[Int[Tensor, "part"]]:
    return [part for part in torch.nonzero(which)[:, 0].split(size) if len(part)]


def concentrated(
    problem: Problem, silent: Bool[Tensor, "*u k m"], directions: Float[Tensor, "*u k b"]
) -> tuple[Float[Tensor, "*u k b"], Bool[Tensor, "*u k"]]:
    """min ‖ℓ_k·q‖ over the smallest rows among those that p calls ``silent``; then over more of them.

    The concentration steps of least trimmed squares (Rousseeuw and Van Driessen 2006). Samples that are alike
    share most of their zeros, which do not tell them apart: which directions are told from all others is returned too.
    """
    for share in KEPT[:-1]:
        rows = _smallest(problem, silent, directions, share)
        directions = smallest_eigenvector(rows.mT @ rows)
    rows = _smallest(problem, silent, directions, KEPT[-1])
    first_two = two_smallest_eigenvectors(rows.mT @ rows)
    second = torch.linalg.vector_norm((rows @ first_two[..., 1:])[..., 0], dim=-1)
    return first_two[..., 0], second >= APART


def _told_apart(problem: Problem, directions: Float[Tensor, "k b"]) -> Bool[Tensor, "k"]:
    """Whether the zeros of each direction leave no other open."""
    left = problem.factors.left
    zeros = problem.tolerance.zeros(directions @ left.T, directions) & problem.factors.live
    _, values = kernel_vectors(gather_weighted(left, zeros.to(left)))
    return values[:, 1] >= APART


def _smallest(problem: Problem, silent: Tensor, directions: Tensor, share: float) -> Float[Tensor, "*u k r b"]:
    """That share of each direction's silent rows of which ℓ_k·q is least; the shorter sets are padded with zeros."""
    left = problem.factors.left
    last = (share * silent.sum(-1)).long()
    values = torch.where(silent, (directions @ left.mT).abs(), torch.inf)
    places = values.topk(int(last.max()) + 1, dim=-1, largest=False).indices
    kept = torch.arange(places.shape[-1], device=last.device) <= last[..., None]
    return kept[..., None] * gather_rows(left, places)


def _reweighted(problem: Problem, points: Tensor, directions: Tensor) -> Tensor:
    """min Σ |ℓ_k·q| over the rows that p calls silent, by iteratively reweighted least squares.

    Weights are 1/max(|ℓ_k·q|, δ) with δ shrinking to the noise, so rows that p calls silent by
    mistake lose their say.
    """
    left, tolerance = problem.factors.left, problem.tolerance
    silent = silent_neurons(problem, points)
    silent, places = silent.to(left).topk(max(1, int(silent.sum(1).max())), dim=1)
    rows, noise = left[places], tolerance.row_noise[places]
    delta = (silent * (rows @ directions[:, :, None])[:, :, 0].abs()).amax(1, keepdim=True).clamp_min(1e-290)
    for _ in range(_REWEIGHTINGS):
        values = (rows @ directions[:, :, None])[:, :, 0].abs()
        least_value = torch.maximum(delta, noise * tolerance.amplification(directions)[:, None])
        weight = silent / torch.maximum(values, least_value)
        normal = rows.mT @ (weight[:, :, None] * rows)
        diagonal = normal.diagonal(dim1=1, dim2=2)
        diagonal.add_(1e-14 * diagonal.mean(1, keepdim=True))
        factor, failed = torch.linalg.cholesky_ex(normal)
        solved = sphere.retract(torch.cholesky_solve(points[:, :, None], factor)[:, :, 0])
        directions = torch.where((failed == 0)[:, None], solved, directions)
        delta = delta * _SHRINK
    return directions
