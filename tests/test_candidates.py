"""Which directions enter the pool, and in which form."""

import pytest
import torch

from conftest import Client, MakeClient
from spearpp.inversion.observation import observe
from spearpp.inversion.pool import admit, drop_neighbours, empty_pool, refit
from spearpp.inversion.problem import pose


@pytest.fixture
def client(make_client: MakeClient) -> Client:
    return make_client(6, 100, 50)


def test_true_directions_enter_once_with_either_sign(client: Client) -> None:
    problem = client.problem
    q = client.true_directions(problem)
    pool = admit(empty_pool(problem), problem, torch.cat([q, -q, q]))
    assert len(pool) == 6
    assert pool.rank == 6
    assert admit(pool, problem, -q) is pool


def test_dense_directions_stay_out(client: Client) -> None:
    problem = client.problem
    random = torch.randn(500, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert len(admit(empty_pool(problem), problem, random)) == 0


def test_a_rough_proposal_is_solved_to_full_precision(client: Client) -> None:
    problem = client.problem
    q = client.true_directions(problem)
    rough = torch.nn.functional.normalize(q + 1e-5 * torch.randn(q.shape, generator=torch.Generator().manual_seed(0)))
    pool = admit(empty_pool(problem), problem, rough.float())
    overlap = (pool.directions @ q.T).abs().amax(1)
    assert len(pool) == 6
    assert float((1 - overlap).max()) < 1e-12


def test_refit_is_not_spoilt_by_a_row_that_only_looks_zero(make_client: MakeClient) -> None:
    """Among many samples some entry of an active neuron is always small; it must not count as a zero."""
    spoilt = 0
    for seed in range(10):
        client = make_client(16, 200, 100, seed=seed)
        problem = client.problem
        q = client.true_directions(problem)
        values = q @ problem.factors.left.T
        spoilt += int((problem.tolerance.look_zero(values, q) & ~problem.tolerance.zeros(values, q)).sum())
        assert float((1 - (refit(problem, q) * q).sum(1).abs()).max()) < 1e-12
    assert spoilt > 0  # the case did occur


def test_the_threshold_decides(client: Client) -> None:
    problem = client.problem
    q = client.true_directions(problem)
    zeros = problem.tolerance.zeros(q @ problem.factors.left.T, q).sum(1)
    between = float(zeros.sort().values[2:4].double().mean()) / 100
    strict = pose(observe(*client.seen), sparsity=between)
    assert len(admit(empty_pool(strict), strict, q)) == int((zeros >= between * 100).sum())


def test_neighbours_are_dropped_but_nothing_else() -> None:
    distinct = torch.nn.functional.normalize(
        torch.randn(50, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    )
    crowd = torch.cat([distinct, -distinct, distinct + 1e-7])[
        torch.randperm(150, generator=torch.Generator().manual_seed(1))
    ]
    left = drop_neighbours(crowd)
    assert len(left) == 50
    assert float((left @ distinct.T).abs().amax(0).min()) > 1 - 1e-6
