"""Evidence from two layers that an input is a sample of the batch, for each input on its own.

A vector p that belongs to no sample still has some activation pattern S. Given S, the forward equations (relu(A p) in
span(V)) are m - b linear equations for b - 1 unknowns, so p would have to satisfy m - 2b + 1 equations by chance. For
equations in general position, at most a share r remains outside with a probability of the order of
(r √b)^(m - 2b + 1). The same holds for the backward equations (S ∘ B t in span(L)) and their own r. There are at most
2^m patterns. The product of the three bounds the expected number of wrong inputs: ``chance``. It reaches 1 where b
approaches m/2, which is the counting limit of two layers.
"""

import math

import torch

from spearpp.inversion.evidence.evidence import ABOVE_NOISE, Evidence, pattern_distances
from spearpp.inversion.matches import (
    SIGMAS,
    SPREAD,
    Matches,
    SolvedInputs,
    backward_noise,
    forward_noise,
    outside,
    unclear,
)
from spearpp.inversion.next_layer import NextLayer
from spearpp.inversion.problem import Problem
from spearpp.inversion.tolerance import RARE
from spearpp.types import Bool, Float, Int, Tensor

INEXACT = 1e-4
"""Share outside a span that is accepted where noise is negligible, because vectors are solved to finite precision.

A design choice: far below ``ABOVE_NOISE`` times the noise that a wrong input leaves."""
TWINS = 2
"""Largest number of neurons in which two patterns differ and still count as one pattern: all mixtures of two samples
with one pattern satisfy the same equations."""
NARROW, NEAREST = 64, 3
"""A layer with up to NARROW neurons must determine an input without the NEAREST neurons closest to zero: patterns of
narrow layers may differ in two or three neurons only."""


def certify_two_layers(problem: Problem, next_layer: NextLayer, seen: Matches, solved: SolvedInputs) -> Evidence:
    """Collect the evidence for inputs that match the equations of two layers.

    Details of each input:

    - ``forward``, ``backward``: share of relu(z) outside the span of the next layer's inputs, and of S ∘ (W₂ᵀ d₂)
      outside the span of this layer's gradients; ``forward_noise`` and ``backward_noise`` are what noise explains;
    - ``gap``: the second smallest singular value of the forward equations, relative to ‖relu(z)‖: by how much the next
      best solution violates them. It says how well the equations determine the input;
    - ``chance``: bound on the expected number of wrong inputs with such evidence;
    - ``twin``: number of neurons in which the most similar pattern differs.
    """
    z = solved.points @ problem.preactivations.T
    active = torch.where(unclear(problem, next_layer, solved), seen.masks, z > 0)
    gradients = (seen.backs @ next_layer.back.T) * active
    left = problem.factors.left
    size = torch.linalg.vector_norm(gradients, dim=1).clamp_min(torch.finfo(z.dtype).tiny)
    backward = torch.linalg.vector_norm(gradients - (gradients @ left) @ left.T, dim=1) / size
    back_noise = backward_noise(problem, next_layer, seen.directions, seen.backs / size[:, None])
    forward = outside(z, next_layer.activations)
    noise = forward_noise(problem, next_layer, solved.points)
    gap = torch.minimum(solved.gap, _gap_without_nearest(problem, next_layer, z))
    chance, twin = chance_of_another(problem, forward, backward), _twins(active)
    right = problem.factors.right
    inputs = solved.points @ right
    length = torch.linalg.vector_norm(inputs, dim=1).clamp_min(torch.finfo(z.dtype).tiny)
    # The forward equations are off by what remains outside, whatever the reason.
    turned = solved.turned * (forward / noise).clamp_min(1)
    if problem.seen.has_bias:  # x̂ ends in 1, so a p that needs a negative scale has the wrong pattern
        turned = torch.where(inputs[:, -1] > 0, turned, torch.inf)
    error = SIGMAS * SPREAD * turned * torch.linalg.vector_norm(solved.loose @ right, dim=1) / length
    columns = (seen.directions / (seen.directions * solved.points).sum(1, keepdim=True)) @ left.T
    whole = torch.linalg.norm(problem.factors.row_norms)
    fits_forward = forward <= (SIGMAS * noise).clamp_min(INEXACT)
    fits_backward = backward <= (SIGMAS * back_noise).clamp_min(INEXACT)
    return Evidence(
        holds=fits_forward & fits_backward & torch.isfinite(error) & (chance <= RARE),
        determined=(gap >= ABOVE_NOISE * torch.maximum(forward, noise)) & (twin > TWINS),
        error=error,
        share=torch.linalg.vector_norm(columns, dim=1) * length / whole,
        layers=2,
        details={
            "forward": forward,
            "forward_noise": noise,
            "backward": backward,
            "backward_noise": back_noise,
            "gap": gap,
            "chance": chance,
            "twin": twin,
        },
        numbers={"residual": float(problem.factors.distance(columns.T, solved.points) / whole)},
    )


def _gap_without_nearest(problem: Problem, next_layer: NextLayer, z: Float[Tensor, "k m"]) -> Float[Tensor, "k"]:
    """Return the forward share of the next best solution without the neurons nearest to zero; inf for wide layers.

    Patterns of a narrow layer may differ in two or three neurons only. Some mixture of such samples also satisfies the
    equations of these neurons, and its pre-activations there are close to zero. Without these neurons the mixture is
    one solution of many.
    """
    if problem.factors.live_neurons > NARROW or not len(z):
        return torch.full_like(z[:, 0], torch.inf)
    span = torch.linalg.qr(problem.preactivations)[0]
    outside_span = (
        torch.eye(len(span), dtype=z.dtype, device=z.device) - next_layer.activations @ next_layer.activations.T
    )
    equations = outside_span @ ((z > 0)[:, :, None] * span)
    live = torch.where(problem.factors.live, z.abs(), torch.inf)
    nearest = outside_span[live.argsort(dim=1)[:, :NEAREST]].mT
    basis = torch.linalg.qr(nearest)[0]
    rest = torch.linalg.svdvals(equations - basis @ (basis.mT @ equations))
    size = torch.linalg.vector_norm(z.clamp_min(0), dim=1) / torch.linalg.vector_norm(z, dim=1)
    return rest[:, -2] / size


def _twins(active: Bool[Tensor, "k m"]) -> Int[Tensor, "k"]:
    """Return in how many neurons the most similar other pattern differs from each pattern; m if there is no other."""
    if not len(active):
        return torch.zeros(0, dtype=torch.long, device=active.device)
    return pattern_distances(active).fill_diagonal_(active.shape[1]).amin(1).round().long()


def chance_of_another(
    problem: Problem, forward: Float[Tensor, "k"], backward: Float[Tensor, "k"]
) -> Float[Tensor, "k"]:
    """Return 2^m (r_f √b · r_b √b)^(m - 2b + 1) for each input; 1 if there are no more equations than unknowns."""
    m, b = problem.factors.live_neurons, problem.batch_size
    surplus = m - 2 * b + 1
    if surplus < 1:
        return torch.ones_like(forward)
    precision = torch.finfo(forward.dtype).eps
    worst = forward.clamp_min(precision) * backward.clamp_min(precision) * b
    return (m * math.log(2) + surplus * worst.log()).clamp_max(0).exp()


def agreement(problem: Problem, seen: Matches, solved: SolvedInputs) -> float:
    """Return λ of the matched inputs: the share of entries of D that are zero exactly where the neuron is inactive."""
    values = seen.directions @ problem.factors.left.T
    reach = seen.turned[:, None] * torch.linalg.vector_norm(problem.factors.left, dim=1)
    zeros = values.abs() <= torch.maximum(problem.tolerance.entry(seen.directions), SIGMAS * reach)
    return float(((solved.points @ problem.preactivations.T > 0) != zeros).double().mean()) if len(seen) else 0.0
