"""Riemannian Adam on the sphere, the paper's search."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch

from spearpp.linalg.kernels.paper import for_descent
from spearpp.search.descent import Descent, Step
from spearpp.search.losses import L1, LogCosh, Loss
from spearpp.types import Float, Tensor

ROUGH = 2.0**-11
"""The rate from which a step goes further than the rounding of tensor cores leads astray."""


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

    def descend(self, rows: Float[Tensor, "m b"], points: Float[Tensor, "starts b"]) -> Float[Tensor, "starts b"]:
        """All steps from the given points, which are moved in place and returned; on a GPU in one kernel if it can."""
        width = _width(self.loss)
        fused = None if width is None else for_descent(points, smooth=width > 0)
        if fused is None:
            return super().descend(rows, points)
        momentum, second = torch.zeros_like(points), torch.zeros_like(points[:, :1])
        with torch.cuda.device(points.device):
            for schedule, fine in self.stages(points):
                fused.descend(rows, points, momentum, second, schedule, width, self.betas, self.epsilon, fine)
        return points

    def stages(self, like: Tensor) -> Iterator[tuple[Float[Tensor, "some 2"], bool]]:
        """For every step its rate over 1-β₁ᵗ and 1/(1-β₂ᵗ), in stretches of one precision; and if that is fine."""
        changes, first, second = dict(self.rates), *self.betas
        steps, rate = [], changes[0]
        for done in range(self.steps):
            rate = changes.get(done, rate)
            steps.append((rate < ROUGH, (rate / (1 - first ** (done + 1)), 1 / (1 - second ** (done + 1)))))
        for fine, stretch in groupby(steps, key=lambda step: step[0]):
            yield like.new_tensor([numbers for _, numbers in stretch]), fine


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


def _width(loss: Loss) -> float | None:
    """μ of a slope tanh(y/μ), 0 where that is the sign; None for other losses."""
    match loss:
        case L1():
            return 0.0
        case LogCosh(mu=mu):
            return mu
    return None


def _to_tangent(points: Tensor, vectors: Tensor) -> None:
    """``sphere.tangent`` in place."""
    vectors.addcmul_(points, (points * vectors).sum(1, keepdim=True), value=-1)
