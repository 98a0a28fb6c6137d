"""Rows with a single sample: inputs that lie open in the gradient, and those that come to light once they are gone.

Pixels in [0, 1] are alike: a neuron fires for nearly all of them or for nearly none. A row of G with one sample is
that sample, ℓ_k = d_ki p_i. Whether it is can be told: its own zeros must determine a direction q, and L q must be
zero just where p is silent. A pair (p, q) with q·p = 1 can be taken out of the problem on both sides,

    L ← L (I - q pᵀ),

which leaves rows with one sample less, and so on (the peeling of erasure codes). What is left is a smaller problem.
"""

import math
import time

import torch

from spearpp.inversion.pairs import Pairs, fits, no_pairs
from spearpp.inversion.pool import refit
from spearpp.inversion.problem import Problem
from spearpp.linalg import sphere
from spearpp.linalg.chunks import chunk_size
from spearpp.linalg.nullspace import gather_weighted, independent, kernel_vectors
from spearpp.search.gated.refine import silent_neurons
from spearpp.types import Float, Tensor

SELDOM = 0.12
"""How often a neuron may fire, over what the rows would be as inputs, for its row to be tried."""
SAMPLED = 256
"""Rows that are taken for inputs to learn how often neurons fire."""
SPARE = 1.15, 8
"""How many zeros must stand against b unknowns, in times b and beyond: with just b any row has its direction."""
DETERMINED = 1e-3
"""Least second singular value of the silent rows, of which the first may be a twentieth."""
OBLIQUE = 1e-6
"""Least product of a unit p with its unit q."""
ABOVE = 5.0
"""How far above its noise a row must be to say anything."""


def peel(problem: Problem, deadline: float = math.inf) -> Pairs:
    """All inputs that rows give away one after another; none where neurons fire for half of the samples.

    Args:
        problem: the layer. Without a bias the sign of an input is not in its row, and nothing is tried.
        deadline: when to stop, by ``time.monotonic``.
    """
    pairs = no_pairs(problem)
    while problem.seen.has_bias and len(pairs) < problem.batch_size and time.monotonic() < deadline:
        candidates = _candidates(problem, pairs)
        if not len(candidates):
            break
        points, directions = _singles(problem, candidates)
        units = sphere.retract(torch.cat([pairs.directions, directions]))
        kept = independent(units, problem.tolerance.angle(units), always=len(pairs))[len(pairs) :] - len(pairs)
        joined = pairs.join(points[kept], directions[kept]) if len(kept) else pairs
        if len(joined) == len(pairs):
            break
        pairs = joined
    return pairs


def _candidates(problem: Problem, pairs: Pairs) -> Float[Tensor, "k b"]:
    """Rows that few samples may be left in, as unit p with the sign that an input has."""
    rows = pairs.rest(problem.factors.left)
    noise = problem.factors.row_noise * torch.linalg.vector_norm(1 / problem.factors.singular_values)
    said = problem.factors.live & (torch.linalg.vector_norm(rows, dim=1) > ABOVE * noise)
    points = sphere.retract(rows[said])
    points = points * (points @ problem.factors.right[:, -1]).sign()[:, None]
    some = points[:: max(1, -(-len(points) // SAMPLED))]
    often = (some @ problem.preactivations[said].T > 0).double().mean(0)
    points = points[often <= SELDOM]
    return points[~((points @ points.T) > 1 - 1e-9).tril(-1).any(1)]


def _singles(problem: Problem, points: Float[Tensor, "k b"]) -> tuple[Float[Tensor, "s b"], Float[Tensor, "s b"]]:
    """Those points that are inputs, and their directions with q·p = 1."""
    left = problem.factors.left
    m, b = left.shape
    silent = silent_neurons(problem, points)
    enough = silent.sum(1) >= SPARE[0] * b + SPARE[1]
    points, silent = points[enough], silent[enough]
    parts = silent.split(chunk_size(left.device, 16 * m * b))
    kernels = [kernel_vectors(gather_weighted(left, part.to(left))) for part in parts]
    solved, values = (torch.cat(each) for each in zip(*kernels, strict=True))
    determined = (values[:, 1] >= DETERMINED) & (values[:, 0] <= 0.05 * values[:, 1])
    points, directions = points[determined], refit(problem, solved[determined])
    zeros = problem.tolerance.zeros(directions @ left.T, directions)
    scale = (points * directions).sum(1, keepdim=True)
    single = fits(problem, points, zeros) & (scale[:, 0].abs() >= OBLIQUE)
    return points[single], directions[single] / scale[single]
