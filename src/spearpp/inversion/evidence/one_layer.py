"""Evidence from the gradient of one layer.

All b directions together give all inputs: x̂_i = Rᵀp_i, where p_i is orthogonal to every other direction. Input i is
right if the other directions span the right space. The activation pattern of x̂_i shows whether they do: the neurons
that x̂_i leaves inactive must be the neurons where L q_i is zero. ``docs/method.md``, section "Certificates", explains
the conditions for every input:

- **pattern**: pattern and zeros agree where both are clear of noise. An inactive neuron with a gradient is possible
  only if local training moved the neuron (**drift** η) or if the noise is heavier than usual (**heavier noise** ω). The
  number of active neurons without a gradient must not exceed the number of small gradients that noise can hide;
- **chance**: beyond the b-1 neurons that agree for any vertex by construction, 30 + log₂ b must agree. If each agrees
  with probability ½, this leaves a probability of 1e-9 for the batch;
- **determined**: the rows where L q_i is zero and x̂_i is clearly inactive must have a kernel that contains only q_i.
  Otherwise q_i could be a mixture. With drift, this must hold whichever of these rows is removed. A single sample needs
  no such rows, but without a bias its pattern must prove its sign;
- **error**: four times the standard deviation that the noise of the gradient implies for x_i, on its own
  (``Tolerance.input_error``) and through the directions of all other inputs (``mixing``). This is an estimate, not a
  bound (``Evidence.error``).

For the batch: the gradient rebuilt from the inputs, with D zero wherever they leave a neuron inactive, must differ from
the observed gradient by no more than noise.

The evidence of one layer cannot tell one sample from several samples that activate the same neurons and have
proportional signals: they are recovered as their weighted mean.
"""

import math

import torch

from spearpp.inversion.evidence import EXACT, MIN_VIOLATION, Evidence, Scope
from spearpp.inversion.evidence.patterns import Comparison, compare
from spearpp.inversion.problem import Problem
from spearpp.inversion.selection import Selection
from spearpp.inversion.tolerance import RARE
from spearpp.linalg import sphere
from spearpp.linalg.chunks import chunk_size
from spearpp.linalg.nullspace import gather_weighted, leverage, smallest_eigenvector
from spearpp.types import Bool, Float, Tensor

MAX_RESIDUAL = 3.0
"""The rebuilt gradient may differ from the observed gradient by at most this many times the noise. A design choice: for
noise alone, the difference is 1 times the noise."""
DECISIVE_MARGIN = 1e-3
"""A zero row is decisive if its leverage h is at least 1 minus this number: the row alone then separates a direction
from others with the same zeros. A row of random directions has a leverage of about b/m."""
MAX_FAMILY = 8
"""Largest dimension of a family of directions that share the same zeros. With a larger family, all inputs count as
undetermined. A design choice: larger groups of samples with one pattern are not certified anyway."""
MAX_TURN = 10.0
"""Tangent of the largest angle between the true direction and the one that was chosen among all with the same zeros.
Design choice: if these span two dimensions, 94 % of all directions are within this angle of 84°."""


def certify(problem: Problem, chosen: Selection) -> Evidence:
    """Collect the evidence for a choice of b directions."""
    return _evidence(problem, chosen, compare(problem, chosen.directions, chosen.points, chosen.zeros))


def certify_whole(problem: Problem, chosen: Selection) -> Evidence | None:
    """Return the evidence of ``certify`` if every input is consistent, else None. Stops early if an input is not."""
    compared = compare(problem, chosen.directions, chosen.points, chosen.zeros)
    if not bool(_holds(problem, compared).all()):
        return None
    evidence = _evidence(problem, chosen, compared)
    return evidence if bool(evidence.consistent.all()) else None


def _holds(problem: Problem, compared: Comparison) -> Bool[Tensor, "k"]:
    """Return which patterns agree beyond chance. A gradient of rank one has one input, whatever follows the layer."""
    rebuilt = torch.isfinite(compared.error) & (compared.residual <= MAX_RESIDUAL * compared.noise)
    if problem.batch_size == 1:
        return rebuilt
    agree = (compared.hidden <= compared.allowed) & _beyond_chance(problem, compared)
    return agree & (compared.chance <= RARE) & rebuilt


def _beyond_chance(problem: Problem, compared: Comparison) -> Bool[Tensor, "k"]:
    """Return which patterns agree in too many neurons for chance."""
    # The drift η was chosen among as many values as there are conflicts.
    choices = problem.batch_size * max(1, int(compared.moved.sum()))
    return compared.agreeing - compared.free >= math.log2(choices / RARE)


def _evidence(problem: Problem, chosen: Selection, compared: Comparison) -> Evidence:
    """Return the comparison as evidence, together with how well the zeros of each direction determine it."""
    drifted = bool(compared.drift > 0)
    only = _only_direction_with_zeros(problem, chosen.directions, compared.inactive_zeros, drifted)
    change = _entangled(problem, chosen.directions, chosen.points, compared.inactive_zeros, only, drifted)
    columns = ("zeros", "chance", "agreeing", "moved", "hidden", "allowed")
    determined = only & (change <= EXACT)
    if problem.batch_size == 1 and not problem.seen.has_bias:  # only the pattern says which sign the input has
        determined &= _beyond_chance(problem, compared)
    return Evidence(
        holds=_holds(problem, compared),
        determined=determined,
        error=torch.where(torch.isfinite(change), torch.maximum(compared.error, change), compared.error),
        share=compared.share,
        scope=Scope.ONE_LAYER,
        details={**{name: getattr(compared, name) for name in columns}, "entangled": change},
        numbers={name: float(getattr(compared, name)) for name in ("residual", "noise", "heavier", "drift")},
    )


def _only_direction_with_zeros(
    problem: Problem, directions: Float[Tensor, "k b"], zeros: Bool[Tensor, "k m"], drifted: bool
) -> Bool[Tensor, "k"]:
    """Return for which inputs the kernel of their zero rows contains only their direction.

    Of all vectors orthogonal to the direction, the one that the zero rows shrink most is v. Its image must exceed the
    noise of v, σ ‖Σ⁻¹v‖, which is large where v belongs to a faint sample.

    With drift this must hold whichever row is removed. Two samples that activate nearly the same neurons share most
    zeros, and one mixture of the two is zero at any further neuron that local training may have switched on for both.
    Without drift such a neuron is active, and counts as an active neuron without a gradient.
    """
    left = problem.factors.left
    if left.shape[1] == 1:
        return torch.ones_like(directions[:, 0], dtype=torch.bool)
    found = []
    size = chunk_size(left.device, 8 * left.numel())
    for q, rows in zip(directions.split(size), zeros.split(size), strict=True):
        own = gather_weighted(left, rows.to(left))
        products = own.mT @ own
        mean = products.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
        other = smallest_eigenvector(products.addcmul_(mean * q[:, :, None], q[:, None, :]))
        other = sphere.retract(sphere.tangent(q, other))
        second = torch.linalg.vector_norm((own @ other[:, :, None])[:, :, 0], dim=1)
        if drifted:
            second = second * (1 - leverage(own, q).amax(1)).sqrt()
        found.append(second > _noise(problem, q, other))
    return torch.cat(found)


def _entangled(
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
            decisive = (reach >= 1 - DECISIVE_MARGIN) | (reach == reach.max())
            own = torch.where(decisive[:, None], 0.0, own)
        _, values, vectors = torch.linalg.svd(own, full_matrices=False)
        family = vectors[values <= _noise(problem, directions[j].expand_as(vectors), vectors)]
        if len(family) > MAX_FAMILY:
            return torch.full_like(share, torch.inf)
        beside = family - (family @ directions[j])[:, None] * directions[j]
        moved = torch.linalg.vector_norm(inverse @ beside.T, dim=1) * MAX_TURN * size[j] / size
        moved[j] = torch.inf
        share = torch.maximum(share, moved)
    return share


def _noise(problem: Problem, directions: Float[Tensor, "k b"], others: Float[Tensor, "k b"]) -> Float[Tensor, "k"]:
    """Return the largest image that noise explains, for the other vectors or for the directions if theirs is larger."""
    m = len(problem.factors.left)
    return MIN_VIOLATION * torch.maximum(problem.tolerance.kernel(m, directions), problem.tolerance.kernel(m, others))
