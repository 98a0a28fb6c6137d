"""Which refined directions are inputs, and what they leave for the next round."""

import torch

from spearpp.nullspace import independent
from spearpp.problem import Problem
from spearpp.search.gated.refine import silent_neurons
from spearpp.shapes import Bool, Float, Tensor

AGREEMENT = 0.65
"""Least share of the neurons p calls silent that must be zero in L q. A mixture of two inputs has half."""
EXCESS = 0.3
"""How far the zeros must rise from the b-1 that any vertex has to all the silent neurons."""


def acceptable(problem: Problem, points: Float[Tensor, "k b"], directions: Float[Tensor, "k b"]) -> Bool[Tensor, "k"]:
    """Whether q has the zeros of an input, and where p says they are."""
    zeros = problem.tolerance.zeros(directions @ problem.factors.left.T, directions) & problem.factors.live
    silent = silent_neurons(problem, points)
    expected = silent.sum(1)
    free = problem.batch_size - 1
    enough = zeros.sum(1) >= free + EXCESS * (expected - free)
    agree = (zeros & silent).sum(1) >= AGREEMENT * expected
    return enough & agree & (expected > free) & (zeros.sum(1) >= problem.tolerance.least_zeros)


def new_directions(
    problem: Problem, found: Float[Tensor, "found b"], directions: Float[Tensor, "k b"]
) -> Float[Tensor, "new b"]:
    """Those directions that are not combinations of what was found already; sparsest first.

    Two alike inputs share many zeros, so a mixture of their directions can be sparse too, but it is
    less sparse than either and depends on them.
    """
    zeros = problem.tolerance.zeros(directions @ problem.factors.left.T, directions).sum(1)
    ordered = directions[zeros.argsort(descending=True, stable=True)]
    known = torch.cat([found, ordered])
    least = torch.cat([torch.zeros_like(found[:, 0]), problem.tolerance.angle(ordered)])
    return known[independent(known, least, always=len(found))][len(found) :]


def complement(found: Float[Tensor, "found b"]) -> Float[Tensor, "b d"]:
    """N: an orthonormal basis of what is orthogonal to every q found, where every other p must lie.

    Nothing is subtracted from the gradient, so no error builds up from round to round.
    """
    return torch.linalg.qr(found.T, mode="complete")[0][:, len(found) :]
