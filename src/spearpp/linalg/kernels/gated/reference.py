"""The row-wise steps of the gated search in PyTorch.

All functions work in place on preallocated tensors, so that a CUDA graph can record them.
"""

import torch

from spearpp.linalg import sphere
from spearpp.types import Float, Int, Tensor

TINY = 1e-30
"""Lower bound of denominators: far below any value that occurs, and above the smallest normal float32, 1.2e-38."""


def gate(
    inactivity: Float[Tensor, "starts m"], weight: Float[Tensor, "starts m"], total: Float[Tensor, "starts 1"]
) -> None:
    """Turn pre-activations z into weights of the rows.

    Args:
        inactivity: z; becomes relu(-z).
        weight: becomes ρ = relu(-z)², scaled to sum to m.
        total: becomes the sum of relu(-z)².
    """
    inactivity.neg_().clamp_min_(0)
    torch.mul(inactivity, inactivity, out=weight)
    torch.sum(weight, 1, keepdim=True, out=total).clamp_min_(TINY)
    weight.mul_(weight.shape[1] / total)


def begin(
    right: Float[Tensor, "starts b"],
    applied: Float[Tensor, "starts b"],
    residual: Float[Tensor, "starts b"],
    search: Float[Tensor, "starts b"],
    size: Float[Tensor, "starts 1"],
) -> None:
    """Start conjugate gradients for M u = p.

    Args:
        right: p.
        applied: M u of the initial solution u.
        residual: becomes p - M u.
        search: becomes the first search direction, which is the residual.
        size: becomes the squared norm of the residual.
    """
    torch.sub(right, applied, out=residual)
    search.copy_(residual)
    torch.sum(residual.square(), 1, keepdim=True, out=size)


def advance(
    search: Float[Tensor, "starts b"],
    applied: Float[Tensor, "starts b"],
    solution: Float[Tensor, "starts b"],
    residual: Float[Tensor, "starts b"],
    size: Float[Tensor, "starts 1"],
) -> None:
    """Do one iteration of conjugate gradients. ``applied`` is M times the search direction."""
    step = size / (search * applied).sum(1, keepdim=True).clamp_min_(TINY)
    solution.addcmul_(step, search)
    residual.addcmul_(step, applied, value=-1)
    new_size = residual.square().sum(1, keepdim=True)
    torch.addcmul(residual, search, new_size / size.clamp_min_(TINY), out=search)
    size.copy_(new_size)


def direct(
    points: Float[Tensor, "starts b"],
    solution: Float[Tensor, "starts b"],
    value: Float[Tensor, "starts 1"],
    direction: Float[Tensor, "starts b"],
) -> None:
    """Compute the value f = 1 / (p·u) of the objective and the direction q = f u."""
    torch.sum(points * solution, 1, keepdim=True, out=value).clamp_min_(TINY).reciprocal_()
    torch.mul(solution, value, out=direction)


def pull(
    inactivity: Float[Tensor, "starts m"],
    weight: Float[Tensor, "starts m"],
    total: Float[Tensor, "starts 1"],
    image: Float[Tensor, "starts m"],
) -> None:
    """Replace ``image`` = L q by the coefficient of every a_k in the gradient of f."""
    m = image.shape[1]
    image.square_()
    mean = (weight * image).sum(1, keepdim=True).div_(m)
    image.sub_(mean).mul_(inactivity).mul_(-2 * m / total)


def move(
    points: Float[Tensor, "starts d"],
    through_gates: Float[Tensor, "starts d"],
    through_basis: Float[Tensor, "starts d"],
    value: Float[Tensor, "starts 1"],
    momentum: Float[Tensor, "starts d"],
    second: Float[Tensor, "starts 1"],
    schedule: Float[Tensor, "evaluations 4"],
    counter: Int[Tensor, "1"],
    least: float,
) -> None:
    """Take a step of Riemannian Adam along ∇ log f = through_gates / f - 2 through_basis.

    Args:
        points: unit vectors v.
        through_gates: part of the gradient that depends on the gates.
        through_basis: part of the gradient that depends on the basis.
        value: f.
        momentum: m.
        second: v.
        schedule: for every evaluation the learning rate over 1-β₁ᵗ, 1/(1-β₂ᵗ), 1-β₁ and 1-β₂.
        counter: index of the current evaluation.
        least: ε of Adam.
    """
    rate, correction, first_weight, second_weight = schedule[counter].unbind(1)
    gradient = torch.sub(through_gates / value, through_basis, alpha=2)
    sphere.adam_step(points, gradient, momentum, second, rate, correction, (first_weight, second_weight), least)
