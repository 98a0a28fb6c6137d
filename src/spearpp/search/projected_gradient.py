"""Projected gradient descent on the sphere: the second optimiser of the paper."""

from dataclasses import dataclass

import torch

from spearpp.search.descent import Descent, Step
from spearpp.types import Float, Tensor


@dataclass(frozen=True)
class ProjectedGradient(Descent):
    """Minimise φ(L q): q ← retract(q - rate · Lᵀ φ'(L q)), with the Euclidean gradient.

    The defaults are those of the paper.

    >>> ProjectedGradient().rates
    ((0, 0.01), (200, 0.0001), (400, 1e-06))
    """

    rates: tuple[tuple[int, float], ...] = ((0, 1e-2), (200, 1e-4), (400, 1e-6))

    def stepper(self, points: Float[Tensor, "starts b"]) -> Step:
        """Return the step rule, which has no state."""
        return _step


def _step(points: Tensor, gradient: Tensor, rate: float) -> None:
    points.sub_(gradient, alpha=rate)
    points.div_(torch.linalg.vector_norm(points, dim=1, keepdim=True))
