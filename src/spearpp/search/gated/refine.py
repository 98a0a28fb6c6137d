"""From the end point of a descent to an exact direction, in float64."""

import torch

from spearpp import sphere
from spearpp.candidates import refit
from spearpp.chunks import at_once
from spearpp.nullspace import least_two
from spearpp.problem import Problem
from spearpp.shapes import Bool, Float, Int, Tensor

ALIKE = 0.9
"""Cosine from which two end points are taken for the same direction; what is lost by that a later round finds."""
SPARE = 3.0
"""Silent rows for each unknown from which the smallest of them determine a direction."""
KEPT = (0.6, 0.8)
"""Share of the silent rows that are solved for, at first and then."""
APART = 0.1
"""Least second singular value of the rows solved for; below, they leave more than one direction open."""
_REWEIGHTINGS = 12
_SHRINK = 0.4


def silent_neurons(problem: Problem, points: Float[Tensor, "k b"]) -> Bool[Tensor, "k m"]:
    """Neurons with a gradient that are silent for x̂ = Rᵀp."""
    return (points @ problem.preactivations.T <= 0) & problem.factors.live


def distinct(problem: Problem, points: Float[Tensor, "k b"], directions: Float[Tensor, "k b"]) -> Int[Tensor, "kept"]:
    """Which end points are worth refining: promising, and each direction once.

    Promising: half of the rows that p calls silent are under a tenth of the root mean square of L q
    already. Directions alike an earlier one are left out.
    """
    unit = sphere.retract(directions)
    small = (unit @ problem.factors.left.T).abs() <= 0.1 / problem.factors.left.shape[0] ** 0.5
    silent = silent_neurons(problem, points)
    share = (small & silent).sum(1) / silent.sum(1).clamp_min(1)
    order = share.argsort(descending=True, stable=True)
    order = order[share[order] >= 0.5]
    alike = (unit[order] @ unit[order].T).abs() > ALIKE
    return order[~alike.tril(-1).any(1)]


def refine(problem: Problem, points: Float[Tensor, "k b"], directions: Float[Tensor, "k b"]) -> Float[Tensor, "k b"]:
    """The direction whose zeros are among the rows that p calls silent.

    p is not exact, so some of these rows are not zero and must lose their say. Where there are many, the
    smallest of them are solved for (``_concentrated``); where there are few, all are, by weights (``_reweighted``).
    Then the direction is solved again for all its zeros (``refit``).
    """
    m, b = problem.factors.left.shape
    size = at_once(points.device, 8 * m * b)
    solved = sphere.retract(directions)
    unsure = silent_neurons(problem, points).sum(1) < SPARE * b
    for part in torch.nonzero(~unsure)[:, 0].split(size):
        solved[part], unsure[part] = _concentrated(problem, points[part], solved[part])
    solved = torch.where(unsure[:, None], sphere.retract(directions), solved)
    for part in torch.nonzero(unsure)[:, 0].split(size):
        solved[part] = _reweighted(problem, points[part], solved[part])
    return refit(problem, solved)


def _concentrated(problem: Problem, points: Tensor, directions: Tensor) -> tuple[Tensor, Bool[Tensor, "k"]]:
    """min ‖ℓ_k·q‖ over the smallest rows among those that p calls silent; then over more of them.

    The concentration steps of least trimmed squares (Rousseeuw and Van Driessen 2006). Samples that are alike
    share most of their zeros, which do not tell them apart: which directions are unsure for that is returned too.
    """
    left = problem.factors.left
    silent = silent_neurons(problem, points)
    second = left.new_zeros(len(points))
    for share in KEPT:
        values = torch.where(silent, (directions @ left.T).abs(), torch.inf)
        last = (share * silent.sum(1)).long()[:, None]
        kept = (values <= values.sort(1).values.gather(1, last)).to(left)
        least = least_two(left.T @ (kept[:, :, None] * left))
        directions = least[:, :, 0]
        second = torch.linalg.vector_norm(kept * (least[:, :, 1] @ left.T), dim=1)
    return directions, second < APART


def _reweighted(problem: Problem, points: Tensor, directions: Tensor) -> Tensor:
    """min Σ |ℓ_k·q| over the rows that p calls silent, by iteratively reweighted least squares.

    Weights are 1/max(|ℓ_k·q|, δ) with δ shrinking to the noise, so rows that p calls silent by
    mistake lose their say.
    """
    left = problem.factors.left
    silent = silent_neurons(problem, points)
    values = (directions @ left.T).abs()
    delta = (values * silent).amax(1, keepdim=True)
    for _ in range(_REWEIGHTINGS):
        noise = problem.tolerance.entry(directions) / problem.tolerance.sigmas
        weight = silent / torch.maximum(torch.maximum(values, delta), noise)
        normal = left.T @ (weight[:, :, None] * left)
        shift = 1e-14 * normal.diagonal(dim1=1, dim2=2).mean(1, keepdim=True)
        normal.diagonal(dim1=1, dim2=2).add_(shift)
        factor, failed = torch.linalg.cholesky_ex(normal)
        solved = torch.cholesky_solve(points[:, :, None], factor)[:, :, 0]
        usable = (failed == 0) & torch.isfinite(solved).all(1)
        directions = torch.where(usable[:, None], sphere.retract(solved), directions)
        values = (directions @ left.T).abs()
        delta = delta * _SHRINK
    return directions
