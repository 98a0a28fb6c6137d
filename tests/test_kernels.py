"""The row-wise steps and the whole descent: what they compute, and that Triton computes the same."""

import importlib.util
import json
import math
import os
from pathlib import Path

import pytest
import torch

from conftest import MakeClient, present
from descents import CASES, DESCENTS, RATE, ROW_SHAPES, ROWWISE, Case, arguments, descent, far, problem
from processes import python
from spearpp.linalg import sphere
from spearpp.linalg.kernels import gated as kernels
from spearpp.linalg.kernels.gated import reference
from spearpp.linalg.kernels.paper import for_descent
from spearpp.linalg.kernels.paper import reference as whole_descent
from spearpp.linalg.recording import repeat
from spearpp.search import RiemannianAdam
from spearpp.search.gated.descent import Effort, descend
from spearpp.search.gated.objective import Gates
from spearpp.search.losses import L1, LogCosh, SparsityLoss

SHAPES = [(1, 1), (3, 7), (130, 20), (64, 1000), (9, 4099)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ROWWISE)
def test_triton_does_what_the_reference_does(name: str, shape: tuple[int, int], cuda: torch.device) -> None:
    fused = kernels.for_rows(torch.zeros(1, device=cuda), shape[1])
    assert fused is not reference
    extra = [1e-12] if name == "move" else []
    ours, expected = (arguments(name, *shape, cuda) for _ in range(2))
    getattr(fused, name)(*ours, *extra)
    getattr(reference, name)(*expected, *extra)
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_without_a_gpu_the_reference_is_taken() -> None:
    assert kernels.for_rows(torch.zeros(1), 10) is reference
    assert kernels.for_all_steps(torch.zeros(4, 3), 10, 3) is None


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, list[float]]]:
    """How far every kernel ends from its reference in every case, run by Triton's interpreter without a GPU."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent / "src"), os.environ.get("PYTHONPATH", "")])
    found: dict[str, dict[str, list[float]]] = json.loads(python(here / "interpreted.py", PYTHONPATH=paths))
    return found


@pytest.mark.parametrize("shape", ROW_SHAPES)
@pytest.mark.parametrize("name", ROWWISE)
def test_row_kernels_do_what_the_reference_does(
    name: str, shape: tuple[int, int], interpreted: dict[str, dict[str, list[float]]]
) -> None:
    (difference,) = interpreted["rows"][f"{name} {shape}"]
    assert difference < 1e-9


@pytest.mark.parametrize("name", DESCENTS)
def test_the_paper_s_descent_in_one_kernel_ends_where_the_reference_does(
    name: str, interpreted: dict[str, dict[str, list[float]]]
) -> None:
    median, way = interpreted["paper"][name]
    assert median < 2e-4
    assert way > 0.1


@pytest.mark.parametrize("name", CASES)
def test_all_steps_in_one_kernel_end_where_single_steps_do(
    name: str, interpreted: dict[str, dict[str, list[float]]]
) -> None:
    ends, directions, way = interpreted["all steps"][name]
    assert ends < 1e-4 > directions
    assert way > 0.1 or min(CASES[name].steps, CASES[name].d - 1) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_all_steps_in_one_kernel_end_there_on_a_gpu_too(name: str, cuda: torch.device) -> None:
    ends, directions, _ = far(CASES[name], cuda)
    assert ends < 1e-3 > directions


@pytest.mark.gpu
def test_the_kernel_for_all_steps_is_taken_for_small_problems_and_gives_one_result(cuda: torch.device) -> None:
    case = Case(1, 200, 20, 20, 130, steps=50, ridge=1e-4)
    rows, gates, basis, points = (each[0].float().to(cuda) for each in problem(case))
    assert kernels.for_all_steps(points, 200, 20) is not None
    assert kernels.for_all_steps(points, 4000, 200) is None
    assert kernels.for_all_steps(points.double(), 200, 20) is None
    effort = Effort(case.steps, 4, case.ridge)
    first, again = (descend(Gates(rows, gates, basis), points.clone(), effort, RATE) for _ in range(2))
    assert torch.equal(first.points, again.points)
    assert torch.equal(first.directions, again.directions)
    assert first.directions.shape == (130, 20)
    assert first.steps == 130 * 50


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
    schedule = torch.tensor([[0.1 / (1 - 0.9), 1 / (1 - 0.999), 1 - 0.9, 1 - 0.999]], dtype=torch.float64)
    counter, second = torch.zeros(1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.float64)
    reference.move(points, gradient, none, one, none.clone(), second, schedule, counter, 1e-12)
    assert float(torch.linalg.vector_norm(points)) == pytest.approx(1)
    assert float(points[0, 0]) == pytest.approx(-math.sin(math.atan(0.1)), rel=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("width", [0.0, 0.05])
@pytest.mark.parametrize(
    ("b", "m", "starts"),
    [(2, 9, 1), (7, 33, 5), (16, 64, 64), (20, 200, 1000), (65, 1001, 130), (150, 333, 257), (210, 400, 129)],
)
def test_the_fused_descent_does_what_the_reference_does(
    b: int, m: int, starts: int, width: float, fine: bool, cuda: torch.device
) -> None:
    """A sign may turn where y is nearly zero, rarely in so few steps; rough slopes fall either way more often."""
    ours, expected = (descent(b, m, starts, steps=4, device=cuda) for _ in range(2))
    fused = present(for_descent(ours[1], smooth=width > 0))
    fused.descend(*ours, width, (0.9, 0.999), 1e-8, fine)
    whole_descent.descend(*expected, width, (0.9, 0.999), 1e-8, fine)
    apart = torch.linalg.vector_norm(ours[1] - expected[1], dim=1)
    assert float((apart < (1e-4 if width == 0 or fine else 2e-3)).double().mean()) > 0.97
    assert float(apart.median()) < (1e-5 if width == 0 or fine else 2e-4)
    torch.testing.assert_close(ours[2].square().mean(), expected[2].square().mean(), rtol=1e-3, atol=0)
    torch.testing.assert_close(ours[3].mean(), expected[3].mean(), rtol=1e-3, atol=0)


@pytest.mark.gpu
def test_what_the_fused_descent_cannot_hold_goes_step_by_step(cuda: torch.device) -> None:
    assert for_descent(torch.zeros(1, 257, device=cuda), smooth=False) is None
    assert for_descent(torch.zeros(1, 20, device=cuda, dtype=torch.float64), smooth=False) is None


def test_without_a_gpu_a_descent_goes_step_by_step() -> None:
    assert for_descent(torch.zeros(1, 20), smooth=False) is None


@pytest.mark.parametrize("loss", [L1(), LogCosh(1 / 300)], ids=repr)
def test_the_reference_descent_is_the_search_step_by_step(loss: SparsityLoss) -> None:
    rows, points, momentum, second, _ = (each.double() for each in descent(7, 60, 30, steps=1))
    search = RiemannianAdam(loss=loss, steps=40, rates=((0, 1e-1), (15, 1e-3), (30, 1e-5)))
    expected = search.descend(rows, points.clone())
    for schedule, _ in search.stages(points):
        width = loss.mu if isinstance(loss, LogCosh) else 0.0
        whole_descent.descend(rows, points, momentum, second, schedule, width, search.betas, search.epsilon, fine=True)
    torch.testing.assert_close(points, expected, rtol=0, atol=1e-10)


def test_steps_are_rough_while_they_are_long() -> None:
    like = torch.zeros(1, dtype=torch.float64)
    stages = list(RiemannianAdam().stages(like))
    assert [(len(schedule), fine) for schedule, fine in stages] == [(400, False), (100, True)]
    assert stages[0][0][0].tolist() == pytest.approx([0.1 / (1 - 0.9), 1 / (1 - 0.999)])
    assert float(stages[1][0][-1, 0]) == pytest.approx(1e-5 / (1 - 0.9**500))


def test_rough_numbers_are_those_of_float16() -> None:
    values = torch.randn(50, 50, generator=torch.Generator().manual_seed(0))
    values[0, 0] = 0
    assert torch.equal(whole_descent.rough(values)[values.abs() > 1e-4], values.half().float()[values.abs() > 1e-4])
    assert float(whole_descent.rough(values)[0, 0]) == 0


def test_rough_products_find_as_much(make_client: MakeClient) -> None:
    """Starts that end at a true direction, in rough products all the way, and in float64."""
    client = make_client(8, 120, 60)
    problem = client.problem
    rows, search = problem.live_rows, RiemannianAdam()
    points = sphere.uniform(256, 8, torch.Generator().manual_seed(0), dtype=torch.float64)
    moved, momentum, second = points.clone(), torch.zeros_like(points), torch.zeros_like(points[:, :1])
    for schedule, _ in search.stages(points):
        whole_descent.descend(rows, moved, momentum, second, schedule, 0.0, search.betas, search.epsilon, fine=False)
    exact = search.descend(rows, points)
    hits = [int(((each @ client.true_directions(problem).T).abs() > 1 - 1e-6).any(1).sum()) for each in (moved, exact)]
    assert hits[1] > 100
    assert abs(hits[0] - hits[1]) < 13
