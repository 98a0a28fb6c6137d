"""The row-wise steps in PyTorch. All work in place on preallocated tensors, so that a CUDA graph can hold them."""

import torch

from spearpp.types import Float, Int, Tensor

TINY = 1e-30


def gate(
    silence: Float[Tensor, "starts m"], weight: Float[Tensor, "starts m"], total: Float[Tensor, "starts 1"]
) -> None:
    """From pre-activations z in ``silence``: relu(-z), its squares' sum, and ρ = relu(-z)² scaled to sum to m."""
    silence.neg_().clamp_min_(0)
    torch.mul(silence, silence, out=weight)
    torch.sum(weight, 1, keepdim=True, out=total).clamp_min_(TINY)
    weight.mul_(weight.shape[1] / total)


def begin(
    right: Float[Tensor, "starts b"],
    applied: Float[Tensor, "starts b"],
    residual: Float[Tensor, "starts b"],
    search: Float[Tensor, "starts b"],
    size: Float[Tensor, "starts 1"],
) -> None:
    """The first residual of conjugate gradients, p - M u; it is the first search direction too."""
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
    """One iteration of conjugate gradients, after ``applied`` = M search."""
    step = size / (search * applied).sum(1, keepdim=True).clamp_min_(TINY)
    solution.addcmul_(step, search)
    residual.addcmul_(step, applied, value=-1)
    shrunk = residual.square().sum(1, keepdim=True)
    torch.addcmul(residual, search, shrunk / size.clamp_min_(TINY), out=search)
    size.copy_(shrunk)


def direct(
    points: Float[Tensor, "starts b"],
    solution: Float[Tensor, "starts b"],
    value: Float[Tensor, "starts 1"],
    direction: Float[Tensor, "starts b"],
) -> None:
    """f = 1 / (p·u) and q = f u."""
    torch.sum(points * solution, 1, keepdim=True, out=value).clamp_min_(TINY).reciprocal_()
    torch.mul(solution, value, out=direction)


def pull(
    silence: Float[Tensor, "starts m"],
    weight: Float[Tensor, "starts m"],
    total: Float[Tensor, "starts 1"],
    image: Float[Tensor, "starts m"],
) -> None:
    """What each a_k has in the gradient of f, in place of ``image`` = L q."""
    m = image.shape[1]
    image.square_()
    mean = (weight * image).sum(1, keepdim=True).div_(m)
    image.sub_(mean).mul_(silence).mul_(-2 * m / total)


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
    """A step of Riemannian Adam along ∇ log f = through_gates / f - 2 through_basis.

    ``schedule`` has, for every evaluation, the rate over 1-β₁ᵗ, 1/(1-β₂ᵗ), 1-β₁ and 1-β₂; ``counter`` says which it is.
    """
    rate, correction, *news = schedule[counter].unbind(1)
    gradient = torch.sub(through_gates / value, through_basis, alpha=2)
    gradient.addcmul_(points, (points * gradient).sum(1, keepdim=True), value=-1)
    momentum.lerp_(gradient, news[0])
    second.lerp_(gradient.square().sum(1, keepdim=True), news[1])
    points.sub_(momentum * (rate / (second * correction).sqrt_().add_(least)))
    points.div_(torch.linalg.vector_norm(points, dim=1, keepdim=True))
    momentum.addcmul_(points, (points * momentum).sum(1, keepdim=True), value=-1)
