"""Strong inputs are certified although weak ones are wrong or missing, and never the other way round."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import spearpp
from conftest import Client, graded
from spearpp import sphere
from spearpp.certificate import certify, certify_strongest
from spearpp.certificate.masks import HEAVIER
from spearpp.certificate.reliance import rely
from spearpp.filtering import Selection, complete_basis, inputs_at
from spearpp.problem import Problem
from spearpp.search import Gated

STRONG = torch.cat([torch.ones(8), torch.full((2,), 1e-5)])
"""Two of ten samples far below the others, and far above rounding."""


@pytest.fixture(scope="module")
def client() -> Client:
    batch, layers = graded(STRONG, 120, 60)
    return Client(batch, layers[0])


def choice(problem: Problem, directions: torch.Tensor, found: int | None = None) -> Selection:
    zeros = problem.tolerance.zeros(directions @ problem.factors.left.T, directions)
    return Selection.of(problem, directions, zeros, found)


def turned(directions: torch.Tensor, place: int, seed: int, size: float = 1.0) -> torch.Tensor:
    """One direction of the batch turned towards anything."""
    turn = torch.randn(directions.shape[1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    off = directions.clone()
    off[place] = sphere.retract(off[place] + size * turn)
    return off


@given(st.integers(1, 9), st.integers(0, 1000))
def test_points_are_dual_and_what_is_open_is_orthogonal(k: int, seed: int) -> None:
    q = sphere.uniform(k, 9, torch.Generator().manual_seed(seed), dtype=torch.float64)
    relied = rely(q)
    torch.testing.assert_close(relied.points @ q.T, torch.eye(k, dtype=torch.float64))
    assert relied.open.shape == (9, 9 - k)
    assert float((relied.points @ relied.open).abs().sum()) < 1e-9 * float(relied.points.norm())
    assert float((q @ relied.open).abs().sum()) < 1e-12


@given(st.integers(0, 1000), st.floats(0.05, 1.0))
def test_a_wrong_weak_direction_costs_only_the_weak_ones(client: Client, seed: int, size: float) -> None:
    problem = client.problem
    chosen = choice(problem, turned(client.true_directions(problem), 9, seed, size))
    assert not bool(certify(problem, chosen).exact.any())
    found = certify_strongest(problem, chosen)
    assert found is not None
    exact = found.certificates.exact
    assert int(exact.sum()) == 8
    inputs = inputs_at(problem, found.relied.points, found.zeros)
    apart = torch.cdist(inputs[exact], client.batch.inputs[:8].double())
    size_of = torch.linalg.vector_norm(client.batch.inputs.double(), dim=1).mean()
    assert sorted(apart.argmin(1).tolist()) == list(range(8))
    assert float(apart.min(1).values.max() / size_of) < 3e-4


def test_a_missing_weak_direction_costs_only_the_weak_ones(client: Client) -> None:
    problem = client.problem
    found = certify_strongest(problem, choice(problem, complete_basis(client.true_directions(problem)[:9]), 9))
    assert found is not None
    assert len(found.certificates.exact) == 9
    assert int(found.certificates.exact.sum()) == 8


@given(st.integers(0, 7), st.integers(0, 1000), st.floats(1e-2, 1.0))
def test_a_wrong_strong_direction_takes_all_certificates_with_it(
    client: Client, place: int, seed: int, size: float
) -> None:
    problem = client.problem
    found = certify_strongest(problem, choice(problem, turned(client.true_directions(problem), place, seed, size)))
    assert found is None or not bool(found.certificates.exact.any())


@given(st.integers(1, 9))
def test_the_error_covers_what_is_left_open(client: Client, k: int) -> None:
    """Leaving samples out moves the others by what the certificate says, at most a few times."""
    problem = client.problem
    q = client.true_directions(problem)
    relied = rely(q[:k])
    seen = relied.points @ problem.factors.right
    exact = torch.linalg.inv(q.T)[:k] @ problem.factors.right
    off = torch.linalg.vector_norm(seen - exact, dim=1)
    assert bool((off <= 4 * relied.input_error(problem)).all())


@pytest.mark.parametrize(("times", "holds"), [(0.5, True), (2.0, True), (3.5, True), (2 * HEAVIER, False)])
def test_noise_a_little_above_its_bound_raises_the_error(client: Client, times: float, holds: bool) -> None:
    problem = client.problem
    directions = client.true_directions(problem)
    plain = certify(problem, choice(problem, directions))
    quiet = torch.nonzero((client.preactivations[0] < -0.1) & problem.factors.live)[0, 0]
    row, bound = problem.factors.left[quiet], problem.tolerance.entry(directions)[0, quiet]
    moved = row + (times * bound - row @ directions[0]) * torch.linalg.inv(directions.T)[0]
    problem.factors.left[quiet] = moved  # now ℓ·q_0 is so many times its bound, and ℓ·q_j as it was
    seen = certify(problem, choice(problem, directions))
    assert bool(seen.consistent.all()) == holds
    if holds:
        assert seen.heavier == pytest.approx(max(times, plain.heavier), rel=1e-3)
        torch.testing.assert_close(seen.error, plain.error * seen.heavier / plain.heavier, rtol=1e-6, atol=0)


def test_nothing_wrong_is_certified_of_a_batch_that_sinks_into_rounding() -> None:
    """The strong ones are right, but what tells them from faint ones lies below the noise of these."""
    importance = torch.cat([torch.ones(12), torch.logspace(-5, -8, 6)])
    for seed in range(3):
        batch, layers = graded(importance, 120, 150, seed=seed)
        result = spearpp.invert(*layers[0], search=Gated(starts=1024))
        found = spearpp.score(result.inputs, batch.inputs, threshold=60)
        assert found.recovered >= 11  # they come back all the same
        for x in result.inputs[result.certified]:
            assert float(spearpp.score(x[None], batch.inputs).psnr.max()) > 60
