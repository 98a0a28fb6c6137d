"""Descent of the gated objective on the sphere of p, all starts at once."""

import math
from dataclasses import dataclass
from functools import partial

from spearpp.search.gated.objective import Gates, gated_objective
from spearpp.search.riemannian_adam import AdamStep
from spearpp.shapes import Float, Tensor


@dataclass(frozen=True)
class Effort:
    """How carefully a round descends."""

    steps: int
    iterations: int
    """Conjugate-gradient iterations a step."""
    epsilon: float
    """ε of the objective."""


def descend(
    gates: Gates, points: Float[Tensor, "starts d"], effort: Effort, rate: float
) -> tuple[Float[Tensor, "starts d"], Float[Tensor, "starts b"]]:
    """Riemannian Adam with a cosine schedule; returns the end points c and their directions q."""
    objective = partial(gated_objective, gates, epsilon=effort.epsilon, iterations=effort.iterations)
    solution = points @ gates.basis.T
    for _ in range(2):  # a good first solution; later steps start from the last one
        *_, solution = objective(points, solution)
    adam = AdamStep(points, (0.9, 0.999), 1e-12)
    for done in range(effort.steps):
        _, _, gradient, solution = objective(points, solution)
        adam(points, gradient, rate * 0.5 * (1 + math.cos(math.pi * done / effort.steps)))
    _, direction, _, _ = objective(points, solution)
    return points, direction
