"""Evidence from two layers that an input is a sample of the batch, for each input on its own.

A vector p that belongs to no sample still has some activation pattern S. Given S, the forward equations (relu(A p) in
span(V)) are m - b linear equations for b - 1 unknowns, so p would have to satisfy m - 2b + 1 equations by chance. For
equations in general position, at most a share r remains outside with a probability of the order of
(r √b)^(m - 2b + 1). The same holds for the backward equations (S ∘ B t in span(L)) and their own r. There are at most
2^m patterns. The product of the three bounds the expected number of wrong inputs: ``chance``. It reaches 1 where b
approaches m/2, which is the counting limit of two layers.
"""

import math
from collections.abc import Iterator

import torch

from spearpp.inversion.evidence import MIN_VIOLATION, Evidence, Scope, pattern_distances
from spearpp.inversion.matches import (
    SIGMAS,
    WORST_DIRECTION_FACTOR,
    Matches,
    SolvedInputs,
    backward_noise,
    entry_noise,
    forward_noise,
    outside,
    unclear,
)
from spearpp.inversion.next_layer import NextLayer
from spearpp.inversion.problem import Problem
from spearpp.inversion.tolerance import RARE
from spearpp.linalg import sphere
from spearpp.linalg.chunks import chunk_size
from spearpp.linalg.time_limit import check_time
from spearpp.types import Bool, Float, Int, Tensor

MAX_SHARE_OUTSIDE = 1e-4
"""Share outside a span that is accepted where noise is negligible, because vectors are solved to finite precision. A
design choice: far below the share that a wrong input leaves outside."""
MAX_TWIN_DISTANCE = 2
"""Two patterns count as one if they differ in at most this many neurons. All mixtures of two samples with one pattern
satisfy the same equations."""
MAX_NARROW_NEURONS = 64
"""Largest number of neurons of a layer that must determine an input without ``LEFT_OUT_NEURONS`` of them. Design
choice: patterns of wider layers differ in more neurons."""
LEFT_OUT_NEURONS = 3
"""Number of neurons, those with pre-activations closest to zero, without which a narrow layer must determine an input.
Design choice: patterns of narrow layers may differ in two or three neurons only."""


def certify_two_layers(problem: Problem, next_layer: NextLayer, seen: Matches, solved: SolvedInputs) -> Evidence:
    """Collect the evidence for inputs that match the equations of two layers.

    Details of each input:

    - ``forward``, ``backward``: share of relu(z) outside the span of the next layer's inputs, and of S ∘ (W₂ᵀ d₂)
      outside the span of this layer's gradients; ``forward_noise`` and ``backward_noise`` are what noise explains;
    - ``gap``: the second smallest singular value of the forward equations, relative to ‖relu(z)‖. It says by how much
      the next best solution violates the equations, and so how well they determine the input;
    - ``chance``: bound on the expected number of wrong inputs with such evidence;
    - ``twin``: number of neurons in which the most similar pattern differs.
    """
    z = solved.points @ problem.preactivations.T
    active = torch.where(unclear(problem, next_layer, solved), seen.masks, z > 0)
    gradients = (seen.backs @ next_layer.back.T) * active
    left = problem.factors.left
    size = sphere.norm(gradients)
    backward = torch.linalg.vector_norm(gradients - (gradients @ left) @ left.T, dim=1) / size
    back_noise = backward_noise(problem, next_layer, seen.directions, seen.backs / size[:, None])
    forward = outside(z, next_layer.activations)
    noise = forward_noise(problem, next_layer, solved.points)
    gap = torch.minimum(solved.gap, _gap_without_nearest(problem, next_layer, z))
    chance, twin = chance_of_another(problem, forward, backward), _twins(active)
    inputs = solved.points @ problem.factors.right
    # The forward equations are off by what remains outside, whatever the reason.
    error = SIGMAS * (forward / noise).clamp_min(1) * _deviation(problem, next_layer, seen, solved, inputs)
    if problem.seen.has_bias:  # x̂ ends in 1, so a p that needs a negative scale has the wrong pattern
        error = torch.where(inputs[:, -1] > 0, error, torch.inf)
    columns = (seen.directions / (seen.directions * solved.points).sum(1, keepdim=True)) @ left.T
    whole = torch.linalg.norm(problem.factors.row_norms)
    fits_forward = forward <= (SIGMAS * noise).clamp_min(MAX_SHARE_OUTSIDE)
    fits_backward = backward <= (SIGMAS * back_noise).clamp_min(MAX_SHARE_OUTSIDE)
    return Evidence(
        holds=fits_forward & fits_backward & torch.isfinite(error) & (chance <= RARE),
        determined=(gap >= MIN_VIOLATION * torch.maximum(forward, noise)) & (twin > MAX_TWIN_DISTANCE),
        error=error,
        share=torch.linalg.vector_norm(columns, dim=1) * torch.linalg.vector_norm(inputs, dim=1) / whole,
        scope=Scope.TWO_LAYERS,
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


def _deviation(
    problem: Problem, next_layer: NextLayer, seen: Matches, solved: SolvedInputs, inputs: Float[Tensor, "k columns"]
) -> Float[Tensor, "k"]:
    """Return the standard deviation of each input x that noise implies, relative to its norm.

    An error v of p moves x̂ = Rᵀp by Rᵀv, and the last entry r·p of x̂, by which x is scaled, by r·v. So x moves by
    (Rᵀv - x̂ r·v / r·p) / r·p, which can be many times larger than Rᵀv beside x̂: the last entry is small if x is
    large. The result is the larger of two estimates. The first takes v from the covariance of all equations of p, and
    adds the noise of R. The second takes v along the direction that is determined worst, ``WORST_DIRECTION_FACTOR``
    times. ``inputs`` has x̂ for the unit vectors p.
    """
    sizes, features = problem.factors.singular_values, inputs.shape[1] - problem.seen.has_bias
    tiny = torch.finfo(inputs.dtype).tiny
    size = sphere.norm(inputs[:, :features])
    coordinates = solved.points * sizes  # of x̂ in the orthonormal rows of Σ⁻¹R
    if problem.seen.has_bias:
        last = problem.factors.right[:, -1].expand_as(coordinates)
    else:  # inputs are scaled by their norm
        last = coordinates * sizes / size[:, None]
    scale = (last * solved.points).sum(1)
    scale = torch.where(scale == 0, tiny, scale)
    moved = solved.loose * sizes - coordinates * ((solved.loose * last).sum(1) / scale)[:, None]
    worst = WORST_DIRECTION_FACTOR * solved.turned * torch.linalg.vector_norm(moved, dim=1) / size
    span, triangle = torch.linalg.qr(problem.preactivations)
    images = torch.linalg.solve_triangular(triangle, torch.diag(sizes), upper=True, left=False)
    scaling = torch.linalg.solve_triangular(triangle.T, last.T, upper=False).T / scale[:, None]
    spread = []
    for rows, gram in _grams(problem, next_layer, seen, solved.points, span, triangle):
        factor, failed = torch.linalg.cholesky_ex(gram)
        change = images - coordinates[rows, :, None] * scaling[rows, None, :]
        image = torch.linalg.solve_triangular(factor, change.mT, upper=False)
        spread.append(torch.where(failed == 0, torch.linalg.matrix_norm(image), torch.inf))
    every = entry_noise(problem, next_layer, solved.points) * torch.cat([*spread, size[:0]]) / size
    beside = problem.tolerance.input_error(1 / scale.abs(), size / scale.abs(), features)
    return torch.maximum(worst, torch.hypot(every, beside))


def _grams(
    problem: Problem,
    next_layer: NextLayer,
    seen: Matches,
    points: Float[Tensor, "k b"],
    span: Float[Tensor, "m b"],
    triangle: Float[Tensor, "b b"],
) -> Iterator[tuple[Int[Tensor, "rows"], Float[Tensor, "rows b b"]]]:
    """Yield indices of points, and the Gram matrices of their equations, in units of the noise of an entry of y.

    The equations are those of ``solve_inputs``, in the coordinates of the orthonormal span of the pre-activations. p is
    added as a further equation, because they leave it free.
    """
    b = problem.batch_size
    noise = entry_noise(problem, next_layer, points)
    z = points @ problem.preactivations.T
    weights = (noise[:, None] / seen.turned).fill_diagonal_(0.0)
    orthogonal = torch.linalg.solve_triangular(triangle.T, seen.directions.T, upper=False).T
    free = sphere.retract(z @ span)
    for rows in torch.arange(len(points), device=z.device).split(chunk_size(z.device, 8 * (len(span) + 3 * b) * b)):
        check_time()
        kept = (z[rows] > SIGMAS * noise[rows, None])[:, :, None] * span
        across, pins = next_layer.activations.T @ kept, weights[rows, :, None] * orthogonal
        own = free[rows, :, None] * free[rows, None, :]
        yield rows, kept.mT @ kept - across.mT @ across + pins.mT @ pins + own


def _gap_without_nearest(problem: Problem, next_layer: NextLayer, z: Float[Tensor, "k m"]) -> Float[Tensor, "k"]:
    """Return the forward share of the next best solution without the neurons nearest to zero; inf for wide layers.

    Patterns of a narrow layer may differ in two or three neurons only. Some mixture of such samples also satisfies the
    equations of these neurons, and its pre-activations there are close to zero. Without these neurons the mixture is
    one solution of many.
    """
    if problem.factors.live_neurons > MAX_NARROW_NEURONS or not len(z):
        return torch.full_like(z[:, 0], torch.inf)
    span = torch.linalg.qr(problem.preactivations)[0]
    outside_span = (
        torch.eye(len(span), dtype=z.dtype, device=z.device) - next_layer.activations @ next_layer.activations.T
    )
    equations = outside_span @ ((z > 0)[:, :, None] * span)
    live = torch.where(problem.factors.live, z.abs(), torch.inf)
    nearest = outside_span[live.argsort(dim=1)[:, :LEFT_OUT_NEURONS]].mT
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
