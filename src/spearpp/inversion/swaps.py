"""Scores of a selection and of all selections that differ from it in one direction."""

from dataclasses import dataclass

import torch

from spearpp.inversion.problem import Problem
from spearpp.linalg.chunks import chunk_size
from spearpp.linalg.time_limit import check_time
from spearpp.types import Bool, Float, Int, Tensor


def agreeing(problem: Problem, inverse: "Inverse", zeros: Bool[Tensor, "*u b m"]) -> Int[Tensor, "*u"]:
    """Return m·b·λ, the number of entries of D that are zero exactly where the neuron is inactive."""
    return _agreement(problem, inverse.unscaled, inverse.scale, zeros).sum(-1)


@dataclass(frozen=True)
class Inverse:
    """P = Q⁻¹ and two products with it, from which the score of a swap is computed without another inverse."""

    rows: Float[Tensor, "*u b b"]
    """P, one point p_i in each row."""
    scale: Float[Tensor, "*u b"]
    """s = P R[:, bias]. It is not used if the layer has no bias."""
    unscaled: Float[Tensor, "*u b m"]
    """P Aᵀ, the pre-activations before they are divided by s."""

    @classmethod
    def of(cls, problem: Problem, directions: Tensor) -> "Inverse":
        """Invert Q, given as one direction in each row."""
        return cls.at(problem, torch.linalg.inv(directions.mT))

    @classmethod
    def at(cls, problem: Problem, rows: Tensor) -> "Inverse":
        """Build the object from P, given as one point in each row."""
        return cls(rows, (rows @ problem.factors.right[..., -1:])[..., 0], rows @ problem.preactivations.mT)


def swap_scores(
    problem: Problem,
    inverse: Inverse,
    zeros: Bool[Tensor, "b m"],
    candidates: Float[Tensor, "k b"],
    patterns: Bool[Tensor, "k m"],
) -> Int[Tensor, "k b"]:
    """Return ``merit`` with each candidate in each of the b places; -1 if it is in the span of the other directions.

    Let v be a candidate and u = P v. If v replaces direction j, row j of the inverse becomes p_j / u_j and every other
    row i becomes p_i - (u_i / u_j) p_j, so no matrix is inverted.

    Args:
        problem: the layer.
        inverse: the inverse of the current selection.
        zeros: the zeros of the current selection.
        candidates: unit directions to swap in.
        patterns: the zeros of each candidate.
    """
    b, m = zeros.shape
    u = candidates @ inverse.rows.T
    scores = torch.full(u.shape, -1, dtype=torch.long, device=u.device)
    distance = u.abs() / torch.linalg.vector_norm(inverse.rows, dim=1)  # of the candidate from the other directions
    swaps = torch.nonzero(distance > problem.tolerance.angle(candidates)[:, None])
    for which, place in (chunk.unbind(1) for chunk in swaps.split(chunk_size(u.device, 8 * b * m))):
        check_time()
        ratio = u[which] / u[which, place, None]  # (swaps, b)
        replaced = torch.nn.functional.one_hot(place, b).bool()
        keep = torch.where(replaced, 0.0, 1.0)
        ratio = torch.where(replaced, -1 / u[which, place, None], ratio)
        # Row i becomes keep_i p_i - ratio_i p_j.
        unscaled = keep[:, :, None] * inverse.unscaled - ratio[:, :, None] * inverse.unscaled[place, None, :]
        scale = keep * inverse.scale - ratio * inverse.scale[place, None]
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
