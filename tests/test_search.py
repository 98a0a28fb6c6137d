"""Searches of the paper, compared with geoopt and with the formulas written out, and how they count their work."""

import math
from collections.abc import Callable

import geoopt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import MakeClient
from spearpp.errors import OptionError
from spearpp.linalg import sphere
from spearpp.linalg.nullspace import random_subsets
from spearpp.search import KernelSampling, ProjectedGradient, RiemannianAdam, Search
from spearpp.search.base import chunk_sizes
from spearpp.search.losses import L1, LogCosh, NegativeL4, SparsityLoss


def orthonormal(m: int, b: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(m, b, generator=generator, dtype=torch.float64))[0]


@pytest.mark.parametrize("loss", [L1(), LogCosh(1 / 300), NegativeL4()], ids=repr)
@pytest.mark.parametrize(("m", "b"), [(60, 7), (200, 20)])
def test_riemannian_adam_follows_geoopt_step_by_step(loss: SparsityLoss, m: int, b: int) -> None:
    rows = orthonormal(m, b, seed=0)
    points = sphere.uniform(30, b, torch.Generator().manual_seed(1), dtype=torch.float64)
    search = RiemannianAdam(loss=loss)
    step = search.stepper(points)
    theirs = geoopt.ManifoldParameter(points.clone(), manifold=geoopt.Sphere())
    optimiser = geoopt.optim.RiemannianAdam([theirs], lr=0.1, betas=search.betas, eps=search.epsilon)
    for _ in range(50):
        optimiser.zero_grad()
        loss.value(theirs @ rows.T).sum().backward()
        optimiser.step()
        step(points, loss.gradient(points @ rows.T) @ rows, 0.1)
        torch.testing.assert_close(points, theirs.detach(), rtol=0, atol=1e-10)


def test_projected_gradient_is_its_formula() -> None:
    rows = orthonormal(50, 6, seed=0)
    points = sphere.uniform(10, 6, torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = points.clone()
    for rate in (0.1, 0.1, 0.01):
        stepped = expected - rate * torch.sign(expected @ rows.T) @ rows
        expected = stepped / stepped.norm(dim=1, keepdim=True)
    search = ProjectedGradient(steps=3, rates=((0, 0.1), (2, 0.01)))
    torch.testing.assert_close(search.descend(rows, points), expected)


@pytest.mark.parametrize("kind", [RiemannianAdam, ProjectedGradient])
def test_descent_lowers_the_loss_and_stays_on_the_sphere(kind: type[RiemannianAdam | ProjectedGradient]) -> None:
    rows = orthonormal(100, 8, seed=0)
    start = sphere.uniform(64, 8, torch.Generator().manual_seed(1), dtype=torch.float64)
    end = kind().descend(rows, start.clone())
    assert bool((L1().value(end @ rows.T) < L1().value(start @ rows.T)).all())
    torch.testing.assert_close(end.norm(dim=1), torch.ones(64, dtype=torch.float64))


@given(
    st.integers(1, 10_000_000),
    st.integers(1, 1_000_000),
    st.sampled_from(["cpu", "cuda"]),
    st.one_of(st.none(), st.integers(100, 10_000)),
)
def test_chunks_add_up_and_are_bounded(starts: int, row_bytes: int, device: str, chunk: int | None) -> None:
    sizes = list(chunk_sizes(starts, row_bytes, torch.device(device), chunk))
    assert sum(sizes) == starts
    assert min(sizes) > 0
    bound = chunk or max(128, (2**22 if device == "cpu" else 2**29) // row_bytes)
    assert max(sizes) <= bound


SEARCHES: list[Callable[[int], Search]] = [
    lambda starts: RiemannianAdam(starts=starts, steps=5),
    lambda starts: RiemannianAdam(loss=LogCosh(), starts=starts, steps=5),
    lambda starts: ProjectedGradient(starts=starts, steps=5),
    lambda starts: KernelSampling(starts=starts),
]


@pytest.mark.parametrize("make", SEARCHES)
def test_every_start_is_counted_and_every_proposal_is_a_unit_vector(
    make: Callable[[int], Search], make_client: MakeClient
) -> None:
    problem = make_client(5, 60, 30).problem
    proposals = list(make(5000).propose(problem, torch.Generator().manual_seed(0), math.inf))
    assert sum(each.starts for each in proposals) == 5000
    assert len(proposals) > 1
    found = torch.cat([each.directions for each in proposals])
    torch.testing.assert_close(found.norm(dim=1), torch.ones(len(found), dtype=torch.float64), atol=1e-6, rtol=0)


@pytest.mark.parametrize("make", SEARCHES)
def test_one_seed_gives_one_result(make: Callable[[int], Search], make_client: MakeClient) -> None:
    problem = make_client(5, 60, 30).problem
    first, second = (
        torch.cat([each.directions for each in make(300).propose(problem, torch.Generator().manual_seed(7), math.inf)])
        for _ in range(2)
    )
    assert torch.equal(first, second)


def test_kernel_sampling_succeeds_as_often_as_counting_says(make_client: MakeClient) -> None:
    client = make_client(5, 200, 60)
    problem = client.problem
    q = client.true_directions(problem)
    draws = 4000
    (proposals,) = KernelSampling(starts=draws, chunk=draws).propose(problem, torch.Generator().manual_seed(0))
    hits = int(((proposals.directions @ q.T).abs() > 1 - 1e-9).any(1).sum())
    zeros = problem.tolerance.zeros(q @ problem.factors.left.T, q)[:, problem.factors.live]
    # A line needs b-1 = 4 rows that are inactive for one sample and for no other.
    subsets = random_subsets(100_000, zeros.shape[1], 4, torch.Generator().manual_seed(1))
    chance = float((zeros[:, subsets].all(2).sum(0) == 1).double().mean())
    assert abs(hits - draws * chance) < 5 * (draws * chance) ** 0.5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RiemannianAdam(starts=0), "at least one start"),
        (lambda: KernelSampling(sparsity=1.5), "between 0 and 1"),
        (lambda: ProjectedGradient(steps=0), "at least one step"),
        (lambda: RiemannianAdam(rates=((5, 0.1),)), "from step 0"),
        (lambda: RiemannianAdam(rates=((0, -0.1),)), "rates positive"),
        (lambda: KernelSampling(chunk=0), "at least one start"),
    ],
)
def test_options_out_of_range_are_refused(make: Callable[[], Search], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()
