"""The end of a round: solve all equations in float64 from points close to samples, and accept the new samples."""

import torch

from spearpp.inversion.network import MIN_DOUBTFUL_RATIO, SIGMAS, Network
from spearpp.inversion.problem import Problem
from spearpp.inversion.residuals import Residuals
from spearpp.inversion.solutions import Solutions, no_solutions
from spearpp.linalg import sphere
from spearpp.linalg.least_squares import Options
from spearpp.search.equations.descent import descend
from spearpp.search.equations.directions import directions_of
from spearpp.types import Bool, Float, Int, Tensor, join_rows, select_rows

FINISH_STEPS = 12
"""Largest number of steps in float64 with all equations. Two are usual. Design choice: far more than usual,
because only points that passed every test reach these steps."""
NEARBY_DESCENTS = 8
"""Number of descents that look for a lower residual close to a doubtful point. Measured: of 32 such descents from a
local minimum 20 found one."""
MAX_MULTIPLICATIONS = 1e11
"""Largest number of multiplications for the matrices JᵀJ of one step of these descents. Design choice: about a second
on one CPU core."""
MAX_INFORMATIVE_LEVEL = 0.1
"""Equations count for a point if their level is at most this number. Design choice: at a level of 1, every point
satisfies the equations."""
MIN_REPEATED_SHARE = 0.5
"""Smallest share (p_i·q_j)(p_j·q_i) / (p_i·q_i)(p_j·q_j) of two solutions for the same sample. Derived: the share is 0
for two different samples and 1 for the same sample. Measured with noise (b = 20): up to 0.03 and 1.00."""
SAME_POINT_DISTANCE = 1e-2
"""Largest relative distance of two points that count as one. Design choice: samples that are closer are judged as one
by the evidence."""


class Finish:
    """Solve points that are close to samples, and accept the new samples."""

    def __init__(self, problem: Problem, network: Network) -> None:
        self._problem, self._network, self._spans = problem, network, network.usable_spans
        self._every = Residuals(network, self._spans, problem.coordinates_to_preactivations, torch.float64)
        self._every.place(*problem.input_space)

    def new_samples(self, points: Float[Tensor, "k b"], labels: Int[Tensor, "k"] | None, found: Solutions) -> Solutions:
        """Solve all equations in float64 from points close to samples, and return the samples that are new.

        ``labels`` are those of the points; None to find them.
        """
        if not len(points):
            return no_solutions(self._problem)
        chosen = _first_alike(points, labels).unique()
        points = points[chosen]
        labels = self._best_labels(points) if labels is None else labels[chosen]
        (origin, basis), a = self._problem.input_space, self._problem.coordinates_to_preactivations
        weights = (1 / self._network.vectors_with_levels(points @ a.T, labels)[2]).T
        t = (points - origin) @ basis
        ends = descend(self._every, t, labels, weights, Options(FINISH_STEPS, damping=1e-6, patience=0))
        points = origin + ends.points @ basis.T
        shares, levels = self._network.levels(points @ a.T, labels, tolerated=SIGMAS)
        excess = (shares / levels).amax(0)
        doubtful = torch.nonzero((excess > MIN_DOUBTFUL_RATIO) & (excess <= SIGMAS))[:, 0]
        work = self._every.multiplications(NEARBY_DESCENTS * len(doubtful), basis.shape[1])
        if len(doubtful) and work <= MAX_MULTIPLICATIONS:
            lowest = self._lowest_nearby(ends.points[doubtful], labels[doubtful], weights[doubtful])
            points[doubtful] = origin + lowest @ basis.T
            shares, levels = self._network.levels(points @ a.T, labels, tolerated=SIGMAS)
        directions, determined = directions_of(self._problem, self._network, points @ a.T, labels)
        right = (shares <= SIGMAS * levels).all(0) & determined & self._informed(levels)
        right &= torch.isfinite(points.float()).all(1)  # where activations are saturated, points go to infinity
        rows = torch.nonzero(right)[:, 0]
        rows = rows[_first_alike(points[rows], None).unique()]
        new = Solutions(points[rows], labels[rows], directions[rows])
        rows = torch.nonzero(~repeated(found, new, self._problem.factors.singular_values))[:, 0]
        return select_rows(new, rows[: self._problem.batch_size - len(found)])

    def _lowest_nearby(
        self, t: Float[Tensor, "k u"], labels: Int[Tensor, "k"], weights: Float[Tensor, "k s"]
    ) -> Float[Tensor, "k u"]:
        """Return the point with the smallest residual among each point and the ends of descents that start close to it.

        Two similar samples have local minima beside them, from which a descent does not find the samples.
        """
        generator = torch.Generator().manual_seed(0)
        shifts = torch.randn(NEARBY_DESCENTS, 1, t.shape[1], generator=generator, dtype=torch.float64).to(t)
        sizes = torch.logspace(-3, -2, NEARBY_DESCENTS, dtype=t.dtype, device=t.device)[:, None, None]
        norms = torch.linalg.vector_norm(t, dim=1, keepdim=True)
        tried = torch.cat([t[None], t + sizes * norms * sphere.retract(shifts)])
        labels, weights = labels.repeat(len(tried)), weights.repeat(len(tried), 1)
        options = Options(FINISH_STEPS, damping=1e-3, patience=FINISH_STEPS)
        ends = descend(self._every, tried.flatten(0, 1), labels, weights, options)
        best = ends.squared.unflatten(0, (len(tried), -1)).argmin(0)
        return ends.points.unflatten(0, (len(tried), -1))[best, torch.arange(len(t), device=t.device)]

    def _informed(self, levels: Float[Tensor, "s k"]) -> Bool[Tensor, "k"]:
        """Return at which points enough equations are above their noise to determine the unknowns.

        Far from all samples the softmax is saturated: the signals vanish, and noise explains any residual.
        """
        sizes = torch.tensor([span.equations for span in self._spans], device=levels.device)
        informed = ((levels <= MAX_INFORMATIVE_LEVEL) * sizes[:, None]).sum(0)
        return informed >= self._problem.batch_size - self._problem.seen.has_bias

    def _best_labels(self, points: Float[Tensor, "k b"]) -> Int[Tensor, "k"]:
        """Return the label whose signals lie closest to the column spaces of the gradients."""
        count, signals = max(1, self._network.label_count), [span for span in self._spans if span.signals]
        labels = torch.arange(count, device=points.device).repeat_interleave(len(points))
        if not signals:
            return labels[: len(points)]
        z = points @ self._problem.coordinates_to_preactivations.T
        vectors = self._network.vectors(z.repeat(count, 1), labels, signals)
        shares = torch.stack([span.share_outside(each) for span, each in zip(signals, vectors, strict=True)])
        return shares.square().sum(0).unflatten(0, (count, -1)).argmin(0)


def repeated(found: Solutions, new: Solutions, singular_values: Float[Tensor, "b"]) -> Bool[Tensor, "k"]:
    """Return which new samples are solutions for a sample that is known, or that comes earlier in ``new``.

    The point p_i of a sample is orthogonal to the directions Σ⁻¹q_j of all other samples. Two solutions for one sample
    are not, even if noise has moved them far apart.
    """
    every = join_rows(found, new)
    products = every.coordinates @ (every.directions / singular_values).T
    own = products.diagonal()
    return (products * products.T / (own[:, None] * own) >= MIN_REPEATED_SHARE).tril(-1).any(1)[len(found) :]


def _first_alike(points: Float[Tensor, "k b"], labels: Int[Tensor, "k"] | None) -> Int[Tensor, "k"]:
    """Return, for each point, the index of the first point that is the same sample with the same label."""
    if not len(points):
        return torch.zeros(0, dtype=torch.long, device=points.device)
    distances = torch.cdist(points, points)
    alike = distances <= SAME_POINT_DISTANCE * torch.linalg.vector_norm(points, dim=1, keepdim=True)
    if labels is not None:
        alike &= labels[:, None] == labels
    alike.fill_diagonal_(True)
    return alike.int().argmax(1)
