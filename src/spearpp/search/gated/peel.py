"""Peeling: recover inputs from rows of the gradient that contain a single sample, one after another.

If a neuron is active for one sample only, its row of L is a multiple of the point of this sample: ℓ_k = d_ki p_i. With
p = ℓ_k, the rows of the neurons that are inactive for p determine a direction q, and L q is zero exactly in these rows.
A pair (p, q) with q·p = 1 can be removed from the problem on both sides, L ← L (I - q pᵀ). Other rows then contain one
sample less, and some of them a single sample. This repeats as in the peeling decoder of erasure codes. The rest is a
smaller problem for the other searches.
"""

import math
import time

import torch

from spearpp.inversion.matches import SIGMAS
from spearpp.inversion.pool import refit
from spearpp.inversion.problem import Problem
from spearpp.inversion.solutions import MAX_CONDITION, Pairs, no_pairs, pattern_agrees
from spearpp.linalg import sphere
from spearpp.linalg.chunks import chunk_size
from spearpp.linalg.nullspace import gather_weighted, independent, kernel_vectors
from spearpp.search.gated.accept import SAME_COSINE
from spearpp.search.gated.refine import inactive_neurons
from spearpp.types import Float, Tensor

MAX_ACTIVE_SHARE = 0.12
"""Largest share of inputs for which a neuron may be active, if its row is to be tested. Design choice: neurons that are
active more often almost never have a row with a single sample. The rows themselves, taken as inputs, estimate the
share."""
SAMPLED_ROWS = 256
"""Number of rows that estimate how often neurons are active. Design choice: the standard error is then at most 0.03."""
MIN_ZEROS_PER_UNKNOWN, MIN_EXTRA_ZEROS = 1.15, 8
"""Numbers c and d of the smallest number c b + d of inactive rows for b unknowns. With just b inactive rows, any row
has a direction. Measured: with b inactive rows 38 of 245 pairs were wrong, with these values none of 97
(docs/lab/notebook.md, section "The weights of an output layer")."""
MIN_SECOND_SINGULAR_VALUE = 1e-3
"""Minimum second singular value of the inactive rows. Measured together with ``MIN_ZEROS_PER_UNKNOWN``."""
MAX_SINGULAR_RATIO = 0.05
"""Largest ratio of the first to the second singular value of the inactive rows. Design choice: the first is noise."""


def peel_samples(problem: Problem, deadline: float = math.inf) -> Pairs:
    """Recover all inputs that single rows reveal one after another, until the deadline on ``time.monotonic``'s clock.

    If neurons are active for about half of the samples, no row has a single sample and the result is empty. It is also
    empty without a bias, because a row does not determine the sign of its input then.
    """
    pairs = no_pairs(problem)
    while problem.seen.has_bias and len(pairs) < problem.batch_size and time.monotonic() < deadline:
        candidates = _candidates(problem, pairs)
        if not len(candidates):
            break
        points, directions = _singles(problem, candidates)
        units = sphere.retract(directions)
        kept = independent(units, problem.tolerance.angle(units), sphere.retract(pairs.directions))
        joined = pairs.join(points[kept], directions[kept]) if len(kept) else pairs
        if len(joined) == len(pairs):
            break
        pairs = joined
    return pairs


def _candidates(problem: Problem, pairs: Pairs) -> Float[Tensor, "k b"]:
    """Return the rows that may contain a single remaining sample, as unit vectors p with the sign of an input."""
    rows = pairs.rest(problem.factors.left)
    noise = problem.factors.row_noise * torch.linalg.vector_norm(1 / problem.factors.singular_values)
    significant = problem.factors.live & (torch.linalg.vector_norm(rows, dim=1) > SIGMAS * noise)
    points = sphere.retract(rows[significant])
    points = points * (points @ problem.factors.right[:, -1]).sign()[:, None]
    sample = points[:: max(1, -(-len(points) // SAMPLED_ROWS))]
    active_share = (sample @ problem.preactivations[significant].T > 0).double().mean(0)
    points = points[active_share <= MAX_ACTIVE_SHARE]
    return points[sphere.first_of_each(points, SAME_COSINE, signed=True)]


def _singles(problem: Problem, points: Float[Tensor, "k b"]) -> tuple[Float[Tensor, "s b"], Float[Tensor, "s b"]]:
    """Return the points that are inputs, and their directions with q·p = 1."""
    left = problem.factors.left
    m, b = left.shape
    inactive = inactive_neurons(problem, points)
    enough = inactive.sum(1) >= MIN_ZEROS_PER_UNKNOWN * b + MIN_EXTRA_ZEROS
    points, inactive = points[enough], inactive[enough]
    parts = inactive.split(chunk_size(left.device, 16 * m * b))
    kernels = [kernel_vectors(gather_weighted(left, part.to(left))) for part in parts]
    solved, values = (torch.cat(each) for each in zip(*kernels, strict=True))
    determined = (values[:, 1] >= MIN_SECOND_SINGULAR_VALUE) & (values[:, 0] <= MAX_SINGULAR_RATIO * values[:, 1])
    points, directions = points[determined], refit(problem, solved[determined])
    zeros = problem.zeros(directions)
    scale = (points * directions).sum(1, keepdim=True)
    single = pattern_agrees(problem, points, zeros) & (scale[:, 0].abs() * MAX_CONDITION >= 1)
    return points[single], directions[single] / scale[single]
