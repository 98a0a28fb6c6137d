"""The filtering of the SPEAR++ paper, compared with its formulas written out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import Client, MakeClient
from spearpp import score
from spearpp.inversion.pool import Pool, admit, empty_pool
from spearpp.inversion.problem import Problem
from spearpp.inversion.selection import (
    Selection,
    fix_scale,
    greedy_filt,
    init_filt,
    inputs_at,
    refit_to_patterns,
    select,
    swap_scores,
)
from spearpp.linalg.nullspace import complement, complement_of_basis


@pytest.fixture(scope="module")
def client(make_client: MakeClient) -> Client:
    return make_client(5, 90, 50, dtype=torch.float64)


def pool_of(problem: Problem, directions: torch.Tensor) -> Pool:
    return Pool(directions, problem.tolerance.zeros(directions @ problem.factors.left.T, directions))


def random_directions(k: int, b: int, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(k, b, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.nn.functional.normalize(drawn)


def literal_score(problem: Problem, directions: torch.Tensor, client: Client) -> float:
    """computeScore as the paper prints it, entry by entry."""
    left, right = problem.factors.left, problem.factors.right
    q = directions.T
    scale = torch.linalg.inv(q) @ torch.linalg.pinv(left) @ client.grad_bias
    q = q * scale
    inputs = (torch.linalg.inv(q) @ right[:, :-1]).T
    z = problem.seen.weight[:, :-1] @ inputs + problem.seen.weight[:, -1:]
    zero = problem.tolerance.zeros(directions @ left.T, directions).T
    return float(((z <= 0) & zero | (z > 0) & ~zero).double().mean())


def test_the_true_choice_scores_one_and_gives_the_inputs(client: Client) -> None:
    problem = client.problem
    chosen = select(problem, pool_of(problem, client.true_directions(problem)))
    assert chosen.score == 1.0
    assert chosen.full
    assert score(
        inputs_at(problem, chosen.points, chosen.zeros), client.batch.inputs, normalisation=client.batch.normalisation
    ).exact


@given(place=st.integers(0, 4), seed=st.integers(0, 10_000))
def test_replacing_any_column_lowers_the_score(client: Client, place: int, seed: int) -> None:
    problem = client.problem
    directions = client.true_directions(problem).clone()
    directions[place] = random_directions(1, 5, seed)[0]
    pool = pool_of(problem, directions)
    assert Selection.of(problem, pool.directions, pool.zeros).score < 1.0


@pytest.mark.parametrize("seed", range(5))
def test_the_score_is_the_papers(client: Client, seed: int) -> None:
    problem = client.problem
    for directions in (client.true_directions(problem), random_directions(5, 5, seed)):
        pool = pool_of(problem, directions)
        assert Selection.of(problem, directions, pool.zeros).score == pytest.approx(
            literal_score(problem, directions, client)
        )


@pytest.mark.parametrize("seed", range(6))
def test_every_swap_is_scored_as_if_done(client: Client, seed: int) -> None:
    problem = client.problem
    true = client.true_directions(problem)
    pool = pool_of(problem, torch.cat([true[:3], random_directions(2, 5, seed)]))
    candidates = pool_of(problem, torch.cat([true[[3, 0]], random_directions(1, 5, seed + 100)]))
    chosen = Selection.of(problem, pool.directions, pool.zeros)
    found = swap_scores(problem, chosen, candidates.directions, candidates.zeros)
    for candidate, pattern, scores in zip(candidates.directions, candidates.zeros, found, strict=True):
        for place in range(5):
            swapped = pool.directions.clone()
            swapped[place] = candidate
            patterns = pool.zeros.clone()
            patterns[place] = pattern
            if int(torch.linalg.matrix_rank(swapped, rtol=1e-9)) < 5:
                assert int(scores[place]) == -1
            else:
                agreeing = 90 * 5 * literal_score(problem, swapped, client)
                assert int(scores[place]) == pytest.approx(agreeing + int(patterns.sum()))


def test_how_many_swaps_are_scored_at_a_time_changes_nothing(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = client.problem
    pool = pool_of(problem, torch.cat([random_directions(60, 5), client.true_directions(problem)[:4]]))
    chosen = []
    for size in (1, 2**30):
        monkeypatch.setattr("spearpp.linalg.chunks.SMALL_HOST_BYTES", size)
        chosen.append(select(problem, pool))
    one_by_one, at_once = chosen
    assert torch.equal(one_by_one.directions, at_once.directions)
    assert one_by_one.score == at_once.score


def test_greedy_swaps_never_lose_and_report_the_score_they_have(client: Client) -> None:
    problem = client.problem
    for seed in range(6):
        pool = pool_of(problem, torch.cat([random_directions(9, 5, seed), client.true_directions(problem)]))
        start = Selection.of(problem, pool.directions[:5], pool.zeros[:5])
        end = greedy_filt(problem, start, pool, torch.arange(5), torch.arange(len(pool)))
        assert end.score > start.score
        assert end.score == pytest.approx(literal_score(problem, end.directions, client))


def test_one_wrong_column_is_swapped_for_the_true_one(client: Client) -> None:
    problem = client.problem
    true = client.true_directions(problem)
    for place in range(5):
        start = true.clone()
        start[place] = random_directions(1, 5, place)[0]
        pool = pool_of(problem, torch.cat([start, true[place][None], random_directions(3, 5, 7)]))
        first = Selection.of(problem, start, pool.zeros[:5])
        assert first.score < 1.0
        assert greedy_filt(problem, first, pool, torch.arange(5), torch.arange(len(pool))).score == 1.0


def test_a_wrong_candidate_that_looks_sparsest_is_swapped_out(client: Client) -> None:
    """initFilt must take it, being the sparsest; only GreedyFilt can put it right."""
    problem = client.problem
    true = pool_of(problem, client.true_directions(problem))
    wrong = random_directions(1, 5, 3)
    pool = Pool(torch.cat([true.directions, wrong]), torch.cat([true.zeros, torch.ones(1, 90, dtype=torch.bool)]))
    assert 5 in init_filt(pool).tolist()
    chosen = select(problem, pool)
    assert chosen.score == 1.0
    assert float((chosen.directions @ wrong.T).abs().max()) < 1 - 1e-9


def test_refitting_to_patterns_drops_rows_of_active_neurons(client: Client) -> None:
    problem = client.problem
    true = client.true_directions(problem)
    exact = select(problem, pool_of(problem, true))
    assert refit_to_patterns(problem, exact) is exact
    spoilt = exact.zeros.clone()
    active = torch.nonzero(~spoilt[0])[:3, 0]
    spoilt[0, active] = True
    off = exact.directions.clone()
    off[0] = torch.nn.functional.normalize(off[0] + 1e-9, dim=0)
    refitted = refit_to_patterns(problem, Selection.of(problem, off, spoilt))
    assert refitted.score == 1.0
    assert float((1 - (refitted.directions * exact.directions).sum(1).abs()).max()) < 1e-12


def test_the_first_choice_is_the_sparsest_independent_one(client: Client) -> None:
    problem = client.problem
    true = client.true_directions(problem)
    sums = torch.nn.functional.normalize(true[:1] + true[1:2])
    pool = pool_of(problem, torch.cat([sums, random_directions(3, 5), true]))
    assert sorted(init_filt(pool).tolist()) == [4, 5, 6, 7, 8]
    repeated = pool_of(problem, torch.cat([true[:2], true[:2]]))
    assert sorted(init_filt(repeated).tolist()) == [0, 1]


@given(st.integers(1, 8), st.data())
def test_the_complement_is_orthonormal_and_orthogonal(b: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, b))
    found = random_directions(k, b, seed=b)
    rest = complement(found).T
    torch.testing.assert_close(rest @ rest.T, torch.eye(b - k, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(rest @ found.T, torch.zeros(b - k, k, dtype=torch.float64), atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["random", "swapped", "negative", "inactive", "nearly swapped", "whole"])
def test_the_complement_of_a_basis_is_orthonormal(kind: str) -> None:
    """Also where I + B₁ is singular, nearly singular or zero."""
    d, b = 12, 12 if kind == "whole" else 4
    swapped = torch.eye(d, dtype=torch.float64)[:, [1, 0, 3, 2]]
    basis = {
        "random": torch.linalg.qr(random_directions(b, d).T)[0],
        "swapped": swapped,
        "negative": -torch.eye(d, dtype=torch.float64)[:, :b],
        "inactive": torch.eye(d, dtype=torch.float64)[:, -b:],
        "nearly swapped": torch.linalg.qr(swapped + 1e-9 * random_directions(4, d).T)[0],
        "whole": torch.linalg.qr(random_directions(b, d).T)[0],
    }[kind]
    both = torch.cat([basis, complement_of_basis(basis)], dim=1)
    torch.testing.assert_close(both.T @ both, torch.eye(d, dtype=torch.float64), atol=1e-9, rtol=0)


def test_the_scale_makes_the_columns_sum_to_the_bias_gradient(client: Client) -> None:
    problem = client.problem
    directions = random_directions(5, 5)
    zeros = pool_of(problem, directions).zeros
    scale = fix_scale(problem, torch.linalg.inv(directions.T), zeros)
    columns = problem.factors.left @ directions.T * scale
    torch.testing.assert_close(columns.sum(1), client.grad_bias, atol=1e-12, rtol=0)


def test_with_one_direction_missing_that_input_is_exact_and_the_rest_are_not(client: Client) -> None:
    """Its p is orthogonal to all the q found, and the complement is just that line."""
    problem = client.problem
    true = client.true_directions(problem)
    chosen = select(problem, admit(empty_pool(problem), problem, true[:4]))
    assert not chosen.full
    recovered = inputs_at(problem, chosen.points, chosen.zeros)
    error = (recovered[4] - client.batch.inputs[4]).abs().max()
    assert float(error) < 1e-6
    assert float((recovered[:4] - client.batch.inputs[:4]).abs().amax(1).min()) > 1e-3
