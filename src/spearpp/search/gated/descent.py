"""Descent of the gated objective on the sphere of p, all starts at once."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

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
    done = torch.arange(effort.steps, dtype=points.dtype, device=points.device)
    rates = rate * 0.5 * (1 + torch.cos(math.pi * done / effort.steps)) / (1 - adam.betas[0] ** (done + 1))
    corrections = 1 / (1 - adam.betas[1] ** (done + 1))
    counter = torch.zeros(1, dtype=torch.long, device=points.device)

    def step() -> None:
        _, _, gradient, solved = objective(points, solution)
        solution.copy_(solved)
        adam.move(points, gradient, rates[counter], corrections[counter])
        counter.add_(1)

    repeat(step, effort.steps, points.device)
    _, direction, _, _ = objective(points, solution)
    return points, direction


def repeat(step: Callable[[], None], times: int, device: torch.device) -> None:
    """Call ``step`` that often. On a GPU it is recorded once and replayed: small kernels cost their launch.

    The step must work in place on the same tensors every time and not wait for the device.
    """
    if device.type != "cuda" or times < 3:
        for _ in range(times):
            step()
        return
    aside = torch.cuda.Stream(device)
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        step()
    torch.cuda.current_stream(device).wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(times - 1):
        graph.replay()
