"""Which refined directions are inputs, and what they leave for the next round."""

import torch

from spearpp.inversion.next_layer import FewOutputs
from spearpp.inversion.problem import Problem
from spearpp.linalg.nullspace import independent
from spearpp.search.gated.refine import silent_neurons
from spearpp.types import Bool, Float, Tensor

AGREEMENT = 0.65
"""Least share of the neurons p calls silent that must be zero in L q. A mixture of two inputs has half."""
FOREIGN = 0.1
"""Share of a column that the next layer need not explain: noise and local steps; of a mixture it is most."""
SAME = 1 - 1e-12
"""Cosine from which two exact directions are one: many end points are refined to the same."""
EXCESS = 0.3
"""How far the zeros must rise from the b-1 that any vertex has to all the silent neurons."""


def acceptable(
    problem: Problem, points: Float[Tensor, "*u k b"], directions: Float[Tensor, "*u k b"]
) -> Bool[Tensor, "*u k"]:
    """Whether q has the zeros of an input, and where p says they are."""
    zeros = problem.tolerance.zeros(directions @ problem.factors.left.mT, directions)
    zeros = zeros & problem.factors.live[..., None, :]
    silent = silent_neurons(problem, points)
    expected = silent.sum(-1)
    free = problem.batch_size - 1
    enough = zeros.sum(-1) >= free + EXCESS * (expected - free)
    agree = (zeros & silent).sum(-1) >= AGREEMENT * expected
    accepted = enough & agree & (expected > free) & (zeros.sum(-1) >= problem.tolerance.least_zeros)
    return accepted if problem.outputs is None else accepted & sent_back(problem, problem.outputs, directions)


def sent_back(problem: Problem, outputs: FewOutputs, directions: Float[Tensor, "k b"]) -> Bool[Tensor, "k"]:
    """Whether L q is, where it is not zero, what the next layer's outputs send back to one sample.

    Samples that one label was taken for another send the same back, so their differences are sparser
    than they are themselves; but those have entries of either sign, which no sample has.
    """
    values = directions @ problem.factors.left.T
    kept = (~problem.tolerance.zeros(values, directions) & problem.factors.live).to(values)
    rows = kept[:, :, None] * outputs.span
    normal = rows.mT @ rows
    normal.diagonal(dim1=1, dim2=2).add_(1e-12)
    sent = torch.linalg.solve(normal, rows.mT @ values[:, :, None])
    left_over = torch.linalg.vector_norm(kept * values - (rows @ sent)[:, :, 0], dim=1)
    return left_over <= FOREIGN * torch.linalg.vector_norm(kept * values, dim=1)


def new_directions(
    problem: Problem, found: Float[Tensor, "found b"], directions: Float[Tensor, "k b"]
) -> Float[Tensor, "new b"]:
    """Those directions that are not combinations of what was found already; sparsest first.

    Two alike inputs share many zeros, so a mixture of their directions can be sparse too, but it is
    less sparse than either and depends on them.
    """
    zeros = problem.tolerance.zeros(directions @ problem.factors.left.T, directions).sum(1)
    ordered = directions[zeros.argsort(descending=True, stable=True)]
    ordered = ordered[~((ordered @ ordered.T).abs() > SAME).tril(-1).any(1)]
    known = torch.cat([found, ordered])
    least = torch.cat([torch.zeros_like(found[:, 0]), problem.tolerance.angle(ordered)])
    return known[independent(known, least, always=len(found))][len(found) :]
