"""Use certified samples as evidence for the other samples: p is orthogonal to the directions of all other samples.

The equations of the network judge each sample alone. For two kinds of samples this is not enough. A sample that
activates few ReLU neurons leaves some directions of p without an equation, because inactive neurons do not change with
p. The equations of a faint sample, which the network classifies with confidence, are noisy. Certified samples give
further equations: with q_j = Lᵀd_j for the signal d_j of a certified sample j, every other sample satisfies
(Σ⁻¹q_j)·p = 0.

The noise of this equation has three parts, all of them multiplied by ‖Σ⁻¹p‖. Noise of standard deviation σ in the
gradient adds σ ‖Σ⁻¹q_j‖. The client rounds d_j, which adds the relative rounding over √m. And d_j is computed from the
recovered sample j, whose error has the covariance (JᵀJ)⁻¹.
"""

import torch

from spearpp.inversion.evidence import Evidence
from spearpp.inversion.evidence.network import judge_points
from spearpp.inversion.evidence.spread import Spread, row_deviation, weighted_equations
from spearpp.inversion.network import SIGMAS, Network
from spearpp.inversion.problem import Problem
from spearpp.inversion.residuals import Residuals
from spearpp.inversion.solutions import Solutions
from spearpp.inversion.spans import Span
from spearpp.inversion.tangents import linearised
from spearpp.linalg import sphere
from spearpp.linalg.least_squares import Options, levenberg_marquardt
from spearpp.types import Float, Tensor, replace_rows, select_rows

MAX_PASSES = 4
"""Largest number of times that newly certified samples are used for the others. Design choice: one or two help."""
MAX_MULTIPLICATIONS = 2e12
"""Budget for the matrices JᵀJ of the samples that are solved again, in multiplications for one step. Design choice:
about 20 seconds of a CPU core."""
MAX_STEPS = 12
"""Largest number of steps with the equations of the network and of the other samples. Design choice: two are usual."""


def certify_together(problem: Problem, network: Network, found: Solutions) -> tuple[Solutions, Evidence]:
    """Collect the evidence for samples, first for each one alone, then with the help of certified samples.

    Returns:
        The samples and their evidence. Samples that others help to determine are replaced by the solution of all
        equations together.
    """
    evidence, spread = judge_points(problem, network, found)
    own = next((span for span in network.usable_spans if span.signals and span.layer == 0), None)
    for _ in range(MAX_PASSES):
        known = evidence.exact
        rows = torch.nonzero((evidence.details["excess"] <= SIGMAS) & ~known)[:, 0]
        if own is None or not len(rows) or not bool(known.any()):
            break
        rows = rows[evidence.error[rows].argsort()][: _affordable(problem, network)]
        helpers = select_rows(found, known)
        others = _orthogonal(problem, network, own, helpers, select_rows(spread, known), found.coordinates[rows])
        moved = _solve(problem, network, select_rows(found, rows), others)
        new, more = judge_points(problem, network, moved, others)
        better = new.holds & (new.error < evidence.error[rows])
        found = replace_rows(found, rows[better], select_rows(moved, better))
        evidence = replace_rows(evidence, rows[better], select_rows(new, better))
        spread = replace_rows(spread, rows[better], select_rows(more, better))
        if not bool(new.exact.any()):
            break
    return found, evidence


def _affordable(problem: Problem, network: Network) -> int:
    """Return how many samples the budget allows to solve again."""
    equations = Residuals(network, network.usable_spans, problem.coordinates_to_preactivations, torch.float64)
    return max(1, int(MAX_MULTIPLICATIONS / equations.multiplications(1, problem.batch_size)))


def _orthogonal(
    problem: Problem,
    network: Network,
    own: Span,
    known: Solutions,
    spread: Spread,
    points: Float[Tensor, "k b"],
) -> Float[Tensor, "k j b"]:
    """Return the rows of the equations rows · p = 0 that known samples give for points, divided by their noise."""
    factors, preactivations = problem.factors, problem.coordinates_to_preactivations
    moved_by = preactivations @ problem.input_space[1]
    z = known.coordinates @ preactivations.T
    at = linearised(network, z, known.labels, [own])
    size = torch.linalg.vector_norm(at.vectors[0], dim=1, keepdim=True)
    signals = (at.vectors[0] / size) @ factors.left
    rounding = network.rounding_of_signals(z, known.labels, own) / len(factors.left) ** 0.5
    rows = signals / factors.singular_values
    moved = []
    for through in points / factors.singular_values:
        change = through - (signals @ through)[:, None] * signals  # the length of a signal does not matter
        derivative = at.vjps([(change @ factors.left.T / size)[:, None]])[:, 0] @ moved_by
        moved.append(spread.along(derivative))
    gradient = row_deviation(factors, points)[:, None] * torch.linalg.vector_norm(rows, dim=1)
    rounded = torch.linalg.vector_norm(points / factors.singular_values, dim=1)[:, None] * rounding
    noise = torch.hypot(torch.hypot(gradient, rounded), torch.stack(moved))
    return rows / noise[:, :, None]


def _solve(problem: Problem, network: Network, start: Solutions, others: Float[Tensor, "k j b"]) -> Solutions:
    """Minimise the residuals of the network and of the other samples together, from the given points."""
    levels = network.levels(start.coordinates @ problem.coordinates_to_preactivations.T, start.labels)[1]
    equations, weights = weighted_equations(problem, network, network.usable_spans, levels)
    origin, basis = problem.input_space
    linear = others @ basis
    constant = (others @ origin.expand_as(start.coordinates)[:, :, None])[:, :, 0]

    def squared(t: Tensor, which: Tensor) -> Tensor:
        rest = constant[which] + (linear[which] @ t[:, :, None])[:, :, 0]
        return equations.squared(t, start.labels[which], weights[which]) + rest.square().sum(1)

    def normal(t: Tensor, which: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        error, product, slope = equations.normal_equations(t, start.labels[which], weights[which])
        rest = constant[which] + (linear[which] @ t[:, :, None])[:, :, 0]
        product = product + linear[which].mT @ linear[which]
        return error + rest.square().sum(1), product, slope + (linear[which].mT @ rest[:, :, None])[:, :, 0]

    t = (start.coordinates - origin) @ basis
    t, _, _ = levenberg_marquardt(squared, normal, t, Options(MAX_STEPS, damping=1e-9, patience=0))
    points = origin + t @ basis.T
    signals = network.replay(points @ problem.coordinates_to_preactivations.T, start.labels)[1][0]
    return Solutions(points, start.labels, sphere.retract(signals @ problem.factors.left))
