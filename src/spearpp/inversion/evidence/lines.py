"""Whether each direction is the only one with its zeros, and which inputs suffer where it is not."""

import torch

from spearpp.inversion.problem import Problem
from spearpp.linalg.chunks import chunk_size
from spearpp.linalg.nullspace import gather_weighted, leverage, two_smallest_eigenvectors
from spearpp.types import Bool, Float, Tensor

MARGIN = 10.0
"""How far the zero rows of an input must send every other vector above noise."""
DECISIVE = 1e-3
"""1 - h up to which a row of leverage h alone tells a direction from others with the same zeros."""
LARGEST = 8
"""Directions with the same zeros at most; with more of them nothing is told."""
TURNED = 10.0
"""How far, as a tangent, the true direction may be turned from the one chosen among them."""


def lines(
    problem: Problem, directions: Float[Tensor, "*u k b"], zeros: Bool[Tensor, "*u k m"], drifted: bool
) -> Bool[Tensor, "*u k"]:
    """Whether the kernel of each input's zero rows is that input's direction alone.

    The vector v that they send to least beside it must stand above noise, its own: σ ‖Σ⁻¹v‖, which is large where v
    belongs to a faint sample. Under drift that must hold whichever row is left out. Two samples that fire nearly the
    same neurons share most zeros, and of their mixtures one is zero at any further neuron that drift may have moved
    on for both. Without drift such a neuron fires and counts as hidden.
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
    line: Bool[Tensor, "k"],
    drifted: bool,
) -> Float[Tensor, "k"]:
    """How much of each input, over its size, depends on directions that are not told from others with their zeros.

    If the true direction is q_j + t v, where v has the zeros of q_j too, then p_i is off by t (p_i·v) p_j. For inputs
    outside of such a family p_i·v is zero: the family spans the same whatever its directions are.
    """
    left = problem.factors.left
    share = torch.zeros_like(inverse[:, 0])
    size = torch.linalg.vector_norm(inverse @ problem.factors.right, dim=1)
    for j in torch.nonzero(~line)[:, 0].tolist():
        own = zeros[j, :, None] * left
        if drifted:
            reach = leverage(own[None], directions[None, j])[0]
            decisive = (reach >= 1 - DECISIVE) | (reach == reach.max())
            own = torch.where(decisive[:, None], 0.0, own)
        _, values, vectors = torch.linalg.svd(own, full_matrices=False)
        family = vectors[values <= _noise(problem, directions[j].expand_as(vectors), vectors)]
        if len(family) > LARGEST:
            return torch.full_like(share, torch.inf)
        beside = family - (family @ directions[j])[:, None] * directions[j]
        moved = torch.linalg.vector_norm(inverse @ beside.T, dim=1) * TURNED * size[j] / size
        moved[j] = torch.inf
        share = torch.maximum(share, moved)
    return share


def _noise(
    problem: Problem, directions: Float[Tensor, "*u k b"], others: Float[Tensor, "*u k b"]
) -> Float[Tensor, "*u k"]:
    """What noise makes of the others at most, or of the directions if that is more."""
    m = problem.factors.left.shape[-2]
    return MARGIN * torch.maximum(problem.tolerance.kernel(m, directions), problem.tolerance.kernel(m, others))
