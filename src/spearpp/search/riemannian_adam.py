"""Riemannian Adam on the sphere: the search of the paper."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, groupby

import torch

from spearpp.linalg import sphere
from spearpp.linalg.kernels.paper import for_descent
from spearpp.linalg.kernels.paper.reference import BITS
from spearpp.search.descent import Descent, Step
from spearpp.search.losses import L1, LogCosh, SparsityLoss
from spearpp.types import Float, Tensor

MIN_TENSOR_CORE_RATE = 2.0**-BITS
"""Smallest learning rate for which products on tensor cores are accurate enough. Derived: tensor cores round factors to
11 bits, and a step must be longer than this rounding error. Measured: with 11 bits until the rate falls below this
value, as many starts end at a true direction as in float32 (docs/lab/notebook.md, section "Speed of a step")."""


@dataclass(frozen=True)
class RiemannianAdam(Descent):
    """Minimise φ(L q) on the sphere by Riemannian Adam (Bécigneul and Ganea 2019).

    The defaults are those of the paper.

    >>> RiemannianAdam(starts=4096).loss
    L1()
    """

    rates: tuple[tuple[int, float], ...] = ((0, 1e-1), (200, 1e-3), (400, 1e-5))
    betas: tuple[float, float] = (0.9, 0.999)
    """β₁ and β₂."""
    epsilon: float = 1e-8
    """ε, which keeps the denominator of a step positive."""

    def stepper(self, points: Float[Tensor, "starts b"]) -> Step:
        """Return a step rule whose moments are zero."""
        momentum, second = torch.zeros_like(points), torch.zeros_like(points[:, :1])
        numbers, weights = count(1), (1 - self.betas[0], 1 - self.betas[1])

        def step(points: Tensor, gradient: Tensor, rate: float) -> None:
            number = next(numbers)
            rate, correction = rate / (1 - self.betas[0] ** number), 1 / (1 - self.betas[1] ** number)
            sphere.adam_step(points, gradient, momentum, second, rate, correction, weights, self.epsilon)

        return step

    def descend(self, rows: Float[Tensor, "m b"], points: Float[Tensor, "starts b"]) -> Float[Tensor, "starts b"]:
        """Take all steps from the given points, which change in place, and return them.

        On a GPU, a single kernel does all steps if it supports the loss and the size of the problem.
        """
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
        """Split the steps into stages of equal precision.

        Yields:
            A schedule with the learning rate over 1-β₁ᵗ and 1/(1-β₂ᵗ) for every step, with the dtype and device of
            ``like``, and whether the products of these steps need the accuracy of float32.
        """
        changes, first, second = dict(self.rates), *self.betas
        steps, rate = [], changes[0]
        for done in range(self.steps):
            rate = changes.get(done, rate)
            numbers = rate / (1 - first ** (done + 1)), 1 / (1 - second ** (done + 1))
            steps.append((rate < MIN_TENSOR_CORE_RATE, numbers))
        for fine, stage in groupby(steps, key=lambda step: step[0]):
            yield like.new_tensor([numbers for _, numbers in stage]), fine


def _width(loss: SparsityLoss) -> float | None:
    """Return μ if the derivative of the loss is tanh(y/μ), 0 if it is the sign, and None otherwise."""
    match loss:
        case L1():
            return 0.0
        case LogCosh(mu=mu):
            return mu
    return None
