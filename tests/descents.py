"""Small problems for every kernel, and functions that measure how far a kernel ends from its reference."""

from dataclasses import dataclass

import torch

from spearpp.linalg import sphere
from spearpp.linalg.kernels.gated import reference
from spearpp.linalg.kernels.paper import reference as paper_reference
from spearpp.search import RiemannianAdam
from spearpp.search.gated.descent import EPSILON, Effort, _schedule, _step_by_step
from spearpp.search.gated.objective import Gates

RATE = 0.1
FULL = 1e-6
"""A ``ridge`` small enough for the kernel to be asked for whole float32 products."""


@dataclass(frozen=True)
class Case:
    """Random problems."""

    updates: int
    m: int
    b: int
    d: int
    starts: int
    cut: tuple[int, int, int, bool, bool, int, bool] | None = None
    """A ``Plan``; None for the one that the kernel makes for the size."""
    ridge: float = FULL
    steps: int = 4


CASES = {
    "kept, all sizes odd": Case(1, 171, 13, 13, 21),
    "kept, as in a first round": Case(1, 200, 20, 20, 16, ridge=1e-4),
    "kept, three updates, fewer points than directions": Case(3, 170, 13, 9, 5),
    "one direction left of two": Case(1, 5, 2, 1, 3),
    "by blocks of parted neurons": Case(2, 150, 9, 5, 17, (16, 128, 8, True, False, 2, True), steps=2),
    "by blocks": Case(2, 70, 5, 5, 33, (32, 32, 4, False, False, 3, False), steps=2),
    "kept and shared": Case(1, 190, 12, 12, 33, (16, 256, 4, False, True, 3, False)),
    "wide": Case(1, 150, 40, 25, 5, steps=2),
    "widest": Case(1, 150, 100, 100, 2, ridge=1e-4, steps=2),
    "no step": Case(1, 140, 6, 6, 4, steps=0),
}


def problem(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, gates, basis and points of every update, in float64."""
    generator = torch.Generator().manual_seed(case.b + case.starts)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(case.updates, *shape, generator=generator, dtype=torch.float64)

    rows, gates = draw(case.m, case.b) / case.b**0.5, draw(case.m, case.d)
    return rows, gates, torch.linalg.qr(draw(case.b, case.d))[0], sphere.retract(draw(case.starts, case.d))


def far(case: Case, device: torch.device) -> tuple[float, float, float]:
    """Distance of the ends, that of the directions over their length, and the way that the points went."""
    from spearpp.linalg.kernels.gated import persistent

    rows, gates, basis, points = problem(case)
    effort = Effort(case.steps, 4, case.ridge)
    updates = zip(rows, gates, basis, points.clone(), strict=True)
    stepwise = [_step_by_step(Gates(*each), starts, effort, RATE) for *each, starts in updates]
    expected = torch.stack([each.points for each in stepwise])
    wanted = torch.stack([each.directions for each in stepwise])
    ends = points.float().to(device)
    directions = persistent.descend(
        rows.float().to(device),
        gates.float().to(device),
        basis.float().to(device),
        ends,
        _schedule(case.steps, RATE, torch.float32).to(device),
        iterations=effort.iterations,
        ridge=case.ridge,
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


Five = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
ROWWISE = ("gate", "begin", "advance", "direct", "pull", "move")
"""The kernels of single steps."""
ROW_SHAPES = [(1, 1), (3, 7), (9, 130)]
"""Rows and columns small enough for Triton's interpreter."""
DESCENTS = {
    "signs, rough": (7, 33, 5, 0.0, False),
    "signs, fine": (7, 33, 5, 0.0, True),
    "smooth, rough": (16, 64, 9, 0.05, False),
    "smooth, fine": (20, 70, 9, 0.05, True),
}
"""b, m, starts, width of the smooth slope, and whether products are fine."""


def arguments(name: str, rows: int, columns: int, device: torch.device) -> list[object]:
    """Random tensors of the shapes that a kernel takes, in float64."""
    generator = torch.Generator().manual_seed(rows + columns)

    def draw(width: int = columns) -> torch.Tensor:
        return torch.randn(rows, width, generator=generator, dtype=torch.float64).to(device)

    positive = draw(1).abs() + 0.5
    if name == "move":
        schedule = torch.tensor([[0.3, 2.0, 0.1, 0.2], [0.1, 1.5, 0.2, 0.1]], dtype=torch.float64, device=device)
        moments = draw(), draw(1).abs()
        points = sphere.retract(draw())
        return [points, draw(), draw(), positive, *moments, schedule, torch.ones(1, dtype=torch.long, device=device)]
    along = draw()
    shapes = {
        "gate": [draw(), draw(), positive],
        "begin": [draw(), draw(), draw(), draw(), positive],
        "advance": [along, positive * along, draw(), draw(), positive.clone()],  # M is positive definite
        "direct": [along, positive * along, positive.clone(), draw()],
        "pull": [draw().abs(), draw().abs(), positive, draw()],
    }
    return list(shapes[name])


def descent(b: int, m: int, starts: int, steps: int, device: torch.device | str = "cpu") -> Five:
    """Rows, points, moments and a schedule."""
    generator = torch.Generator().manual_seed(b + m)
    rows = torch.linalg.qr(torch.randn(m, b, generator=generator, dtype=torch.float64))[0].float().to(device)
    points = sphere.uniform(starts, b, generator, device=device)
    (schedule, _), *_ = RiemannianAdam(steps=steps).stages(points)
    return rows, points, torch.zeros_like(points), torch.zeros_like(points[:, :1]), schedule


def far_in_rows(name: str, shape: tuple[int, int], device: torch.device) -> float:
    """Largest difference between a kernel of single steps and its reference, in any argument."""
    from spearpp.linalg.kernels.gated import fused

    extra = [1e-12] if name == "move" else []
    ours, expected = (arguments(name, *shape, device) for _ in range(2))
    getattr(fused, name)(*ours, *extra)
    getattr(reference, name)(*expected, *extra)
    tensors = [
        (a, b)
        for a, b in zip(ours, expected, strict=True)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    ]
    return max(float((a.double() - b.double()).abs().max()) for a, b in tensors)


def far_in_descent(name: str, device: torch.device) -> tuple[float, float]:
    """Median distance between the ends of the paper's descent and of its reference, and how far the points moved."""
    from spearpp.linalg.kernels.paper import fused

    b, m, starts, width, fine = DESCENTS[name]
    ours, expected = (descent(b, m, starts, steps=4, device=device) for _ in range(2))
    before = ours[1].clone()
    fused.descend(*ours, width, (0.9, 0.999), 1e-8, fine)
    paper_reference.descend(*expected, width, (0.9, 0.999), 1e-8, fine)
    apart = torch.linalg.vector_norm(ours[1] - expected[1], dim=1)
    return float(apart.median()), _longest(expected[1] - before)
