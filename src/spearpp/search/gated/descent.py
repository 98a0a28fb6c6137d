"""Descent of the gated objective on the sphere of p, all starts at once."""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from spearpp.search.gated.objective import Gates, Objective
from spearpp.shapes import Float, Tensor

BETAS = 0.9, 0.999
EPSILON = 1e-12
ROUGH = 1e-4
"""ε of the objective from which the rounding of tensor cores does not matter."""
_SWITCHING = threading.RLock()


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
    """Riemannian Adam with a cosine schedule; returns the end points c, moved in place, and their directions q."""
    done = torch.arange(effort.steps, dtype=points.dtype, device=points.device)
    rates = rate * 0.5 * (1 + torch.cos(math.pi * done / effort.steps)) / (1 - BETAS[0] ** (done + 1))
    schedule = torch.stack([rates, 1 / (1 - BETAS[1] ** (done + 1))], dim=1)
    counter = torch.zeros(1, dtype=torch.long, device=points.device)
    momentum, second = torch.zeros_like(points), torch.zeros_like(points[:, :1])
    here = torch.cuda.device(points.device) if points.is_cuda else nullcontext()
    with here, tensor_cores(points.is_cuda and effort.epsilon >= ROUGH):
        objective = Objective(gates, points, epsilon=effort.epsilon, iterations=effort.iterations)
        for _ in range(2):  # a good first solution; later steps start from the last one
            objective.evaluate()

        def step() -> None:
            objective.evaluate()
            parts = objective.through_gates, objective.through_basis, objective.value
            objective.kernels.move(points, *parts, momentum, second, schedule, counter, BETAS, EPSILON)
            counter.add_(1)

        repeat(step, effort.steps, points.device)
        objective.evaluate()
    return points, objective.direction


@contextmanager
def tensor_cores(allowed: bool) -> Iterator[None]:
    """Let float32 products round their factors to ten bits (TF32) meanwhile; as it is, where the user has said how."""
    if not allowed:
        yield
        return
    with _SWITCHING:  # the switch is the process's
        try:
            before = torch.backends.cuda.matmul.allow_tf32
            torch.backends.cuda.matmul.allow_tf32 = True
        except RuntimeError:  # set by the other of torch's two ways, which do not mix
            yield
            return
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before


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
