"""Peeling: inputs that single rows of the gradient reveal."""

from dataclasses import replace

import pytest
import torch

import spearpp
from clients import layers_of
from conftest import Client, MakeClient, batch_and_model
from spearpp import simulate
from spearpp.inversion.observation import observe
from spearpp.inversion.problem import Problem, pose
from spearpp.inversion.solutions import Pairs, no_pairs
from spearpp.linalg import sphere
from spearpp.search import Gated
from spearpp.search.gated.peel import peel_samples


def bright(b: int, m: int, seed: int = 0, *, common: float = 1.0, bias: bool = True) -> Client:
    """Inputs with a large common part, as pixels in [0, 1] have: a neuron is active for nearly all or nearly none."""
    batch, model = batch_and_model(b, 200, [m, m], seed=seed, dtype=torch.float64, bias=bias)
    batch = replace(batch, inputs=batch.inputs.abs() + common)
    return Client(batch, simulate.fedsgd(model, batch)[0])


def inputs_of(problem: Problem, pairs: Pairs) -> torch.Tensor:
    extended = pairs.points @ problem.factors.right
    return extended[:, :-1] / extended[:, -1:]


@pytest.mark.parametrize("seed", range(4))
def test_what_is_peeled_off_is_in_the_batch(seed: int) -> None:
    client = bright(30, 240, seed)
    problem = client.problem
    pairs = peel_samples(problem)
    assert len(pairs) >= 3
    distance = torch.cdist(inputs_of(problem, pairs), client.batch.inputs.double()).amin(1)
    assert float(distance.max()) < 1e-5
    alike = sphere.retract(pairs.directions) @ client.true_directions(problem).T
    assert float(alike.abs().amax(1).min()) > 1 - 1e-9


def test_pairs_are_biorthogonal_and_leave_a_smaller_problem() -> None:
    problem = bright(30, 240).problem
    pairs, left = peel_samples(problem), problem.factors.left
    k = len(pairs)
    torch.testing.assert_close(pairs.directions @ pairs.points.T, torch.eye(k, dtype=torch.float64))
    assert pairs.apart.shape == (30, 30 - k)
    assert int(torch.linalg.matrix_rank(pairs.rest(left), rtol=1e-9)) == 30 - k
    # The other directions are where ``apart`` says they are.
    other = bright(30, 240).true_directions(problem)
    other = other[(other @ sphere.retract(pairs.directions).T).abs().amax(1) < 0.999]
    assert len(other) == 30 - k
    torch.testing.assert_close((other @ pairs.apart) @ pairs.apart.T, other, rtol=0, atol=1e-7)


def test_a_sample_hidden_in_anothers_point_is_taken_out_of_it() -> None:
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    dual = torch.linalg.inv(true).T
    mixed = true[0] + 0.01 * true[1]
    first = Pairs(mixed[None], dual[:1])
    both = first.join(true[1:2], dual[1:2])
    torch.testing.assert_close(both.points, true[:2])


def test_nothing_is_peeled_off_where_neurons_fire_for_half_of_the_samples(make_client: MakeClient) -> None:
    assert not len(peel_samples(make_client(20, 120, 100).problem))


@pytest.mark.parametrize("seed", range(6))
def test_rows_with_too_few_zeros_are_skipped(seed: int) -> None:
    """With b near half of the neurons nearly any row has a direction that fits it."""
    assert not len(peel_samples(bright(50, 120, seed).problem))


def test_a_layer_without_bias_says_no_sign_and_is_not_peeled() -> None:
    assert not len(peel_samples(bright(30, 240, bias=False).problem))


def test_no_time_is_no_peeling() -> None:
    assert not len(peel_samples(bright(30, 240).problem, deadline=0.0))


def test_it_helps_where_the_search_alone_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same number of starts, peeling leads to the whole batch and the search alone does not."""
    client = bright(24, 240, 1, common=2.0)
    search = Gated(starts=1536)
    assert len(peel_samples(client.problem)) >= 6
    result = spearpp.invert(*client.seen, search=search)
    assert client.score(result).exact
    assert bool(result.certified.all())

    def nothing(problem: Problem, deadline: float) -> Pairs:
        del deadline
        return no_pairs(problem)

    monkeypatch.setattr("spearpp.search.gated.peel_samples", nothing)
    alone = spearpp.invert(*client.seen, search=search)
    assert alone.stats.found < 24
    assert not bool(alone.certified.any())
    assert result.stats.steps < 0.7 * alone.stats.steps


def test_what_rows_gave_away_is_returned_where_the_rest_is_not_found() -> None:
    client = bright(30, 240)
    pairs = peel_samples(client.problem)
    result = spearpp.invert(*client.seen, search=Gated(starts=1))
    assert 0 < len(pairs) < 30
    assert len(result.inputs) == len(pairs)
    assert not bool(result.certified.any())
    distance = torch.cdist(result.inputs.double(), client.batch.inputs.double()).amin(1)
    assert float(distance.max()) < 1e-4


def test_a_faint_sample_in_anothers_row_does_not_hide_its_own_direction() -> None:
    """Of class weights from 1e-3 to 1 some rows hold a strong sample and a faint one, and pass for the strong one's."""
    for seed in (0, 1):
        batch, model = batch_and_model(12, 60, [150, 100], seed=seed)
        weights = torch.logspace(-3, 0, 10)
        loss = torch.nn.functional.cross_entropy(model(batch.inputs), batch.labels, weight=weights)
        seen = layers_of(loss, model)[0]
        assert len(peel_samples(pose(observe(*seen), sparsity=0.1))) >= 1
        assert bool(spearpp.invert(*seen, search=Gated(starts=2048)).certified.all())


def test_pairs_that_do_not_go_together_are_not_joined() -> None:
    first = Pairs(torch.eye(3, dtype=torch.float64)[:1], torch.eye(3, dtype=torch.float64)[:1])
    same_point = first.join(first.points, torch.eye(3, dtype=torch.float64)[1:2])
    assert len(same_point) == 1


def test_a_noisy_batch_that_was_found_is_not_given_up_for_its_open_rows() -> None:
    """All ten inputs are returned, certified or not."""
    client = bright(10, 240, 3)
    seen = client.seen
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(seen.grad_weight.shape, generator=generator, dtype=torch.float64)
    noisy = seen.grad_weight + 3e-3 * seen.grad_weight.std() * noise
    result = spearpp.invert(noisy, seen.grad_bias, seen.weight, seen.bias, search=Gated(starts=2048))
    assert len(result.inputs) == 10
