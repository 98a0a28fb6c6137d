"""Evidence from the equations of the whole network, for each input on its own.

At a sample every vector lies in its space up to noise, and the noise of each gradient is known
(``spearpp.inversion.network``). For every input:

- **holds**: the share of every vector outside its space is at most ``SIGMAS`` times what noise explains. A wrong point
  would have to satisfy all equations beyond the unknowns by chance: the probability that s equations hold to within a
  relative residual r is of the order of r^s. Only equations that random points violate by more than noise count: the
  signals of a linear network, for example, have only as many dimensions as the network has outputs. The signal of the
  input must have enough entries above the noise that no other sample shares it by chance;
- **determined**: the Jacobian J of the equations, each divided by its noise, has full rank: no other input close by
  satisfies the equations. For a layer without bias, the input with the opposite sign must violate them. If the input is
  not exact, the equations must be nearly linear within its stated error, which is computed from J;
- **error**: the covariance (JᵀJ)⁻¹ gives the standard deviation of p, and the noise of each row of the layer's gradient
  adds to every entry of x̂ = V p. The noise of the bias gradient moves p too, because x̂ = V p must end in 1. The stated
  error is ``SIGMAS`` standard deviations, multiplied by the largest ratio of a share to its level if this exceeds 1. It
  also covers residuals that noise does not explain, in any direction, and the bias of p: the noise of the spaces
  changes some vectors more than others, so that the smallest residuals lie beside the sample, towards vectors with less
  noise. Two similar samples are biased towards their mean.

An input may stand for several samples that are too similar for the gradient to distinguish. Only a replay of each input
alone says how many (``spearpp.auditing.signals``).
"""

import math
from dataclasses import dataclass

import torch

from spearpp.inversion.evidence.evidence import ABOVE_NOISE, EXACT, WHOLE_NETWORK, Evidence
from spearpp.inversion.factors import Factors
from spearpp.inversion.network import ROUNDING, SIGMAS, Network
from spearpp.inversion.problem import Problem
from spearpp.inversion.residuals import Residuals
from spearpp.inversion.solutions import Solutions, affine, coordinates_of
from spearpp.inversion.spans import Span, norm
from spearpp.inversion.tangents import linearised
from spearpp.inversion.tolerance import RARE
from spearpp.linalg import sphere
from spearpp.linalg.chunks import chunk_size
from spearpp.linalg.spectrum import rank_above, trace_of_inverse
from spearpp.types import Bool, Float, Int, Tensor, select_rows

PROBES = 3
"""Number of random points, over the batch size, that count the equations. Derived: more than the unknowns must be
found, and the points of one span can show at most as many equations as there are points."""

ENOUGH = 1.5
"""Number of equations over unknowns with which the points of a large batch are judged. Design choice: half as many
equations again leave every direction of a point with several of them."""
NEARLY_LINEAR, DIRECTIONS = 0.1, 8
"""Largest share of second differences in the change of the residuals within the stated error of a point that is not
exact, as the median over this many random directions. Measured with inputs of 140 to 285, which drive most neurons far
from their bend: of 674 such points seven were farther than three times their stated error from every sample, with
shares of 0.14 or more. Of 110 right ones in other networks one exceeds 0.1. If the stated error is larger than this
number, it is the limit."""
MAX_JOINT_BATCH = 400
"""Largest batch whose samples help each other. Design choice: this needs b matrices of b times b numbers, 0.5 GB."""


@dataclass(frozen=True, eq=False)
class Orthogonal:
    """Equations rows · p = 0 for each point, divided by their noise (``spearpp.inversion.evidence.joint``)."""

    rows: Float[Tensor, "k j b"]

    def residuals(self, points: Float[Tensor, "k b"]) -> Float[Tensor, "k j"]:
        """Return how far the points are from satisfying the equations, in units of the noise."""
        return (self.rows @ points[:, :, None])[:, :, 0]


def judge_points(
    problem: Problem, network: Network, found: Solutions, others: Orthogonal | None = None
) -> tuple[Evidence, Float[Tensor, "k u u"] | None]:
    """Collect the evidence for inputs that solve the equations of the network, and those of other samples if given.

    Details of each input: ``outside``, the largest share of a vector outside its space; ``excess``, the largest ratio
    of a share to its noise level; ``chance``, the bound on the probability of a wrong point.

    Returns:
        The evidence, and the matrix JᵀJ of each input, whose inverse is the covariance of its coordinates; None instead
        of the matrices for batches above ``MAX_JOINT_BATCH``.
    """
    preactivations, _ = coordinates_of(problem)
    z = found.coordinates @ preactivations.T
    shares, levels = network.levels(z, found.labels)
    excess = (shares / levels).amax(0)
    if others is not None:
        excess = torch.maximum(excess, others.residuals(found.coordinates).abs().amax(1))
    spread, bias, information = _spread(problem, network, found, levels, others)
    factors = problem.factors
    columns = factors.right.shape[1]
    rows = columns**0.5 * row_deviation(factors, found.coordinates)
    inputs = (found.coordinates @ factors.rows)[:, : columns - problem.seen.has_bias]
    length = torch.linalg.vector_norm(inputs, dim=1)
    sigmas = SIGMAS * excess.clamp_min(1)
    deviation = torch.hypot(torch.maximum(sigmas, _unexplained(network, shares / levels)) * spread, sigmas * rows)
    error = (deviation + bias) / length
    effective = effective_equations(problem, network, found)
    surplus = effective - (problem.batch_size - problem.seen.has_bias)
    chance = (surplus * shares.amax(0).clamp_min(torch.finfo(z.dtype).tiny).log10()).clamp(max=0)
    chance = torch.maximum(chance, _same_signal(problem, found.directions))
    share = factors.shares(found.directions, found.coordinates)
    determined = torch.isfinite(spread) & ~_mirrored(problem, network, z)
    rows = torch.nonzero(determined & (error > EXACT))[:, 0]
    if len(rows):
        determined[rows] = _nearly_linear(problem, network, select_rows(found, rows), levels[:, rows], error[rows])
    evidence = Evidence(
        holds=(excess <= SIGMAS) & (chance <= math.log10(RARE)) & torch.isfinite(error) & torch.isfinite(share),
        determined=determined,
        error=error,
        share=share,
        layers=WHOLE_NETWORK,
        details={"outside": shares.amax(0), "excess": excess, "chance": 10**chance},
        numbers={"equations": float(effective), **_counts(network)},
    )
    return evidence, information


def _counts(network: Network) -> dict[str, float]:
    """Return how many equations of each kind a point must satisfy."""
    return {
        name: float(sum(span.equations for span in network.equations if span.signals is signals))
        for name, signals in (("forward", False), ("backward", True))
    }


def _unexplained(network: Network, ratios: Float[Tensor, "s k"]) -> Float[Tensor, "k"]:
    """Return the norm of the residuals that noise does not explain, in units of the noise of one equation.

    Samples below the noise cause such residuals. They need not have random directions, so all of this norm may point in
    the direction in which the equations determine the point least. The squared norm of the noise of e equations varies
    by √(2/e) of its mean.
    """
    sizes = torch.tensor([span.equations for span in network.equations], device=ratios.device)[:, None]
    return (sizes * (ratios.square() - 1 - SIGMAS * (2 / sizes).sqrt()).clamp_min(0)).sum(0).sqrt()


def effective_equations(problem: Problem, network: Network, found: Solutions) -> int:
    """Return the number of equations that random points violate by more than noise.

    The parts of their vectors outside the spans have this rank. Random points are as far from the mean of the found
    points as these are. With several rounds, a later layer counts once, with its best round: the rounds may be alike.
    """
    preactivations, one = coordinates_of(problem)
    origin, basis = affine(torch.eye(problem.batch_size, dtype=torch.float64, device=preactivations.device), one)
    t = (found.coordinates - origin) @ basis
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(PROBES * problem.batch_size + PROBES, t.shape[1], generator=generator, dtype=torch.float64)
    points = origin + float(t.square().mean().sqrt()) * draw.to(t) @ basis.T
    labels = torch.randint(max(1, network.labels), (len(points),), generator=generator).to(found.labels)
    z = points @ preactivations.T
    levels = network.levels(z, labels, tolerated=math.inf)[1].median(1).values
    ranks: dict[tuple[int, bool], int] = {}
    later = max(1, len(network.rests[0].layers))
    for span, vectors, level in zip(
        network.equations, network.vectors(z, labels, network.equations), levels, strict=True
    ):
        units = vectors / torch.linalg.vector_norm(vectors, dim=1, keepdim=True).clamp_min(1e-300)
        # The level is the norm of the noise of all equations of the span, for one point.
        threshold = ABOVE_NOISE * float(level) * (len(points) / span.equations) ** 0.5
        key = (0 if span.layer == 0 else 1 + (span.layer - 1) % later, span.signals)
        ranks[key] = max(ranks.get(key, 0), rank_above(torch.nan_to_num(units @ span.complement), threshold))
    return sum(ranks.values())


def _same_signal(problem: Problem, directions: Float[Tensor, "k b"]) -> Float[Tensor, "k"]:
    """Return log₁₀ of the probability that the signal of another sample is proportional to that of each input.

    Such samples are recovered as one combination of their inputs, whose weights may be negative. Where an entry of the
    signal is n times its noise, two signals agree by chance with a probability of 1/n. The largest entry sets the
    scale. In a saturated network, a few neurons carry the whole signal.
    """
    signals = directions @ problem.factors.left.T
    rounding = ROUNDING * problem.seen.gradient_epsilon / len(problem.factors.left) ** 0.5
    noise = problem.tolerance.amplification(directions)[:, None] * problem.factors.row_noise
    digits = (signals.abs() / (SIGMAS * torch.hypot(noise, torch.full_like(noise, rounding)))).clamp_min(1).log10()
    return digits.amax(1) - digits.sum(1)


def _nearly_linear(
    problem: Problem,
    network: Network,
    found: Solutions,
    levels: Float[Tensor, "s k"],
    error: Float[Tensor, "k"],
) -> Bool[Tensor, "k"]:
    """Return at which points the residuals are nearly linear within the stated error.

    With ±δ of the size of the error, r(p + δ) + r(p - δ) - 2 r(p) must be small against r(p + δ) - r(p - δ). A larger
    error allows more: in a network that is not saturated, the share is about 0.6 times the error.
    """
    equations, weights, (origin, basis) = weighted_equations(problem, network, network.equations, levels)
    t, generator = (found.coordinates - origin) @ basis, torch.Generator().manual_seed(0)
    size = (error * torch.linalg.vector_norm(found.coordinates, dim=1))[:, None]
    here, shares = equations(t, found.labels, weights), []
    for _ in range(DIRECTIONS):
        step = size * sphere.retract(torch.randn(t.shape, generator=generator, dtype=t.dtype)).to(t)
        ahead, behind = (equations(t + sign * step, found.labels, weights) for sign in (1, -1))
        shares.append(norm(ahead + behind - 2 * here) / norm(ahead - behind))
    return torch.stack(shares).median(0).values <= error.clamp_min(NEARLY_LINEAR)


def _mirrored(problem: Problem, network: Network, z: Float[Tensor, "k m"]) -> Bool[Tensor, "k"]:
    """Return which inputs of a layer without bias satisfy the equations with the opposite sign, for any label."""
    found = torch.zeros(len(z), dtype=torch.bool, device=z.device)
    if problem.seen.has_bias:
        return found
    for label in range(max(1, network.labels)):
        shares, levels = network.levels(-z, torch.full_like(z[:, 0], label, dtype=torch.long))
        found |= (shares <= SIGMAS * levels).all(0)
    return found


def _spread(
    problem: Problem, network: Network, found: Solutions, levels: Float[Tensor, "s k"], others: Orthogonal | None
) -> tuple[Float[Tensor, "k"], Float[Tensor, "k"], Float[Tensor, "k u u"] | None]:
    """Return the standard deviation and the bias of each point, and the matrices JᵀJ if they are kept.

    Both are inf if a point is not determined. The matrices of a large batch take most of the time of an inversion. Its
    points are judged by the inputs of the first later layers alone, if these are enough: fewer equations leave a larger
    error. Points that are not exact by these are judged by all equations.
    """
    if problem.batch_size <= MAX_JOINT_BATCH:
        return _spread_by(problem, network, network.equations, found, levels, others)
    spans = _first_inputs(problem, network)
    spread, bias, _ = _spread_by(problem, network, spans, found, levels, None)
    norms = torch.linalg.vector_norm(found.coordinates, dim=1)
    rows = torch.nonzero(~(SIGMAS * spread + bias <= EXACT / 2 * norms))[:, 0]
    if len(spans) < len(network.equations) and len(rows):
        some = select_rows(found, rows)
        spread[rows], bias[rows], _ = _spread_by(problem, network, network.equations, some, levels[:, rows], None)
    return spread, bias, None


def _first_inputs(problem: Problem, network: Network) -> tuple[Span, ...]:
    """Return the first forward equations that are clearly more than the unknowns, or all equations."""
    inputs = [span for span in network.equations if not span.signals]
    for count in range(1, len(inputs) + 1):
        if sum(span.equations for span in inputs[:count]) >= ENOUGH * problem.batch_size:
            return tuple(inputs[:count])
    return network.equations


def _spread_by(
    problem: Problem,
    network: Network,
    spans: tuple[Span, ...],
    found: Solutions,
    levels: Float[Tensor, "s k"],
    others: Orthogonal | None,
) -> tuple[Float[Tensor, "k"], Float[Tensor, "k"], Float[Tensor, "k u u"] | None]:
    """Return what ``_spread`` returns, from the matrices JᵀJ of the equations of some spans.

    If the bias gradient is off by δ in the direction of p, p must not end in 1 but in 1 + δ. The smallest residuals
    then move by -δ (o + B w), with origin o and basis B of the points, and w = -(BᵀJᵀJ B)⁻¹ BᵀJᵀJ o. Chunks of points
    bound the memory.
    """
    equations, weights, (origin, basis) = weighted_equations(problem, network, spans, levels)
    t = (found.coordinates - origin) @ basis
    extended = torch.cat([basis, origin[:, None]], dim=1)
    equations.place(origin, extended)
    off = problem.tolerance.bias_noise * problem.tolerance.amplification(found.coordinates)
    spreads, biases, kept = [], [], []
    for rows in torch.arange(len(t), device=t.device).split(chunk_size(t.device, 32 * t.shape[1] ** 2)):
        at = torch.cat([t[rows], torch.zeros_like(t[rows, :1])], dim=1)
        products = equations.normal_equations(at, found.labels[rows], weights[rows])[1]
        if others is not None:
            linear = others.rows[rows] @ extended
            products = products + linear.mT @ linear
        products, along = products[:, :-1, :-1], products[:, :-1, -1]
        pulled = _pull_of_noise(network, equations, at, found.labels[rows], levels[:, rows])[:, :-1]
        factors, failed = torch.linalg.cholesky_ex(products)
        solved = torch.cholesky_solve(torch.stack([pulled, along], dim=2), factors)
        moved, turned = torch.linalg.vector_norm(solved, dim=1).unbind(1)
        shifted = off[rows] * torch.hypot(turned, torch.linalg.vector_norm(origin))
        spreads.append(torch.hypot(trace_of_inverse(products).sqrt(), torch.nan_to_num(shifted, nan=torch.inf)))
        biases.append(torch.where((failed == 0) & torch.isfinite(moved), moved, torch.inf))
        kept += [products] if problem.batch_size <= MAX_JOINT_BATCH else []
    return torch.cat(spreads), torch.cat(biases), torch.cat(kept) if kept else None


def _pull_of_noise(
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
    at = linearised(network, equations.preactivations(t), labels, network.equations)
    images = []
    for span, vectors, level in zip(network.equations, at.vectors, levels, strict=True):
        units = vectors / norm(vectors)[:, None]
        amplified = (units @ span.basis) / span.singular_values
        change = (amplified / span.singular_values) @ span.basis.T - amplified.square().sum(1, keepdim=True) * units
        image = (span.noise * span.equations / level).square()[:, None] * change / norm(vectors)[:, None]
        images.append(image[:, None, : image.shape[1] - span.appended_one])
    return at.pull(images)[:, 0] @ equations.basis


def weighted_equations(
    problem: Problem, network: Network, spans: tuple[Span, ...], levels: Float[Tensor, "s k"]
) -> tuple[Residuals, Float[Tensor, "k t"], tuple[Float[Tensor, "b"], Float[Tensor, "b u"]]]:
    """Return equations, the weights that divide those of each point by their noise, and origin and basis of points.

    ``levels`` are those of all equations, and the weights those of the spans.

    The level of a span is the norm of the noise of all its equations, so one equation has the level over the square
    root of their number.
    """
    preactivations, one = coordinates_of(problem)
    equations = Residuals(network, spans, preactivations, torch.float64)
    origin, basis = affine(torch.eye(problem.batch_size, dtype=torch.float64, device=preactivations.device), one)
    equations.place(origin, basis)
    levels = levels[[network.equations.index(span) for span in spans]]
    sizes = torch.tensor([span.equations for span in spans], device=levels.device)
    return equations, (sizes[:, None].sqrt() / levels).T, (origin, basis)


def row_deviation(factors: Factors, points: Float[Tensor, "k b"]) -> Float[Tensor, "k"]:
    """Return the standard deviation of an entry of x̂ = V p that noise in the rows of the gradient causes."""
    return torch.linalg.vector_norm((points / factors.singular_values) @ factors.left.T * factors.row_noise, dim=1)
