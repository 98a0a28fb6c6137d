"""Scores of a selection and of all selections that differ from it in one direction."""

import torch

from spearpp.inversion.problem import Problem
from spearpp.linalg.chunks import chunk_size
from spearpp.linalg.time_limit import check_time
from spearpp.types import Bool, Float, Int, Tensor


def agreeing(problem: Problem, points: Float[Tensor, "*u b b"], zeros: Bool[Tensor, "*u b m"]) -> Int[Tensor, "*u"]:
    """Return m·b·λ, the number of entries of D that are zero exactly where the neuron is inactive.

    Args:
        problem: the layer.
        points: P = Q⁻¹, one point p_i in each row.
        zeros: which entries of each column of D are zero, one row for each direction.
    """
    return _agreement(problem, *_unscaled(problem, points), zeros).sum(-1)


def _unscaled(problem: Problem, points: Tensor) -> tuple[Float[Tensor, "*u b m"], Float[Tensor, "*u b"]]:
    """Return P Aᵀ, the pre-activations before they are divided by s, and s = P R[:, bias].

    s is not used if the layer has no bias.
    """
    return points @ problem.preactivations.mT, (points @ problem.factors.right[..., -1:])[..., 0]


def swap_scores(
    problem: Problem,
    points: Float[Tensor, "b b"],
    zeros: Bool[Tensor, "b m"],
    candidates: Float[Tensor, "k b"],
    patterns: Bool[Tensor, "k m"],
) -> Int[Tensor, "k b"]:
    """Return ``merit`` with each candidate in each of the b places; -1 if it is in the span of the other directions.

    Let v be a candidate and u = P v. If v replaces direction j, row j of the inverse becomes p_j / u_j and every other
    row i becomes p_i - (u_i / u_j) p_j, so no matrix is inverted.

    Args:
        problem: the layer.
        points: P, the inverse of the current selection.
        zeros: the zeros of the current selection.
        candidates: unit directions to swap in.
        patterns: the zeros of each candidate.
    """
    b, m = zeros.shape
    u = candidates @ points.T
    z, s = _unscaled(problem, points)
    scores = torch.full(u.shape, -1, dtype=torch.long, device=u.device)
    distance = u.abs() / torch.linalg.vector_norm(points, dim=1)  # of the candidate from the other directions
    swaps = torch.nonzero(distance > problem.tolerance.angle(candidates)[:, None])
    for which, place in (chunk.unbind(1) for chunk in swaps.split(chunk_size(u.device, 8 * b * m))):
        check_time()
        ratio = u[which] / u[which, place, None]  # (swaps, b)
        replaced = torch.nn.functional.one_hot(place, b).bool()
        keep = torch.where(replaced, 0.0, 1.0)
        ratio = torch.where(replaced, -1 / u[which, place, None], ratio)
        # Row i becomes keep_i p_i - ratio_i p_j.
        unscaled = keep[:, :, None] * z - ratio[:, :, None] * z[place, None, :]
        scale = keep * s - ratio * s[place, None]
        swapped = torch.where(replaced[:, :, None], patterns[which, None, :], zeros)
        scores[which, place] = _agreement(problem, unscaled, scale, swapped).sum(1) + swapped.sum((1, 2))
    return scores


def _agreement(problem: Problem, unscaled: Tensor, scale: Tensor, zeros: Tensor) -> Int[Tensor, "*n b"]:
    """Count, for each input, the neurons that are inactive exactly where the column of D is zero.

    Args:
        problem: the layer.
        unscaled: A p_i, of shape (…, b, m).
        scale: s_i, of shape (…, b). z has the sign of unscaled / s. Without a bias the better sign is used instead.
        zeros: which entries of each column are zero, of shape (…, b, m).
    """
    if problem.seen.has_bias:
        return ((unscaled * scale.sign()[..., None] > 0) != zeros).sum(-1)
    positive = ((unscaled > 0) != zeros).sum(-1)
    negative = ((unscaled < 0) != zeros).sum(-1)
    return torch.maximum(positive, negative)
