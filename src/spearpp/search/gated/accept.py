"""Acceptance: which refined directions belong to inputs, and which of them are new."""

import torch

from spearpp.inversion.next_layer import FewOutputs
from spearpp.inversion.pool import refit
from spearpp.inversion.problem import Problem
from spearpp.inversion.tolerance import SAME_DIRECTION
from spearpp.linalg import sphere
from spearpp.linalg.chunks import chunk_size
from spearpp.linalg.nullspace import independent
from spearpp.search.gated.refine import inactive_neurons
from spearpp.types import Bool, Float, Tensor

MIN_AGREEMENT = 0.65
"""Minimum share of the neurons that are inactive for p on which L q must be zero. Measured: 90 % rejected 101 of 254
true directions, and 65 % rejected none. Wrong end points had at most 11 % (docs/lab/notebook.md, section "What made it
work"). A mixture of two inputs has about half."""
MAX_UNEXPLAINED_SHARE = 0.1
"""Largest share of a column of D that the weights of the next layer may leave unexplained. Design choice: noise and
local steps leave little unexplained, and a mixture of inputs leaves most of its norm."""
SAME_COSINE = 1 - 1e-12
"""Cosine above which two exact directions are equal, because many end points are refined to the same direction. Design
choice: an angle of 1.4e-6, far above the rounding of float64."""
SOLVED_COSINE = 0.9999
"""Cosine above which two directions or inputs that have been solved for their zeros are the same. Design choice."""
MIN_EXCESS = 0.3
"""Minimum number of zeros, on a scale where 0 stands for the b-1 zeros of any vertex and 1 for all inactive neurons.
Design choice: well below 1, because p is only near the input, so some neurons may be inactive for p but not for the
input."""


def acceptable(problem: Problem, points: Float[Tensor, "k b"], directions: Float[Tensor, "k b"]) -> Bool[Tensor, "k"]:
    """Return whether each unit direction q has enough zeros for an input, at neurons that are inactive for its p."""
    zeros = problem.zeros(directions) & problem.factors.live
    inactive = inactive_neurons(problem, points)
    expected = inactive.sum(1)
    free = problem.batch_size - 1
    enough = zeros.sum(1) >= free + MIN_EXCESS * (expected - free)
    agree = (zeros & inactive).sum(1) >= MIN_AGREEMENT * expected
    accepted = enough & agree & (expected > free) & (zeros.sum(1) >= problem.tolerance.least_zeros)
    return accepted if problem.outputs is None else accepted & sent_back(problem, problem.outputs, directions)


def sent_back(problem: Problem, outputs: FewOutputs, directions: Float[Tensor, "k b"]) -> Bool[Tensor, "k"]:
    """Return whether the non-zero part of L q is a signal that the next layer can send back to one sample.

    Two samples with the same pair of true and predicted label receive the same signal. The difference of their columns
    is then sparser than either column. But this difference equals the signal at some neurons and minus the signal at
    others, so no single signal explains it.
    """
    values = directions @ problem.factors.left.T
    kept = (~problem.tolerance.zeros(values, directions) & problem.factors.live).to(values)
    rows = kept[:, :, None] * outputs.span
    normal = rows.mT @ rows
    normal.diagonal(dim1=1, dim2=2).add_(1e-12)
    signals = torch.linalg.solve(normal, rows.mT @ values[:, :, None])
    residual = torch.linalg.vector_norm(kept * values - (rows @ signals)[:, :, 0], dim=1)
    return residual <= MAX_UNEXPLAINED_SHARE * torch.linalg.vector_norm(kept * values, dim=1)


def new_directions(
    problem: Problem, found: Float[Tensor, "found b"], directions: Float[Tensor, "k b"]
) -> Float[Tensor, "new b"]:
    """Select the directions that are not linear combinations of directions found before, the sparsest first.

    Two similar inputs share many zeros, so a mixture of their directions can also be sparse. But the mixture is less
    sparse than either direction and linearly dependent on them.
    """
    zeros = problem.zeros(directions).sum(1)
    ordered = directions[zeros.argsort(descending=True, stable=True)]
    ordered = ordered[sphere.first_of_each(ordered, SAME_COSINE)]
    return ordered[independent(ordered, problem.tolerance.angle(ordered), found)]


def new_columns(
    problem: Problem, outputs: FewOutputs, known: Float[Tensor, "known b"], directions: Float[Tensor, "k b"]
) -> Float[Tensor, "new b"]:
    """Solve directions again for their zeros, and return those that have enough zeros and are not known.

    Over several rounds of a client, the zeros of rounds from which a sample is absent prove nothing. The other entries
    must then be a signal of one sample.
    """
    q = refit(problem, directions[sphere.first_of_each(directions, SOLVED_COSINE)])
    q = q[(problem.zeros(q) & problem.factors.live).sum(1) >= problem.tolerance.least_zeros]
    if outputs.rounds > 1:
        chunks = q.split(chunk_size(q.device, 16 * outputs.span.numel()))
        q = torch.cat([each[sent_back(problem, outputs, each)] for each in chunks])
    # A wrong zero may turn the same direction by more than noise does.
    q = q[~((q @ known.T).abs() > SOLVED_COSINE).any(1)]
    return q[independent(q, SAME_DIRECTION, known)]
