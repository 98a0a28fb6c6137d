"""Small descents, and how far the one that is done in one kernel ends from the one that is done step by step."""

from dataclasses import dataclass

import torch

from spearpp.linalg import sphere
from spearpp.search.gated.descent import EPSILON, Effort, _schedule, descend_many

RATE = 0.1
FULL = 1e-6
"""ε small enough for the kernel to be asked for whole float32 products."""


@dataclass(frozen=True)
class Case:
    """Random problems; rows and gates after each count are zero."""

    counts: tuple[int, ...]
    b: int
    d: int
    starts: int
    cut: tuple[int, int, int, bool, bool, int, bool] | None = None
    """A ``Plan``; None for the one that the kernel makes for the size."""
    epsilon: float = FULL
    steps: int = 4


CASES = {
    "kept, all sizes odd": Case((171,), 13, 13, 21),
    "kept, as in a first round": Case((200,), 20, 20, 16, epsilon=1e-4),
    "kept, three updates, fewer points than directions": Case((170, 151, 164), 13, 9, 5),
    "one direction left of two": Case((5,), 2, 1, 3),
    "by blocks of parted neurons": Case((230, 300), 20, 7, 17, (16, 128, 8, True, False, 2, True)),
    "by blocks": Case((190, 161), 12, 12, 33, (32, 32, 4, False, False, 3, False)),
    "kept and shared": Case((190,), 12, 12, 33, (16, 256, 4, False, True, 3, False)),
    "wide": Case((450,), 40, 25, 5, steps=2),
    "widest": Case((1000,), 100, 100, 2, epsilon=1e-4, steps=2),
    "no step": Case((140,), 6, 6, 4, steps=0),
}


def problem(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, gates, basis and points of every update, in float64."""
    generator = torch.Generator().manual_seed(case.b + case.starts)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(len(case.counts), *shape, generator=generator, dtype=torch.float64)

    m = max(case.counts)
    rows, gates = draw(m, case.b) / case.b**0.5, draw(m, case.d)
    for i, count in enumerate(case.counts):
        rows[i, count:], gates[i, count:] = 0, 0
    return rows, gates, torch.linalg.qr(draw(case.b, case.d))[0], sphere.retract(draw(case.starts, case.d))


def far(case: Case, device: torch.device) -> tuple[float, float, float]:
    """Distance of the ends, that of the directions over their length, and the way that the points went."""
    from spearpp.linalg.kernels.gated import persistent

    rows, gates, basis, points = problem(case)
    effort = Effort(case.steps, 4, case.epsilon)
    expected, wanted = descend_many(rows, gates, basis, points.clone(), case.counts, effort, RATE)
    ends = points.float().to(device)
    directions = persistent.descend(
        rows.float().to(device),
        gates.float().to(device),
        basis.float().to(device),
        ends,
        case.counts,
        _schedule(case.steps, RATE, torch.float32).to(device),
        iterations=effort.iterations,
        epsilon=case.epsilon,
        least=EPSILON,
        exact=True,
        cut=case.cut and persistent.Plan(*case.cut),
    )
    assert directions is not None
    return (
        _longest(ends.cpu() - expected),
        _longest((directions.cpu() - wanted) / torch.linalg.vector_norm(wanted, dim=-1, keepdim=True)),
        _longest(expected - points),
    )


def _longest(vectors: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(vectors, dim=-1).max())
