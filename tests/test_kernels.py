"""The row-wise steps: what they compute, and that Triton computes the same."""

import math

import pytest
import torch

from spearpp import kernels, sphere
from spearpp.kernels import reference

SHAPES = [(1, 1), (3, 7), (130, 20), (64, 1000), (9, 4099)]


def arguments(name: str, rows: int, columns: int, device: torch.device) -> list[object]:
    """Random tensors of the shapes that a kernel takes, in float64."""
    generator = torch.Generator().manual_seed(rows + columns)

    def draw(width: int = columns) -> torch.Tensor:
        return torch.randn(rows, width, generator=generator, dtype=torch.float64).to(device)

    positive = draw(1).abs() + 0.5
    if name == "move":
        schedule = torch.tensor([[0.3, 2.0], [0.1, 1.5]], dtype=torch.float64, device=device)
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


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["gate", "begin", "advance", "direct", "pull", "move"])
def test_triton_does_what_the_reference_does(name: str, shape: tuple[int, int], cuda: torch.device) -> None:
    fused = kernels.for_rows(torch.zeros(1, device=cuda), shape[1])
    assert fused is not reference
    extra = [(0.9, 0.999), 1e-12] if name == "move" else []
    ours, expected = (arguments(name, *shape, cuda) for _ in range(2))
    getattr(fused, name)(*ours, *extra)
    getattr(reference, name)(*expected, *extra)
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_without_a_gpu_the_reference_is_taken() -> None:
    assert kernels.for_rows(torch.zeros(1), 10) is reference


def test_conjugate_gradients_solve_in_as_many_iterations_as_there_are_unknowns() -> None:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    matrix, right = root @ root.T + torch.eye(6), torch.randn(4, 6, generator=generator, dtype=torch.float64)
    solution, residual, search = torch.zeros_like(right), torch.empty_like(right), torch.empty_like(right)
    size = torch.empty(4, 1, dtype=torch.float64)
    reference.begin(right, solution @ matrix, residual, search, size)
    for _ in range(6):
        reference.advance(search, search @ matrix, solution, residual, size)
    torch.testing.assert_close(solution @ matrix, right, rtol=1e-8, atol=1e-8)


def test_a_step_of_adam_stays_on_the_sphere_and_goes_down() -> None:
    """Against ∇ = e₁ a point moves away from e₁, by about the rate at first."""
    points = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64)
    gradient = torch.tensor([[1.0, 5.0, 0.0]], dtype=torch.float64)  # the part along the point does not count
    none, one = torch.zeros_like(gradient), torch.ones(1, 1, dtype=torch.float64)
    schedule = torch.tensor([[0.1 / (1 - 0.9), 1 / (1 - 0.999)]], dtype=torch.float64)
    counter, second = torch.zeros(1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.float64)
    reference.move(points, gradient, none, one, none.clone(), second, schedule, counter, (0.9, 0.999), 1e-12)
    assert float(torch.linalg.vector_norm(points)) == pytest.approx(1)
    assert float(points[0, 0]) == pytest.approx(-math.sin(math.atan(0.1)), rel=1e-6)
