"""Evidence from the equations of the whole network, for each input on its own.

For a true sample, each input of a layer that the network computes lies in the row space of the gradient of this layer,
and each signal in the column space. The input or signal is a *vector*, and the row or column space is its *space*.
Noise moves a vector out of its space: the *level* is the share of the vector outside its space that noise explains
(``spearpp.inversion.network``). For every input:

- **holds**: the share of every vector outside its space is at most ``SIGMAS`` times its level. A wrong point would
  have to satisfy all equations beyond the unknowns by chance: the probability that s equations hold to within a
  relative residual r is of the order of r^s (``effective_equations`` counts s). No other sample may share the signal of
  the input by chance (``_same_signal``);
- **determined**: the Jacobian J of the equations, each divided by its noise, has full rank: no other input close by
  satisfies the equations. They determine it on both sides of every kink of an activation within its stated error. For a
  layer without bias, the input with the opposite sign must violate them. If the input is not exact, the equations must
  be nearly linear within its stated error;
- **error**: the sum of three distances, relative to the norm of the input:

  - *noise*: noise of the equations moves p̄ (``spread``), and noise in the rows of the layer's gradient changes every
    entry of x̂ = V p̄. The distance is exceeded as rarely as a normal variable exceeds ``SIGMAS`` standard deviations
    (``Spread.reach``). It is multiplied by the largest ratio of a share to its level, corrected for the number of
    unknowns, if this exceeds 1;
  - *unexplained residuals*: how far residuals that noise does not explain may move the input;
  - *offset*: the noise of a space disturbs some vectors more than others. The smallest residuals therefore lie beside
    the sample, towards vectors with less noise. For example, two similar samples are moved towards their mean.

An input may stand for several samples that are too similar for the gradient to distinguish. Only a replay of each input
alone says how many (``spearpp.auditing.signals``).
"""

import math

import torch

from spearpp.inversion.evidence import EXACT, MIN_VIOLATION, Evidence, Scope
from spearpp.inversion.evidence.spread import Spread, nearly_linear, row_deviation, spread_of, without_kink
from spearpp.inversion.network import CLIENT_ROUNDING, SIGMAS, Network
from spearpp.inversion.problem import Problem
from spearpp.inversion.solutions import Solutions
from spearpp.inversion.tolerance import RARE
from spearpp.linalg.spectrum import rank_above
from spearpp.types import Bool, Float, Tensor, select_rows

POINTS_PER_SAMPLE = 3
"""Number of random points for each sample of the batch, from which the number of effective equations is computed.
Derived: there must be more points than unknowns, because the points of one span show at most as many equations as there
are points."""


def judge_points(
    problem: Problem, network: Network, found: Solutions, others: Float[Tensor, "k j b"] | None = None
) -> tuple[Evidence, Spread]:
    """Collect the evidence for inputs that solve the equations of the network.

    ``others`` are the equations that other samples give for each input (``joint``). Details of each input: ``outside``,
    the largest share of a vector outside its space; ``excess``, the largest ratio of a share to its level; ``chance``,
    a bound on the probability of a wrong point.

    Returns:
        The evidence, and how far noise moves the coordinates of each input.
    """
    z = found.coordinates @ problem.coordinates_to_preactivations.T
    outside, levels = network.levels(z, found.labels)
    ratios, sizes = outside / levels, [span.equations for span in network.usable_spans]
    excess = ratios.amax(0)
    if others is not None:
        residuals = (others @ found.coordinates[:, :, None])[:, :, 0]
        excess = torch.maximum(excess, residuals.abs().amax(1))
        ratios, sizes = torch.cat([ratios, residuals.square().mean(1).sqrt()[None]]), [*sizes, residuals.shape[1]]
    spread = spread_of(problem, network, found, levels, others)
    factors = problem.factors
    columns = factors.right.shape[1]
    inputs = (found.coordinates @ factors.rows)[:, : columns - problem.seen.has_bias]
    length = torch.linalg.vector_norm(inputs, dim=1)
    entry = row_deviation(factors, found.coordinates)
    underestimated = (_fit_correction(problem, sizes) * ratios.amax(0)).clamp_min(1)
    noise = underestimated * spread.with_noise(columns**0.5 * entry, entry).reach
    unexplained = _unexplained(ratios, sizes) * spread.response
    error = ((noise + unexplained + spread.offset) / length).nan_to_num(nan=torch.inf)
    effective = effective_equations(problem, network, found)
    surplus = effective - (problem.batch_size - problem.seen.has_bias)
    chance = (surplus * outside.amax(0).clamp_min(torch.finfo(z.dtype).tiny).log10()).clamp(max=0)
    chance = torch.maximum(chance, _same_signal(problem, found.directions))
    share = factors.shares(found.directions, found.coordinates)
    determined = torch.isfinite(spread.total) & ~_mirrored(problem, network, z)
    reach = (error * length).nan_to_num(posinf=0.0)
    determined &= without_kink(problem, network, found, levels, reach, spread.weakest, others)
    rows = torch.nonzero(determined & (error > EXACT))[:, 0]
    if len(rows):
        determined[rows] = nearly_linear(problem, network, select_rows(found, rows), levels[:, rows], error[rows])
    evidence = Evidence(
        holds=(excess <= SIGMAS) & (chance <= math.log10(RARE)) & torch.isfinite(error) & torch.isfinite(share),
        determined=determined,
        error=error,
        share=share,
        scope=Scope.NETWORK,
        details={"outside": outside.amax(0), "excess": excess, "chance": 10**chance},
        numbers={
            "equations": float(effective),
            "forward": float(sum(span.equations for span in network.usable_spans if not span.signals)),
            "backward": float(sum(span.equations for span in network.usable_spans if span.signals)),
        },
    )
    return evidence, spread


def _fit_correction(problem: Problem, sizes: list[int]) -> float:
    """Return how many times larger the residuals are at the true sample than at the point that was fitted.

    Fitting u unknowns to e equations with independent noise leaves e - u degrees of freedom. ``sizes`` are the numbers
    of equations of each kind.
    """
    count, unknowns = sum(sizes), problem.batch_size - problem.seen.has_bias
    return (count / max(1, count - unknowns)) ** 0.5


def _unexplained(ratios: Float[Tensor, "s k"], sizes: list[int]) -> Float[Tensor, "k"]:
    """Return the norm of the residuals that noise does not explain, in units of the noise of one equation.

    Samples whose gradient is below the noise cause such residuals. These residuals need not be random: all of them may
    point in the direction in which the equations determine the point least. The standard deviation of the squared norm
    of the noise of e equations is √(2/e) times its mean.
    """
    counts = torch.tensor(sizes, device=ratios.device)[:, None]
    return (counts * (ratios.square() - 1 - SIGMAS * (2 / counts).sqrt()).clamp_min(0)).sum(0).sqrt()


def effective_equations(problem: Problem, network: Network, found: Solutions) -> int:
    """Return the number of equations that random points violate by more than noise.

    This is the rank of the parts of their vectors outside the spans. The random points are as far from the origin of
    the input space as the found points. With several rounds, only the best round of a later layer counts, because the
    rounds may be alike.
    """
    origin, basis = problem.input_space
    t = (found.coordinates - origin) @ basis
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(
        POINTS_PER_SAMPLE * problem.batch_size + POINTS_PER_SAMPLE, t.shape[1], generator=generator, dtype=torch.float64
    )
    points = origin + float(t.square().mean().sqrt()) * draw.to(t) @ basis.T
    labels = torch.randint(max(1, network.label_count), (len(points),), generator=generator).to(found.labels)
    z = points @ problem.coordinates_to_preactivations.T
    every, _, levels = network.vectors_with_levels(z, labels)
    ranks: dict[tuple[int, bool], int] = {}
    later = max(1, len(network.rests[0].layers))
    for span, vectors, level in zip(network.usable_spans, every, levels.median(1).values, strict=True):
        units = vectors / torch.linalg.vector_norm(vectors, dim=1, keepdim=True).clamp_min(1e-300)
        # For one point, the level is the norm of the noise of all equations of the span.
        threshold = MIN_VIOLATION * float(level) * (len(points) / span.equations) ** 0.5
        key = (0 if span.layer == 0 else 1 + (span.layer - 1) % later, span.signals)
        ranks[key] = max(ranks.get(key, 0), rank_above(torch.nan_to_num(units @ span.complement), threshold))
    return sum(ranks.values())


def _same_signal(problem: Problem, directions: Float[Tensor, "k b"]) -> Float[Tensor, "k"]:
    """Return log₁₀ of the probability that the signal of another sample is proportional to that of each input.

    Samples with proportional signals are recovered as one combination of their inputs, whose weights may be negative.
    Where an entry of the signal is n times its noise, two signals agree by chance with a probability of 1/n. The
    largest entry sets the scale and does not count. In a saturated network, a few neurons carry the whole signal.
    """
    signals = directions @ problem.factors.left.T
    rounding = CLIENT_ROUNDING * problem.seen.gradient_epsilon / len(problem.factors.left) ** 0.5
    noise = problem.tolerance.amplification(directions)[:, None] * problem.factors.row_noise
    digits = (signals.abs() / (SIGMAS * torch.hypot(noise, torch.full_like(noise, rounding)))).clamp_min(1).log10()
    return digits.amax(1) - digits.sum(1)


def _mirrored(problem: Problem, network: Network, z: Float[Tensor, "k m"]) -> Bool[Tensor, "k"]:
    """Return which inputs of a layer without bias satisfy the equations with the opposite sign, for any label."""
    found = torch.zeros(len(z), dtype=torch.bool, device=z.device)
    if problem.seen.has_bias:
        return found
    for label in range(max(1, network.label_count)):
        outside, levels = network.levels(-z, torch.full_like(z[:, 0], label, dtype=torch.long))
        found |= (outside <= SIGMAS * levels).all(0)
    return found
