"""Whether each direction is the only one with its zeros, and how much other inputs change where it is not."""

import torch

from spearpp.inversion.problem import Problem
from spearpp.linalg.chunks import chunk_size
from spearpp.linalg.nullspace import gather_weighted, leverage, two_smallest_eigenvectors
from spearpp.types import Bool, Float, Tensor

ABOVE_NOISE = 10.0
"""By how many times the noise every other solution must violate the equations of an input. For one layer, these are its
zero rows, and every other vector than its direction must have a larger image. A design choice: ten times the bound that
noise exceeds with probability 1e-3."""
DECISIVE = 1e-3
"""A zero row is decisive if its leverage h has 1 - h up to this: it alone separates a direction from others with the
same zeros. A row of random directions has h of about b/m."""
LARGEST_FAMILY = 8
"""Most directions that may share the same zeros. With more of them, all inputs count as undetermined.

A design choice: larger groups of samples with one pattern are not certified anyway."""
LARGEST_TURN = 10.0
"""Tangent of the largest angle between the true direction and the one that was chosen among all with the same zeros.
Design choice: if these span two dimensions, 94 % of all directions are within this angle of 84°."""


def only_direction_with_zeros(
    problem: Problem, directions: Float[Tensor, "*u k b"], zeros: Bool[Tensor, "*u k m"], drifted: bool
) -> Bool[Tensor, "*u k"]:
    """Return for which inputs the kernel of their zero rows contains only their direction.

    Of all vectors orthogonal to the direction, the one that the zero rows shrink most is v. Its image must exceed the
    noise of v, σ ‖Σ⁻¹v‖, which is large where v belongs to a faint sample.

    With drift this must hold whichever row is removed. Two samples that activate nearly the same neurons share most
    zeros, and one mixture of the two is zero at any further neuron that local training may have switched on for both.
    Without drift such a neuron is active, and counts as an active neuron without a gradient.
    """
    left = problem.factors.left
    if left.shape[-1] == 1:
        return torch.ones_like(directions[..., 0], dtype=torch.bool)
    found = []
    size = chunk_size(left.device, 8 * left.numel())
    for q, rows in zip(directions.split(size, dim=-2), zeros.split(size, dim=-2), strict=True):
        own = gather_weighted(left, rows.to(left))
        other = two_smallest_eigenvectors(own.mT @ own)[..., 1]
        second = torch.linalg.vector_norm((own @ other[..., None])[..., 0], dim=-1)
        if drifted:
            second = second * (1 - leverage(own, q).amax(-1)).sqrt()
        found.append(second > _noise(problem, q, other))
    return torch.cat(found, dim=-1)


def entangled(
    problem: Problem,
    directions: Float[Tensor, "k b"],
    inverse: Float[Tensor, "k b"],
    zeros: Bool[Tensor, "k m"],
    determined: Bool[Tensor, "k"],
    drifted: bool,
) -> Float[Tensor, "k"]:
    """Return how much each input may change, relative to its norm, because some directions are not determined.

    The *family* of q_j consists of all directions with the zeros of q_j. If the true direction is q_j + t v, with v in
    this family, then p_i is off by t (p_i·v) p_j. For the input of a direction outside of the family, p_i·v is zero,
    because the family spans the same space whatever its directions are.
    """
    left = problem.factors.left
    share = torch.zeros_like(inverse[:, 0])
    size = torch.linalg.vector_norm(inverse @ problem.factors.right, dim=1)
    for j in torch.nonzero(~determined)[:, 0].tolist():
        own = zeros[j, :, None] * left
        if drifted:
            reach = leverage(own[None], directions[None, j])[0]
            decisive = (reach >= 1 - DECISIVE) | (reach == reach.max())
            own = torch.where(decisive[:, None], 0.0, own)
        _, values, vectors = torch.linalg.svd(own, full_matrices=False)
        family = vectors[values <= _noise(problem, directions[j].expand_as(vectors), vectors)]
        if len(family) > LARGEST_FAMILY:
            return torch.full_like(share, torch.inf)
        beside = family - (family @ directions[j])[:, None] * directions[j]
        moved = torch.linalg.vector_norm(inverse @ beside.T, dim=1) * LARGEST_TURN * size[j] / size
        moved[j] = torch.inf
        share = torch.maximum(share, moved)
    return share


def _noise(
    problem: Problem, directions: Float[Tensor, "*u k b"], others: Float[Tensor, "*u k b"]
) -> Float[Tensor, "*u k"]:
    """Return the largest image that noise explains, for the other vectors or for the directions if theirs is larger."""
    m = problem.factors.left.shape[-2]
    return ABOVE_NOISE * torch.maximum(problem.tolerance.kernel(m, directions), problem.tolerance.kernel(m, others))
