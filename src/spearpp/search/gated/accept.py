"""Which refined directions are inputs, and what they leave for the next round."""

import torch

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
    new: list[Tensor] = []
    basis = torch.linalg.qr(found.T)[0].T
    for index in zeros.argsort(descending=True, stable=True):
        direction = directions[index]
        rest = direction - (direction @ basis.T) @ basis
        size = torch.linalg.vector_norm(rest)
        if float(size) > float(problem.tolerance.angle(direction[None])):
            new.append(direction)
            basis = torch.cat([basis, (rest / size)[None]])
    return torch.stack(new) if new else directions[:0]


def complement(found: Float[Tensor, "found b"]) -> Float[Tensor, "b d"]:
    """N: an orthonormal basis of what is orthogonal to every q found, where every other p must lie.

    Nothing is subtracted from the gradient, so no error builds up from round to round.
    """
    return torch.linalg.qr(found.T, mode="complete")[0][:, len(found) :]
