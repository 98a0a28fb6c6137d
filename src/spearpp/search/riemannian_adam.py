"""Riemannian Adam on the sphere, the paper's search."""

from dataclasses import dataclass

import torch

from spearpp.search.descent import Descent, Step
from spearpp.shapes import Float, Tensor


@dataclass(frozen=True)
class RiemannianAdam(Descent):
    """Minimise φ(L q) on the sphere by Riemannian Adam (Bécigneul and Ganea 2019).

    The defaults are the paper's.

    >>> RiemannianAdam(starts=4096).loss
    L1()
    """

    rates: tuple[tuple[int, float], ...] = ((0, 1e-1), (200, 1e-3), (400, 1e-5))
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8

    def stepper(self, points: Float[Tensor, "starts b"]) -> Step:
        """Fresh moments for these points."""
        return AdamStep(points, self.betas, self.epsilon)


class AdamStep:
    """One step of Riemannian Adam for many points, and its moments.

    With Euclidean gradient e, Riemannian gradient g = e - (q·e) q, step number t:

        m ← β₁ m + (1-β₁) g
        v ← β₂ v + (1-β₂) ‖g‖²            one number for each point
        q ← retract(q - rate · m/(1-β₁ᵗ) / (√(v/(1-β₂ᵗ)) + ε))
        m ← tangent(q, m)                 carried over to the new point
    """

    def __init__(self, points: Float[Tensor, "starts b"], betas: tuple[float, float], epsilon: float) -> None:
        self.betas = betas
        self.epsilon = epsilon
        self.momentum = torch.zeros_like(points)
        self.second = points.new_zeros(points.shape[0], 1)
        self.taken = 0

    def __call__(self, points: Tensor, gradient: Tensor, rate: float) -> None:
        """Move the points in place. The gradient is used up."""
        first, second = self.betas
        self.taken += 1
        rate, correction = rate / (1 - first**self.taken), 1 / (1 - second**self.taken)
        _to_tangent(points, gradient)
        self.momentum.lerp_(gradient, 1 - first)
        norm = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
        self.second.mul_(second).addcmul_(norm, norm, value=1 - second)
        size = (self.second * correction).sqrt_().add_(self.epsilon)
        points.sub_(self.momentum * (rate / size))
        points.div_(torch.linalg.vector_norm(points, dim=1, keepdim=True))
        _to_tangent(points, self.momentum)


def _to_tangent(points: Tensor, vectors: Tensor) -> None:
    """``sphere.tangent`` in place."""
    vectors.addcmul_(points, (points * vectors).sum(1, keepdim=True), value=-1)
