"""The row-wise steps: what they compute, and that Triton computes the same."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from descents import CASES, RATE, Case, far, problem
from spearpp import kernels, sphere
from spearpp.kernels import reference
from spearpp.search.gated.descent import Effort, descend, descend_many, repeat
from spearpp.search.gated.objective import Gates

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
    assert kernels.for_all_steps(torch.zeros(1, 4, 3), 10, 3) is None


@pytest.fixture(scope="module")
def interpreted() -> dict[str, tuple[float, float, float]]:
    """How far the kernel ends from the reference in every case, by Triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("no Triton")
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(here / "interpreted.py")]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)  # noqa: S603
    assert done.returncode == 0, done.stderr
    return {name: (a, b, c) for name, (a, b, c) in json.loads(done.stdout).items()}


@pytest.mark.parametrize("name", CASES)
def test_all_steps_in_one_kernel_end_where_single_steps_do(
    name: str, interpreted: dict[str, tuple[float, float, float]]
) -> None:
    ends, directions, way = interpreted[name]
    assert ends < 1e-4 > directions
    assert way > 0.1 or min(CASES[name].steps, CASES[name].d - 1) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_all_steps_in_one_kernel_end_there_on_a_gpu_too(name: str, cuda: torch.device) -> None:
    ends, directions, _ = far(CASES[name], cuda)
    assert ends < 1e-3 > directions


@pytest.mark.gpu
def test_the_kernel_for_all_steps_is_taken_for_small_problems_and_gives_one_result(cuda: torch.device) -> None:
    case = Case((200, 180, 150), 20, 20, 130, steps=50, epsilon=1e-4)
    rows, gates, basis, points = (each.float().to(cuda) for each in problem(case))
    assert kernels.for_all_steps(points, 200, 20) is not None
    assert kernels.for_all_steps(points, 4000, 200) is None
    assert kernels.for_all_steps(points.double(), 200, 20) is None
    effort = Effort(case.steps, 4, case.epsilon)
    (first, q), (again, _) = (
        descend_many(rows, gates, basis, points.clone(), case.counts, effort, RATE) for _ in range(2)
    )
    assert torch.equal(first, again)
    for i, count in enumerate(case.counts):
        alone, direction = descend(Gates(rows[i, :count], gates[i, :count], basis[i]), points[i].clone(), effort, RATE)
        torch.testing.assert_close(alone, first[i], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(sphere.retract(direction), sphere.retract(q[i]), rtol=1e-2, atol=1e-2)


def test_many_updates_descend_as_each_does_alone() -> None:
    case = Case((60, 40), 7, 5, 9)
    rows, gates, basis, points = problem(case)
    effort = Effort(case.steps, 4, 1e-4)
    ends, directions = descend_many(rows, gates, basis, points.clone(), case.counts, effort, RATE)
    for i, count in enumerate(case.counts):
        alone = descend(Gates(rows[i, :count], gates[i, :count], basis[i]), points[i].clone(), effort, RATE)
        torch.testing.assert_close((ends[i], directions[i]), alone, rtol=1e-9, atol=1e-9)


@pytest.mark.gpu
def test_what_is_recorded_is_repeated_and_an_error_ends_the_recording(cuda: torch.device) -> None:
    number, calls = torch.zeros(1, device=cuda), []

    def step() -> None:
        number.add_(torch.ones_like(number))  # a tensor of the graph's own
        calls.append(1)

    repeat(step, 7, cuda)
    assert float(number) == 7
    assert len(calls) == 2

    def fails() -> None:
        step()
        if len(calls) == 4:
            raise ValueError("while recording")

    with pytest.raises(ValueError, match="while recording"):
        repeat(fails, 7, cuda)
    repeat(step, 5, cuda)
    assert float(number) == 7 + 1 + 5


@pytest.mark.gpu
def test_recordings_do_not_pile_up(cuda: torch.device) -> None:
    large = torch.zeros(2**26, device=cuda)  # 256 MiB a temporary

    def step() -> None:
        large.add_(large.cos())

    reserved = []
    for _ in range(24):
        repeat(step, 3, cuda)
        reserved.append(torch.cuda.memory_reserved(cuda))
    assert max(reserved) - reserved[0] <= 2 * 2**30


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
