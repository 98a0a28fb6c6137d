"""Inputs seen by two witnesses: each exact on its own, whether or not the others were found."""

import itertools
from dataclasses import dataclass

import torch

from spearpp.inversion.next_layer import NextLayer
from spearpp.inversion.problem import Problem
from spearpp.linalg import sphere
from spearpp.linalg.nullspace import min_masked_residual
from spearpp.types import Bool, Float, Tensor, replace_rows, select_rows

FIRES = 5.0
"""How far above its noise a pre-activation must be to count as firing."""
SPREAD = 4.0
"""The error along the direction that is determined least, times this, stands for that along all of them."""
UNCLEAR = 3
"""Number of neurons whose sign is uncertain and is therefore tried both ways."""
SIGMAS = 5.0
"""How many times its expected size noise may have in a true input."""


@dataclass(frozen=True, eq=False)
class Matches:
    """The four vectors of each input, and how well the second is known."""

    points: Float[Tensor, "k b"]
    """Unit vectors p: x̂ = Rᵀp up to scale."""
    directions: Float[Tensor, "k b"]
    """Unit vectors q: d = L q up to scale."""
    coordinates: Float[Tensor, "k b"]
    """c: y = V c for the unit p."""
    backs: Float[Tensor, "k b"]
    """t: d = S ∘ (B t), up to scale."""
    masks: Bool[Tensor, "k m"]
    """S: the neurons that fire."""
    turned: Float[Tensor, "k"]
    """The angle by which noise may have turned q: that of an entry of d over the second least norm."""

    def __len__(self) -> int:
        return self.points.shape[0]

    def join(self, other: "Matches") -> "Matches":
        """These, then the others."""
        return Matches(
            points=torch.cat([self.points, other.points]),
            directions=torch.cat([self.directions, other.directions]),
            coordinates=torch.cat([self.coordinates, other.coordinates]),
            backs=torch.cat([self.backs, other.backs]),
            masks=torch.cat([self.masks, other.masks]),
            turned=torch.cat([self.turned, other.turned]),
        )


def no_sightings(problem: Problem) -> Matches:
    """Nothing seen yet."""
    none = problem.factors.left.new_zeros(0, problem.batch_size)
    masks = torch.zeros(0, len(problem.factors.left), dtype=torch.bool, device=none.device)
    return Matches(none, none, none, none, masks, none[:, 0])


def outside(preactivations: Float[Tensor, "k m"], activations: Float[Tensor, "m e"]) -> Float[Tensor, "k"]:
    """‖(I - V Vᵀ) relu(z)‖ / ‖relu(z)‖: zero if and only if the activations lie in span(V)."""
    active = preactivations.clamp_min(0)
    left_over = active - (active @ activations) @ activations.T
    tiny = torch.finfo(active.dtype).tiny
    return torch.linalg.vector_norm(left_over, dim=1) / torch.linalg.vector_norm(active, dim=1).clamp_min(tiny)


def entry_noise(problem: Problem, next_layer: NextLayer, points: Float[Tensor, "k b"]) -> Float[Tensor, "k"]:
    """The standard deviation of noise in an entry of y = relu(A p), for a true p.

    σ₂ ‖Σ₂⁻¹c‖ from V, and (σ ‖p‖ + ε ‖x̂‖/√n) ‖ŵ_k‖ from z: the noise of R, and the rounding of the
    client's own sum of n products.
    """
    rounding = problem.seen.weight_epsilon / problem.seen.weight.shape[1] ** 0.5
    active = (points @ problem.preactivations.T).clamp_min(0)
    entry = points * (problem.tolerance.noise + rounding * problem.factors.singular_values)
    entry = torch.linalg.vector_norm(entry, dim=1) * problem.tolerance.weight_norms.square().mean().sqrt()
    return (entry.square() + next_layer.spread(active @ next_layer.activations).square()).sqrt()


def forward_noise(problem: Problem, next_layer: NextLayer, points: Float[Tensor, "k b"]) -> Float[Tensor, "k"]:
    """What noise leaves of relu(A p) outside span(V), relative to its norm, for a true p."""
    m, b = problem.preactivations.shape
    size = torch.linalg.vector_norm((points @ problem.preactivations.T).clamp_min(0), dim=1)
    tiny = torch.finfo(size.dtype).tiny
    return entry_noise(problem, next_layer, points) * max(1, m - b) ** 0.5 / size.clamp_min(tiny)


def backward_noise(
    problem: Problem, next_layer: NextLayer, directions: Float[Tensor, "k b"], backs: Float[Tensor, "k b"]
) -> Float[Tensor, "k"]:
    """The same for d = S ∘ (B t) outside span(L), for d of unit norm.

    σ ‖Σ⁻¹q‖ from L, and σ₂ ‖Σ₂⁻¹t‖ times the norm of a column of W₂ from B.
    """
    m, b = problem.preactivations.shape
    entry = problem.tolerance.noise * problem.tolerance.amplification(directions)
    entry = (entry.square() + (next_layer.column * next_layer.spread(backs)).square()).sqrt()
    return entry * max(1, m - b) ** 0.5


@dataclass(frozen=True, eq=False)
class SolvedInputs:
    """Points solved in the whole space, and what noise leaves open."""

    points: Float[Tensor, "k b"]
    """Unit vectors p."""
    loose: Float[Tensor, "k b"]
    """The direction of p that is determined least; x̂ may be off by turned · Rᵀloose."""
    turned: Float[Tensor, "k"]
    """How far noise may have moved p along it."""
    gap: Float[Tensor, "k"]
    """The second least norm over that of relu(z): how far the next best p is from being a solution."""


def solve_inputs(
    problem: Problem, next_layer: NextLayer, points: Float[Tensor, "k b"], others: Matches, *, own: bool
) -> SolvedInputs:
    """Solve every p in the whole space, for its activations and for p ⟂ q of all others seen.

    Both are equations with known noise, so each is weighted by it. An input that fires few neurons is
    not determined by its activations alone; then the others' q do the rest.

    Args:
        problem: the layer.
        witness: the next layer.
        points: what is to be solved again.
        others: what has been seen.
        own: whether ``others`` are these very points, each of which is then pinned by all but itself.
    """
    z = points @ problem.preactivations.T
    length = torch.linalg.vector_norm(z, dim=1)
    size = torch.linalg.vector_norm(z.clamp_min(0), dim=1) / length
    noise = entry_noise(problem, next_layer, points)
    weights = noise[:, None] / others.turned
    if own:
        weights.fill_diagonal_(0.0)
    # A neuron that hardly fires determines nothing: p may have been bent until it fires.
    masks = z > FIRES * noise[:, None]
    solved, norms = _pinned(problem.preactivations, masks, next_layer.activations, others.directions, weights)
    norms[:, 1] = _least_gap(
        problem, next_layer, z.abs() <= FIRES * noise[:, None], masks, others, weights, norms[:, 1]
    )
    solved = solved * (solved[:, 0] * points).sum(1).sign()[:, None, None]
    unit = torch.linalg.vector_norm(solved[:, 0], dim=1)
    return SolvedInputs(
        points=solved[:, 0] / unit[:, None],
        loose=solved[:, 1] / unit[:, None],
        turned=noise / length / norms[:, 1],
        gap=norms[:, 1] / size,
    )


def _least_gap(
    problem: Problem,
    next_layer: NextLayer,
    doubtful: Bool[Tensor, "k m"],
    masks: Bool[Tensor, "k m"],
    others: Matches,
    weights: Float[Tensor, "k others"],
    gap: Float[Tensor, "k"],
) -> Float[Tensor, "k"]:
    """The smallest second norm over all signs that the doubtful neurons may have; zero if these are too many to try.

    A mixture of two samples with one pattern may lie exactly on z_k = 0. It is unique among the points where neuron k
    is silent, but not among those where it fires.
    """
    gap = torch.where(doubtful.sum(1) > UNCLEAR, 0.0, gap)
    rows = torch.nonzero(doubtful.any(1) & (gap > 0))[:, 0]
    if not len(rows):
        return gap
    nearest = doubtful[rows].int().argsort(dim=1, descending=True, stable=True)[:, :UNCLEAR]
    for signs in itertools.product((False, True), repeat=nearest.shape[1]):
        tried = masks[rows].scatter(1, nearest, torch.tensor(signs, device=masks.device).expand_as(nearest))
        tried = torch.where(doubtful[rows], tried, masks[rows])
        found = _pinned(problem.preactivations, tried, next_layer.activations, others.directions, weights[rows])[1]
        gap = gap.index_copy(0, rows, torch.minimum(gap[rows], found[:, 1]))
    return gap


def unclear(problem: Problem, next_layer: NextLayer, settled: SolvedInputs) -> Bool[Tensor, "k m"]:
    """Where noise hides whether a neuron fires: its own noise in z, and what it leaves open of p."""
    z = settled.points @ problem.preactivations.T
    loose = torch.linalg.vector_norm(settled.loose @ problem.preactivations.T, dim=1) / z.shape[1] ** 0.5
    noise = entry_noise(problem, next_layer, settled.points) + SPREAD * settled.turned * loose
    return z.abs() <= FIRES * noise[:, None]


@dataclass(frozen=True, eq=False)
class Confirmation:
    """The backward vectors of some points, and how well they fit."""

    directions: Float[Tensor, "k b"]
    backs: Float[Tensor, "k b"]
    """Of d with unit norm."""
    masks: Bool[Tensor, "k m"]
    """The neurons that fire."""
    left_over: Float[Tensor, "k"]
    """Share of d outside span(L)."""
    noise: Float[Tensor, "k"]
    """What noise explains of it."""
    gap: Float[Tensor, "k"]
    """The second least norm: how well t is determined."""

    @property
    def fits(self) -> Bool[Tensor, "k"]:
        """Whether noise explains what is left over."""
        return self.left_over <= SIGMAS * self.noise


def confirm(problem: Problem, next_layer: NextLayer, settled: SolvedInputs, others: Matches) -> Confirmation:
    """Solve t and q of every point in the whole space: S ∘ (B t) in span(L), and t ⟂ Σ₂⁻¹c of all others seen.

    Where noise hides whether a neuron fires, the better of both is taken, for up to three neurons of a point.
    """
    z = settled.points @ problem.preactivations.T
    known = _known(problem, next_layer, others)
    best = _confirm(problem, next_layer, z > 0, known)
    hidden = unclear(problem, next_layer, settled)
    doubted = torch.nonzero(hidden.any(1) & ~best.fits)[:, 0]
    nearest = z[doubted].abs().argsort(dim=1)[:, :UNCLEAR]
    for turned in itertools.product((False, True), repeat=nearest.shape[1]):
        flip = hidden[doubted].gather(1, nearest) & torch.tensor(turned, device=z.device)
        masks = z[doubted] > 0
        masks = masks.scatter(1, nearest, masks.gather(1, nearest) ^ flip)
        tried = _confirm(problem, next_layer, masks, known)
        better = tried.left_over < best.left_over[doubted]
        best = replace_rows(best, doubted[better], select_rows(tried, better))
    return best


def _known(problem: Problem, next_layer: NextLayer, others: Matches) -> tuple[Float[Tensor, "k b"], Float[Tensor, "k"]]:
    """What every t is orthogonal to, and the weight of that equation."""
    b = problem.batch_size
    duals = others.coordinates / next_layer.singular_values
    # An entry of y is known to σ_y, so c is, and Σ₂⁻¹c to σ_y ‖Σ₂⁻¹‖.
    entry = entry_noise(problem, next_layer, others.points)
    bent = entry * torch.linalg.vector_norm(1 / next_layer.singular_values) / torch.linalg.vector_norm(duals, dim=1)
    typical = problem.tolerance.noise * problem.tolerance.inverse_singular_values.square().mean().sqrt()
    stretch = torch.linalg.vector_norm(next_layer.back) / b**0.5  # ‖B t‖ / ‖t‖, on average
    return sphere.retract(duals), typical * stretch / bent


def _confirm(
    problem: Problem,
    next_layer: NextLayer,
    masks: Bool[Tensor, "k m"],
    known: tuple[Float[Tensor, "others b"], Float[Tensor, "others"]],
) -> Confirmation:
    pins, weights = known
    solved, norms = _pinned(next_layer.back, masks, problem.factors.left, pins, weights.expand(len(masks), -1))
    gradients = (solved[:, 0] @ next_layer.back.T) * masks
    size = torch.linalg.vector_norm(gradients, dim=1).clamp_min(torch.finfo(gradients.dtype).tiny)
    backs, inside = solved[:, 0] / size[:, None], gradients @ problem.factors.left
    left_over = torch.linalg.vector_norm(gradients - inside @ problem.factors.left.T, dim=1) / size
    directions = sphere.retract(inside)
    noise = backward_noise(problem, next_layer, directions, backs)
    return Confirmation(directions, backs, masks, left_over, noise, norms[:, 1])


def _pinned(
    matrix: Float[Tensor, "m b"],
    masks: Bool[Tensor, "k m"],
    fixed: Float[Tensor, "m b"],
    pins: Float[Tensor, "pins b"],
    weights: Float[Tensor, "k pins"],
) -> tuple[Float[Tensor, "k 2 b"], Float[Tensor, "k 2"]]:
    """``min_masked_residual`` of S ∘ (M v) with a fixed space, for v of unit ‖M v‖ and pinned by pins·v = 0."""
    b = matrix.shape[1]
    span, triangle = torch.linalg.qr(matrix)
    rows = torch.linalg.solve_triangular(triangle.T, pins.T, upper=False).T
    block, norms = min_masked_residual(masks, span, fixed, (rows, weights))
    solved = torch.linalg.solve_triangular(triangle, block.transpose(0, 1).reshape(b, -1), upper=True)
    return solved.reshape(b, len(masks), 2).permute(1, 2, 0), norms


def inputs_of(problem: Problem, points: Float[Tensor, "k b"]) -> Float[Tensor, "k n"]:
    """x from x̂ = Rᵀp, scaled so that its last coordinate is 1; of unit norm for a layer without bias."""
    inputs = points @ problem.factors.right
    if not problem.seen.has_bias:
        return sphere.retract(inputs)
    scale = inputs[:, -1:]
    return inputs[:, :-1] / torch.where(scale == 0, 1.0, scale)
