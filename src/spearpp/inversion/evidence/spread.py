"""How far noise may move a point that solves the equations of a network, computed from their Jacobian J.

With each equation divided by its noise, C = (JᵀJ)⁻¹ is the covariance of the point. This holds where the equations are
nearly linear within the error.

The root mean square of the norm of a normal vector with covariance C is √trace(C). Let σ_max, the square root of the
largest eigenvalue of C, be its largest standard deviation along any direction. The norm exceeds its mean by s σ_max at
most as often as a normal variable exceeds its mean by s standard deviations, because the norm is a function of
independent standard normal variables with Lipschitz constant σ_max. In many dimensions this bound is far smaller than s
times the root mean square.
"""

from dataclasses import dataclass, replace

import torch

from spearpp.inversion.evidence import EXACT
from spearpp.inversion.factors import Factors
from spearpp.inversion.network import SIGMAS, Network
from spearpp.inversion.problem import Problem
from spearpp.inversion.residuals import Residuals
from spearpp.inversion.solutions import Solutions
from spearpp.inversion.spans import Span
from spearpp.inversion.tangents import linearised
from spearpp.linalg import sphere
from spearpp.linalg.chunks import chunk_size
from spearpp.linalg.spectrum import trace_and_largest, trace_and_largest_of_inverse
from spearpp.types import Bool, Float, Int, Tensor, join_rows, replace_rows, select_rows

MIN_EQUATIONS_PER_UNKNOWN = 1.5
"""Number of equations for each unknown that are enough to judge the points of a large batch. Design choice: with 50 %
more equations than unknowns, several equations restrict every direction of a point."""
MAX_NONLINEARITY = 0.1
"""Largest ratio of second to first differences of the residuals at a point that is not exact, for steps as long as its
stated error; or the stated error, if that is larger. Measured with input entries of 140 to 285, which saturate most
neurons: of 674 points, seven were farther than three times their stated error from every sample, with ratios of 0.14 or
more. In other networks, 1 of 110 right points exceeds 0.1."""
TESTED_DIRECTIONS = 8
"""Number of random directions of these steps, whose median ratio counts. Measured together with the largest ratio."""
MIN_SKETCH_VECTORS = 64
"""Smallest number of random vectors that represent the noise outside of the row space. Measured with 64 vectors and b =
40 to 450: the root mean square of the norm is right to 4 %. The largest standard deviation is overestimated by 6 to 48
%, because the largest eigenvalue of a sample covariance is larger than that of the covariance. With fewer vectors for
each unknown, the overestimate is larger."""
SAMPLES_PER_SKETCH_VECTOR = 4
"""Largest number of samples for each of these random vectors. Measured together with their smallest number."""
MAX_KINK = 0.5
"""Largest ratio of second to first differences along the direction that the equations determine least. Derived: the
ratio is 1 if the equations determine this direction on one side of a point only, as where a neuron is at the kink of a
ReLU, and 0.5 if they say a third as much on the other side."""
POWERS = 4
"""Number of power iterations for this direction. Design choice: a kink matters if one direction is far weaker than all
others, and one iteration would nearly do then."""
LARGE_BATCH = 400
"""Batch size above which the matrices of all points are not kept, and points are judged by some of the equations if
these are enough. Design choice: above this size, the matrices of all equations take a large part of the time of an
inversion, and the matrices of 400 points need 0.5 GB."""


@dataclass(frozen=True, eq=False)
class Spread:
    """How far noise moves each point from its sample: by a random vector and by a systematic offset.

    All values are inf for a point that the equations do not determine.
    """

    total: Float[Tensor, "k"]
    """Root mean square of the norm of the random vector."""
    largest: Float[Tensor, "k"]
    """σ_max, the largest standard deviation of the random vector along any direction."""
    offset: Float[Tensor, "k"]
    """Distance from the sample to the minimum of the expected squared residuals: the part of the movement that is the
    same for every draw of the noise."""
    response: Float[Tensor, "k"]
    """Largest distance by which residuals of norm 1 move the point."""
    weakest: Float[Tensor, "k u"]
    """Unit vector along which the equations determine the point least, up to a few steps of a power iteration."""
    factors: Float[Tensor, "k u u"] | None = None
    """Cholesky factors of JᵀJ; None for a large batch, because they would need too much memory."""

    def with_noise(self, total: Float[Tensor, "k"], largest: Float[Tensor, "k"]) -> "Spread":
        """Return the spread after adding independent noise."""
        return replace(self, total=torch.hypot(self.total, total), largest=torch.hypot(self.largest, largest))

    def along(self, vectors: Float[Tensor, "k u"]) -> Float[Tensor, "k"]:
        """Return the standard deviation of v · t for one vector v of each point t, or a bound on it."""
        if self.factors is None:
            return self.largest * sphere.norm(vectors)
        solved = torch.linalg.solve_triangular(self.factors, vectors[:, :, None], upper=False)
        return torch.linalg.vector_norm(solved[:, :, 0], dim=1)

    @property
    def reach(self) -> Float[Tensor, "k"]:
        """A norm that the random vector exceeds as rarely as a normal variable exceeds ``SIGMAS`` standard deviations.

        The smaller of two bounds is used. ``SIGMAS`` · ``total`` is smaller if one direction dominates; there the norm
        behaves like the absolute value of one normal variable. The other bound is explained at the top of this module.
        """
        return torch.minimum(SIGMAS * self.total, self.total + SIGMAS * self.largest)


def spread_of(
    problem: Problem,
    network: Network,
    found: Solutions,
    levels: Float[Tensor, "s k"],
    others: Float[Tensor, "k j b"] | None,
) -> Spread:
    """Return how far noise moves each point.

    ``others`` are further equations rows · p = 0 for each point, divided by their noise
    (``spearpp.inversion.evidence.joint``). The matrices JᵀJ of a large batch take most of the time of an inversion. So
    the points of a large batch are first judged by the forward equations of the first later layers, if these are
    enough. Fewer equations can only give a larger error. Points that are not exact by this test are judged again by all
    equations.
    """
    if problem.batch_size <= LARGE_BATCH or others is not None:
        return _spread_by(problem, network, network.usable_spans, found, levels, others)
    spans = _first_inputs(problem, network)
    spread = _spread_by(problem, network, spans, found, levels, None)
    norms = torch.linalg.vector_norm(found.coordinates, dim=1)
    rows = torch.nonzero(~(spread.reach + spread.offset <= EXACT / 2 * norms))[:, 0]
    if len(spans) < len(network.usable_spans) and len(rows):
        some = select_rows(found, rows)
        better = _spread_by(problem, network, network.usable_spans, some, levels[:, rows], None)
        spread = replace_rows(spread, rows, better)
    return spread


def _first_inputs(problem: Problem, network: Network) -> tuple[Span, ...]:
    """Return the first forward equations that are clearly more than the unknowns, or all equations."""
    inputs = [span for span in network.usable_spans if not span.signals]
    for count in range(1, len(inputs) + 1):
        if sum(span.equations for span in inputs[:count]) >= MIN_EQUATIONS_PER_UNKNOWN * problem.batch_size:
            return tuple(inputs[:count])
    return network.usable_spans


def _spread_by(
    problem: Problem,
    network: Network,
    spans: tuple[Span, ...],
    found: Solutions,
    levels: Float[Tensor, "s k"],
    others: Float[Tensor, "k j b"] | None,
) -> Spread:
    """Return what ``spread_of`` returns, from the matrices JᵀJ of the equations of some spans.

    Noise δ of an input outside of V moves the pre-activations by Ŵ δ. This moves the point with the smallest residuals
    by -(JᵀJ)⁻¹ JᵀJ_z Ŵ δ, where J_z are derivatives with respect to the pre-activations. The levels treat this noise as
    independent in all equations. So its part of the levels is left out of (JᵀJ)⁻¹ here.

    If the bias gradient is off by δ for a sample, the last entry of V p̄ should be 1 + δ instead of 1. The point with
    the smallest residuals then moves by -δ (o + B w), with origin o and basis B of the points, and
    w = -(BᵀJᵀJ B)⁻¹ BᵀJᵀJ o.
    """
    equations, weights = weighted_equations(problem, network, spans, levels)
    origin, basis = problem.input_space
    t = (found.coordinates - origin) @ basis
    extended, unseen = torch.cat([basis, origin[:, None]], dim=1), moved_from_outside(problem)
    equations.place(origin, extended, beyond=unseen)
    off = problem.tolerance.bias_noise * problem.tolerance.amplification(found.coordinates)
    entry, unknowns = row_deviation(problem.factors, found.coordinates), t.shape[1]
    parts = []
    for rows in torch.arange(len(t), device=t.device).split(chunk_size(t.device, 64 * equations.basis.shape[1] ** 2)):
        at = torch.nn.functional.pad(t[rows], (0, equations.basis.shape[1] - unknowns))
        _, products, _ = equations.normal_equations(at, found.labels[rows], weights[rows])
        if others is not None:
            linear = torch.nn.functional.pad(others[rows] @ extended, (0, unseen.shape[1]))
            products = products + linear.mT @ linear
        products, crossed = products[:, :unknowns, :unknowns], products[:, :unknowns, unknowns:]
        slope = _slope_of_noise(network, equations, at, found.labels[rows], levels[:, rows])[:, :unknowns]
        factors, failed = torch.linalg.cholesky_ex(products)
        solved = torch.cholesky_solve(torch.cat([slope[:, :, None], crossed], dim=2), factors)
        moved, turned = torch.linalg.vector_norm(solved[:, :, :2], dim=1).unbind(1)
        shifted = off[rows] * torch.hypot(turned, torch.linalg.vector_norm(origin)).nan_to_num(nan=torch.inf)
        offset = torch.where((failed == 0) & torch.isfinite(moved), moved, torch.inf)
        white = network.without_input_noise(equations.preactivations(at), levels[:, rows])
        usual, most = (each.sqrt() for each in trace_and_largest_of_inverse(products))
        kept = factors if problem.batch_size <= LARGE_BATCH else None
        weakest = slope
        for _ in range(POWERS):
            weakest = sphere.retract(torch.cholesky_solve(weakest[:, :, None], factors)[:, :, 0])
        spread = Spread(white * usual, white * most, offset, most, weakest, kept).with_noise(shifted, shifted)
        follows = trace_and_largest(solved[:, :, 2:])
        parts.append(spread.with_noise(*(entry[rows] * each.sqrt().nan_to_num(nan=torch.inf) for each in follows)))
    return join_rows(*parts)


def moved_from_outside(problem: Problem) -> Float[Tensor, "m j"]:
    """Return how noise of standard deviation 1 in the part of an input outside of V moves the pre-activations.

    The products of these vectors with themselves add up to Ŵ (I - V Vᵀ) Ŵᵀ, or to an estimate of it.
    """
    weight = problem.seen.weight.to(problem.factors.left)
    columns, count = weight.shape[1], max(MIN_SKETCH_VECTORS, problem.batch_size // SAMPLES_PER_SKETCH_VECTOR)
    if columns > count:
        noise = torch.randn(
            columns, count, generator=torch.Generator().manual_seed(0)
        )  # float64 takes five times as long
        noise = noise.to(weight) / count**0.5
    else:
        noise = torch.eye(columns, dtype=weight.dtype, device=weight.device)
    return weight @ (noise - problem.factors.rows.T @ (problem.factors.rows @ noise))


def _slope_of_noise(
    network: Network,
    equations: Residuals,
    t: Float[Tensor, "k u"],
    labels: Int[Tensor, "k"],
    levels: Float[Tensor, "s k"],
) -> Float[Tensor, "k u"]:
    """Return half of the derivative of the squared residuals that noise of the spaces causes, in units of the noise.

    A vector v in a space with the basis B and the singular values Σ has the noise σ √e ‖Σ⁻¹Bᵀv‖ / ‖v‖
    (``spearpp.inversion.spans``), and the squared residuals of its e equations are divided by level² / e.
    """
    at = linearised(network, equations.preactivations(t), labels, network.usable_spans)
    images = []
    for span, vectors, level in zip(network.usable_spans, at.vectors, levels, strict=True):
        units = vectors / sphere.norm(vectors)[:, None]
        amplified = (units @ span.basis) / span.singular_values
        change = (amplified / span.singular_values) @ span.basis.T - amplified.square().sum(1, keepdim=True) * units
        image = (span.noise * span.equations / level).square()[:, None] * change / sphere.norm(vectors)[:, None]
        images.append(image[:, None, : image.shape[1] - span.appended_one])
    return at.vjps(images)[:, 0] @ equations.basis


def weighted_equations(
    problem: Problem, network: Network, spans: tuple[Span, ...], levels: Float[Tensor, "s k"]
) -> tuple[Residuals, Float[Tensor, "k t"]]:
    """Return the equations of some spans, and the weights that divide the equations of each point by their noise.

    The equations are placed in ``Problem.input_space``. ``levels`` are the levels of all spans. The level of a span is
    the norm of the noise of all its equations. The noise of one equation is the level over the square root of their
    number.
    """
    equations = Residuals(network, spans, problem.coordinates_to_preactivations, torch.float64)
    equations.place(*problem.input_space)
    levels = levels[[network.usable_spans.index(span) for span in spans]]
    sizes = torch.tensor([span.equations for span in spans], device=levels.device)
    return equations, (sizes[:, None].sqrt() / levels).T


def row_deviation(factors: Factors, points: Float[Tensor, "k b"]) -> Float[Tensor, "k"]:
    """Return the standard deviation of an entry of x̂ = V p that noise in the rows of the gradient causes."""
    return torch.linalg.vector_norm((points / factors.singular_values) @ factors.left.T * factors.row_noise, dim=1)


def without_kink(
    problem: Problem,
    network: Network,
    found: Solutions,
    levels: Float[Tensor, "s k"],
    reach: Float[Tensor, "k"],
    weakest: Float[Tensor, "k u"],
    others: Float[Tensor, "k j b"] | None,
) -> Bool[Tensor, "k"]:
    """Return at which points the equations determine the weakest direction on both sides.

    If fewer neurons are active for a sample than there are unknowns, the solutions form a line. It ends where another
    neuron becomes active. A search can stop there, and the derivatives on the active side then seem to determine the
    point. ``reach`` is the length of the step to both sides, ``others`` are equations like those of ``spread_of``.
    """
    equations, weights = weighted_equations(problem, network, network.usable_spans, levels)
    origin, basis = problem.input_space
    t, step = (found.coordinates - origin) @ basis, reach[:, None] * weakest
    tried = torch.cat([t, t + step, t - step])
    here, ahead, behind = equations(tried, found.labels.repeat(3), weights.repeat(3, 1)).chunk(3)
    first = sphere.norm(ahead - behind)
    if others is not None:
        first = torch.hypot(first, 2 * sphere.norm((others @ (step @ basis.T)[:, :, None])[:, :, 0]))
    return sphere.norm(ahead + behind - 2 * here) <= MAX_KINK * first


def nearly_linear(
    problem: Problem,
    network: Network,
    found: Solutions,
    levels: Float[Tensor, "s k"],
    error: Float[Tensor, "k"],
) -> Bool[Tensor, "k"]:
    """Return at which points the residuals are nearly linear within the stated error.

    For a step δ as long as the error, r(p + δ) + r(p - δ) - 2 r(p) must be small against r(p + δ) - r(p - δ). A larger
    error allows a larger ratio: in a network that is not saturated, the ratio is about 0.6 times the error.
    """
    equations, weights = weighted_equations(problem, network, network.usable_spans, levels)
    origin, basis = problem.input_space
    t, generator = (found.coordinates - origin) @ basis, torch.Generator().manual_seed(0)
    size = (error * torch.linalg.vector_norm(found.coordinates, dim=1))[:, None]
    here, ratios = equations(t, found.labels, weights), []
    for _ in range(TESTED_DIRECTIONS):
        step = size * sphere.retract(torch.randn(t.shape, generator=generator, dtype=t.dtype)).to(t)
        ahead, behind = (equations(t + sign * step, found.labels, weights) for sign in (1, -1))
        ratios.append(sphere.norm(ahead + behind - 2 * here) / sphere.norm(ahead - behind))
    return torch.stack(ratios).median(0).values <= error.clamp_min(MAX_NONLINEARITY)
