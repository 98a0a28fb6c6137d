"""Inputs that match the equations of two layers.

Each such input is determined on its own, whether or not the other inputs of the batch have been found. The equations
are explained in ``next_layer``.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from spearpp.inversion.next_layer import NextLayer
from spearpp.inversion.problem import Problem
from spearpp.linalg import sphere
from spearpp.linalg.nullspace import min_masked_residual
from spearpp.linalg.time_limit import check_time
from spearpp.types import Bool, Float, Int, Tensor, replace_rows, select_rows

WORST_DIRECTION_FACTOR = 4.0
"""Factor between the error along the direction of p that is determined worst and the error along all directions.
Measured: with a factor of 1, two of 7,168 certified inputs were slightly wrong, and with 4 none of 3,559
(``docs/lab/notebook.md``, "FedAvg certificates")."""
MAX_TRIED_BOTH_WAYS = 3
"""Largest number of neurons without a clear sign that are tried as active and as inactive. Design choice: eight
solutions for each input."""
SIGMAS = 5.0
"""Number of standard deviations that noise may reach in the equations of a true input, and by which a pre-activation
must differ from zero to have a clear sign. Design choice: Gaussian noise exceeds it once in two million. Neurons
without a clear sign must not determine p: with them, three of 60 batches stalled (``docs/lab/notebook.md``, "Further
decisive changes")."""


@dataclass(frozen=True, eq=False)
class Matches:
    """The vectors p, q, c and t of each input, its activation pattern, and the error of q. One row for each input."""

    points: Float[Tensor, "k b"]
    """Unit vectors p, with x̂ = Rᵀp up to scale."""
    directions: Float[Tensor, "k b"]
    """Unit vectors q, with d = L q up to scale."""
    coordinates: Float[Tensor, "k b"]
    """c, with activations y = V c for the unit vector p."""
    backs: Float[Tensor, "k b"]
    """t, with d = S ∘ (B t) up to scale."""
    masks: Bool[Tensor, "k m"]
    """S, the activation pattern: which neurons are active."""
    turned: Float[Tensor, "k"]
    """Angle by which noise may have turned q: the noise of an entry of d divided by the residual of the second best
    t."""

    def __len__(self) -> int:
        return self.points.shape[0]


def no_matches(problem: Problem) -> Matches:
    """Return an empty set of matches."""
    none = problem.factors.left.new_zeros(0, problem.batch_size)
    masks = torch.zeros(0, len(problem.factors.left), dtype=torch.bool, device=none.device)
    return Matches(none, none, none, none, masks, none[:, 0])


def outside(preactivations: Float[Tensor, "k m"], activations: Float[Tensor, "m e"]) -> Float[Tensor, "k"]:
    """Return ‖(I - V Vᵀ) relu(z)‖ / ‖relu(z)‖, which is zero if and only if the activations lie in span(V)."""
    active = preactivations.clamp_min(0)
    residual = active - (active @ activations) @ activations.T
    return torch.linalg.vector_norm(residual, dim=1) / sphere.norm(active)


def entry_noise(problem: Problem, next_layer: NextLayer, points: Float[Tensor, "k b"]) -> Float[Tensor, "k"]:
    """Return the standard deviation of the noise in an entry of y = relu(A p), for the point p of a true input.

    The noise of V contributes σ₂ ‖Σ₂⁻¹c‖. The pre-activation z contributes (σ ‖p‖ + ε ‖x̂‖/√n) ‖ŵ_k‖: the noise of R,
    and the rounding of the client's own sum of n products.
    """
    rounding = problem.seen.weight_epsilon / problem.seen.weight.shape[1] ** 0.5
    active = (points @ problem.preactivations.T).clamp_min(0)
    entry = points * (problem.tolerance.noise + rounding * problem.factors.singular_values)
    entry = torch.linalg.vector_norm(entry, dim=1) * problem.tolerance.weight_norms.square().mean().sqrt()
    return (entry.square() + next_layer.spread(active @ next_layer.activations).square()).sqrt()


def forward_noise(problem: Problem, next_layer: NextLayer, points: Float[Tensor, "k b"]) -> Float[Tensor, "k"]:
    """Return the share of relu(A p) that noise moves outside span(V), for the point p of a true input."""
    m, b = problem.preactivations.shape
    size = sphere.norm((points @ problem.preactivations.T).clamp_min(0))
    return entry_noise(problem, next_layer, points) * max(1, m - b) ** 0.5 / size


def backward_noise(
    problem: Problem, next_layer: NextLayer, directions: Float[Tensor, "k b"], backs: Float[Tensor, "k b"]
) -> Float[Tensor, "k"]:
    """Return the norm of the part of d = S ∘ (B t) that noise moves outside span(L), for a true d of unit norm.

    In each entry, the noise of L contributes σ ‖Σ⁻¹q‖, and the noise of B contributes σ₂ ‖Σ₂⁻¹t‖ times the norm of a
    column of W₂.
    """
    m, b = problem.preactivations.shape
    entry = problem.tolerance.noise * problem.tolerance.amplification(directions)
    entry = (entry.square() + (next_layer.column * next_layer.spread(backs)).square()).sqrt()
    return entry * max(1, m - b) ** 0.5


@dataclass(frozen=True, eq=False)
class SolvedInputs:
    """Points that ``solve_inputs`` has solved, and how well the equations determine them. One row for each point."""

    points: Float[Tensor, "k b"]
    """Unit vectors p."""
    loose: Float[Tensor, "k b"]
    """The direction in which p is determined worst. The error of x̂ along it is turned · Rᵀloose."""
    turned: Float[Tensor, "k"]
    """How far noise may have moved p along ``loose``."""
    gap: Float[Tensor, "k"]
    """Residual of the second best p relative to ‖relu(z)‖. The equations determine p if it is far above the noise."""


def solve_inputs(
    problem: Problem, next_layer: NextLayer, points: Float[Tensor, "k b"], others: Matches, *, own: bool
) -> SolvedInputs:
    """Solve every point p for its forward equations and for p ⟂ q of all other inputs, without restricting p.

    The noise of both kinds of equations is known, and each equation is weighted by its noise. An input that activates
    few neurons is not determined by its own activations. The directions q of the other inputs then determine it.
    ``own`` says that ``others`` are the same inputs as ``points``. No point is then made orthogonal to its own q.
    """
    z = points @ problem.preactivations.T
    length = torch.linalg.vector_norm(z, dim=1)
    size = torch.linalg.vector_norm(z.clamp_min(0), dim=1) / length
    noise = entry_noise(problem, next_layer, points)
    weights = noise[:, None] / others.turned
    if own:
        weights.fill_diagonal_(0.0)
    # A neuron that is active within noise must not determine p: p may have been changed until the neuron became active.
    masks = z > SIGMAS * noise[:, None]
    solved, norms = _solve_masked(problem.preactivations, masks, next_layer.activations, others.directions, weights)
    no_clear_sign = z.abs() <= SIGMAS * noise[:, None]
    norms[:, 1] = _smallest_gap(problem, next_layer, no_clear_sign, masks, others, weights, norms[:, 1])
    solved = solved * (solved[:, 0] * points).sum(1).sign()[:, None, None]
    unit = torch.linalg.vector_norm(solved[:, 0], dim=1)
    return SolvedInputs(
        points=solved[:, 0] / unit[:, None],
        loose=solved[:, 1] / unit[:, None],
        turned=noise / length / norms[:, 1],
        gap=norms[:, 1] / size,
    )


def _smallest_gap(
    problem: Problem,
    next_layer: NextLayer,
    no_clear_sign: Bool[Tensor, "k m"],
    masks: Bool[Tensor, "k m"],
    others: Matches,
    weights: Float[Tensor, "k others"],
    gap: Float[Tensor, "k"],
) -> Float[Tensor, "k"]:
    """Return the smallest residual of the second best p over all signs of the neurons without a clear sign.

    The result is zero for an input with more than ``MAX_TRIED_BOTH_WAYS`` such neurons. A mixture of two samples with
    the same activation pattern may lie exactly on z_k = 0. It is the only solution if neuron k is inactive, but not if
    neuron k is active.
    """
    gap = torch.where(no_clear_sign.sum(1) > MAX_TRIED_BOTH_WAYS, 0.0, gap)
    rows = torch.nonzero(no_clear_sign.any(1) & (gap > 0))[:, 0]
    if not len(rows):
        return gap
    neurons = no_clear_sign[rows].int().argsort(dim=1, descending=True, stable=True)[:, :MAX_TRIED_BOTH_WAYS]
    for tried in _with_either_sign(masks[rows], no_clear_sign[rows], neurons):
        known = others.directions, weights[rows]
        _, norms = _solve_masked(problem.preactivations, tried, next_layer.activations, *known)
        gap = gap.index_copy(0, rows, torch.minimum(gap[rows], norms[:, 1]))
    return gap


def _with_either_sign(
    masks: Bool[Tensor, "k m"], no_clear_sign: Bool[Tensor, "k m"], neurons: Int[Tensor, "k n"]
) -> Iterator[Bool[Tensor, "k m"]]:
    """Yield activation patterns with all combinations of signs of those neurons that have no clear sign."""
    for flipped in itertools.product((False, True), repeat=neurons.shape[1]):
        check_time()
        flip = no_clear_sign.gather(1, neurons) & torch.tensor(flipped, device=masks.device)
        yield masks.scatter(1, neurons, masks.gather(1, neurons) ^ flip)


def unclear(problem: Problem, next_layer: NextLayer, solved: SolvedInputs) -> Bool[Tensor, "k m"]:
    """Return which pre-activations have no clear sign, given their own noise and the error of p."""
    z = solved.points @ problem.preactivations.T
    loose = torch.linalg.vector_norm(solved.loose @ problem.preactivations.T, dim=1) / z.shape[1] ** 0.5
    noise = entry_noise(problem, next_layer, solved.points) + WORST_DIRECTION_FACTOR * solved.turned * loose
    return z.abs() <= SIGMAS * noise[:, None]


@dataclass(frozen=True, eq=False)
class Confirmation:
    """The solution of the backward equations for some points, and how well it fits. One row for each point."""

    directions: Float[Tensor, "k b"]
    """Unit vectors q, with d = L q up to scale."""
    backs: Float[Tensor, "k b"]
    """t, with d = S ∘ (B t) of unit norm."""
    masks: Bool[Tensor, "k m"]
    """S, the activation pattern: which neurons are active."""
    left_over: Float[Tensor, "k"]
    """Share of d outside span(L)."""
    noise: Float[Tensor, "k"]
    """Share of d outside span(L) that noise explains."""
    gap: Float[Tensor, "k"]
    """Residual of the second best t. The equations determine t if it is far above the noise."""

    @property
    def fits(self) -> Bool[Tensor, "k"]:
        """Whether noise explains the share of d outside span(L)."""
        return self.left_over <= SIGMAS * self.noise


def confirm(problem: Problem, next_layer: NextLayer, solved: SolvedInputs, others: Matches) -> Confirmation:
    """Solve the backward equations of every point: S ∘ (B t) in span(L), and t ⟂ Σ₂⁻¹c of all other inputs found.

    If the solution of a point does not fit and some of its pre-activations have no clear sign, up to three of these
    neurons are tried as active and as inactive, and the solution that fits best is returned.
    """
    z = solved.points @ problem.preactivations.T
    known = _orthogonality(problem, next_layer, others)
    best = _confirm(problem, next_layer, z > 0, known)
    no_clear_sign = unclear(problem, next_layer, solved)
    rows = torch.nonzero(no_clear_sign.any(1) & ~best.fits)[:, 0]
    nearest = z[rows].abs().argsort(dim=1)[:, :MAX_TRIED_BOTH_WAYS]
    for masks in _with_either_sign(z[rows] > 0, no_clear_sign[rows], nearest):
        tried = _confirm(problem, next_layer, masks, known)
        better = tried.left_over < best.left_over[rows]
        best = replace_rows(best, rows[better], select_rows(tried, better))
    return best


def _orthogonality(
    problem: Problem, next_layer: NextLayer, others: Matches
) -> tuple[Float[Tensor, "k b"], Float[Tensor, "k"]]:
    """Return the unit vectors Σ₂⁻¹c of the inputs found, to which every other t is orthogonal, and their weights."""
    b = problem.batch_size
    duals = others.coordinates / next_layer.singular_values
    # An entry of y has the error σ_y. So has c, and Σ₂⁻¹c has the error σ_y ‖Σ₂⁻¹‖.
    entry = entry_noise(problem, next_layer, others.points)
    error = entry * torch.linalg.vector_norm(1 / next_layer.singular_values) / torch.linalg.vector_norm(duals, dim=1)
    typical = problem.tolerance.noise * problem.tolerance.inverse_singular_values.square().mean().sqrt()
    stretch = torch.linalg.vector_norm(next_layer.back) / b**0.5  # ‖B t‖ / ‖t‖ on average
    return sphere.retract(duals), typical * stretch / error


def _confirm(
    problem: Problem,
    next_layer: NextLayer,
    masks: Bool[Tensor, "k m"],
    known: tuple[Float[Tensor, "others b"], Float[Tensor, "others"]],
) -> Confirmation:
    """Solve the backward equations for given activation patterns and the orthogonality to known inputs."""
    orthogonal, weights = known
    weights = weights.expand(len(masks), -1)
    solved, norms = _solve_masked(next_layer.back, masks, problem.factors.left, orthogonal, weights)
    gradients = (solved[:, 0] @ next_layer.back.T) * masks
    size = sphere.norm(gradients)
    backs, inside = solved[:, 0] / size[:, None], gradients @ problem.factors.left
    left_over = torch.linalg.vector_norm(gradients - inside @ problem.factors.left.T, dim=1) / size
    directions = sphere.retract(inside)
    noise = backward_noise(problem, next_layer, directions, backs)
    return Confirmation(directions, backs, masks, left_over, noise, norms[:, 1])


def _solve_masked(
    matrix: Float[Tensor, "m b"],
    masks: Bool[Tensor, "k m"],
    fixed: Float[Tensor, "m b"],
    orthogonal: Float[Tensor, "others b"],
    weights: Float[Tensor, "k others"],
) -> tuple[Float[Tensor, "k 2 b"], Float[Tensor, "k 2"]]:
    """Find the two best v with ‖M v‖ = 1 for which S ∘ (M v) lies in a fixed subspace and v is orthogonal to others.

    ``weights`` has a weight for each of the orthogonal vectors and each activation pattern S. The residuals are those
    of ``min_masked_residual``.
    """
    b = matrix.shape[1]
    span, triangle = torch.linalg.qr(matrix)
    rows = torch.linalg.solve_triangular(triangle.T, orthogonal.T, upper=False).T
    block, norms = min_masked_residual(masks, span, fixed, (rows, weights))
    solved = torch.linalg.solve_triangular(triangle, block.transpose(0, 1).reshape(b, -1), upper=True)
    return solved.reshape(b, len(masks), 2).permute(1, 2, 0), norms
