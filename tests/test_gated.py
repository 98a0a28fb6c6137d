"""The gated search: each of its stages, and batches that are harder than those of the paper."""

from functools import partial
from pathlib import Path

import pytest
import torch
from benchmarks.certificates import CASES

import spearpp
from conftest import Client, MakeClient, graded
from processes import python
from spearpp import simulate
from spearpp.errors import OptionError
from spearpp.experiments.attack import with_true_masks
from spearpp.inversion.pool import Pool
from spearpp.inversion.problem import Problem
from spearpp.inversion.result import Inversion
from spearpp.inversion.selection import init_filt, least_noisy_first
from spearpp.inversion.solutions import no_pairs
from spearpp.linalg import sphere
from spearpp.linalg.nullspace import complement
from spearpp.metrics import Score
from spearpp.search import Gated, RiemannianAdam
from spearpp.search.gated.accept import acceptable, new_directions
from spearpp.search.gated.descent import Effort, _step_by_step, descend
from spearpp.search.gated.objective import Gates, Objective
from spearpp.search.gated.one_layer import OneLayerRounds, RoundOptions, within_reach
from spearpp.search.gated.refine import promising, refine
from spearpp.simulate import Batch


@pytest.fixture(scope="module")
def client(make_client: MakeClient) -> Client:
    return make_client(8, 120, 60)


@pytest.fixture(scope="module")
def graded_client() -> Client:
    batch, layers = graded(torch.logspace(0, -7, 24), 120, 200)
    return Client(batch, layers[0])


@pytest.fixture(scope="module")
def problem(client: Client) -> Problem:
    return client.problem


def gates_of(problem: Problem, basis: torch.Tensor | None = None, dtype: torch.dtype = torch.float64) -> Gates:
    basis = torch.eye(problem.batch_size, dtype=torch.float64) if basis is None else basis
    scale = problem.preactivations.square().mean().sqrt()
    gates = problem.preactivations[problem.factors.live] / scale @ basis
    return Gates(problem.live_rows.to(dtype), gates.to(dtype), basis.to(dtype))


def true_points(problem: Problem, q: torch.Tensor) -> torch.Tensor:
    """The unit p_i, signed as inputs are."""
    inverse = torch.linalg.inv(q.T)
    scale = inverse @ problem.factors.right[:, -1]
    return sphere.retract(inverse * scale.sign()[:, None])


def dense_value(gates: Gates, points: torch.Tensor, ridge: float) -> torch.Tensor:
    """f(p) as it is written, with M formed and inverted."""
    p = points @ gates.basis.T
    inactivity = torch.relu(-points @ gates.gates.T)
    weight = inactivity.square() * gates.rows.shape[0] / inactivity.square().sum(1, keepdim=True)
    m = torch.einsum("nk,ki,kj->nij", weight, gates.rows, gates.rows)
    m = m + ridge * torch.eye(gates.rows.shape[1], dtype=m.dtype)
    return 1 / torch.einsum("ni,nij,nj->n", p, torch.linalg.inv(m), p)


def test_value_and_gradient_are_those_of_the_formula(problem: Problem) -> None:
    basis = torch.linalg.qr(torch.randn(8, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    gates = gates_of(problem, basis)
    points = sphere.uniform(20, 5, torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    expected = dense_value(gates, points, 1e-3)
    (gradient,) = torch.autograd.grad(expected.log().sum(), points)
    with torch.no_grad():
        ours = Objective(gates, points.detach(), ridge=1e-3, iterations=60)
        ours.evaluate()
    found = sphere.tangent(points, ours.through_gates / ours.value - 2 * ours.through_basis)
    torch.testing.assert_close(ours.value[:, 0], expected.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(found, sphere.tangent(points, gradient), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close((ours.direction * (points @ basis.T)).sum(1), torch.ones(20, dtype=torch.float64))


def test_the_objective_is_least_at_the_inputs(client: Client, problem: Problem) -> None:
    q = client.true_directions(problem)
    points = true_points(problem, q)
    random = sphere.uniform(200, 8, torch.Generator().manual_seed(0), dtype=torch.float64)
    gates = gates_of(problem)
    at_inputs, elsewhere = (dense_value(gates, p, 1e-9) for p in (points, random))
    assert float(at_inputs.max()) < 1e-6 < 1e-3 < float(elsewhere.min())
    objective = Objective(gates, points, ridge=1e-9, iterations=200)
    objective.evaluate()
    overlap = (sphere.retract(objective.direction) * q).sum(1).abs()
    torch.testing.assert_close(overlap, torch.ones(8, dtype=torch.float64), atol=1e-6, rtol=0)


def test_descent_ends_at_inputs_and_refining_makes_them_exact(client: Client, problem: Problem) -> None:
    q = client.true_directions(problem)
    starts = sphere.uniform(64, 8, torch.Generator().manual_seed(0))
    ended = descend(gates_of(problem, dtype=torch.float32), starts, Effort(150, 8, 1e-4), 0.1)
    points, directions = ended.points.double(), ended.directions.double()
    kept = promising(problem, points, directions)
    assert len(kept) < 40  # most starts end at the same few inputs
    refined = refine(problem, points[kept], directions[kept])
    accepted = refined[acceptable(problem, points[kept], refined)]
    assert len(accepted) >= 4
    assert float((1 - (accepted @ q.T).abs().amax(1)).max()) < 1e-10


def test_starts_that_go_the_same_way_leave_and_nothing_is_lost_by_it(client: Client, problem: Problem) -> None:
    gates, effort = gates_of(problem, dtype=torch.float32), Effort(50, 4, 1e-4)
    starts = sphere.uniform(64, 8, torch.Generator().manual_seed(0))
    everyone, ended = _step_by_step(gates, starts.clone(), effort, 0.1), descend(gates, starts, effort, 0.1)
    assert everyone.steps == 64 * 50
    assert len(ended.points) <= 32
    assert 64 * 15 + len(ended.points) * 35 <= ended.steps < everyone.steps  # the first doubles leave after 15 steps
    found = []
    for each in (everyone, ended):
        points, directions = each.points.double(), each.directions.double()
        refined = refine(problem, points, directions)
        near = (refined[acceptable(problem, points, refined)] @ client.true_directions(problem).T).abs() > 1 - 1e-9
        found.append(near.any(0).tolist())
    assert found[0] == found[1]
    assert sum(found[0]) >= 6


def test_refining_survives_neurons_that_p_has_wrong(client: Client, problem: Problem) -> None:
    q = client.true_directions(problem)
    points = true_points(problem, q)
    noise = torch.randn(points.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    off = sphere.retract(points + 0.1 * sphere.retract(noise))
    inactive, wrong = (p @ problem.preactivations.T <= 0 for p in (points, off))
    assert int((inactive != wrong).sum()) > 8
    refined = refine(problem, off, q + 0.05 * noise)
    assert float((1 - (refined * q).sum(1).abs()).max()) < 1e-10


def test_mixtures_and_strangers_are_not_accepted(client: Client, problem: Problem) -> None:
    q = client.true_directions(problem)
    points = true_points(problem, q)
    assert bool(acceptable(problem, points, q).all())
    assert not bool(acceptable(problem, points, q.roll(1, 0)).any())
    mixed = sphere.retract(q + q.roll(1, 0))
    assert not bool(acceptable(problem, points, mixed).any())
    assert not bool(acceptable(problem, points, sphere.retract(torch.ones_like(q))).any())


def test_what_is_found_is_new_once(client: Client, problem: Problem) -> None:
    q = client.true_directions(problem)
    mixture = sphere.retract(q[:1] + 0.5 * q[1:2])
    new = new_directions(problem, q[:1], torch.cat([mixture, -q[:2], q[2:3], q[2:3]]))
    assert len(new) == 2
    assert sorted((new @ q.T).abs().argmax(1).tolist()) == [1, 2]


def test_deflation_leaves_just_the_other_inputs(client: Client, problem: Problem) -> None:
    q = client.true_directions(problem)
    inverse = torch.linalg.inv(q.T)
    basis = complement(q[:3])
    assert basis.shape == (8, 5)
    torch.testing.assert_close(inverse[3:] @ basis @ basis.T, inverse[3:])
    assert float((q[:3] @ basis).abs().max()) < 1e-12
    assert complement(q[:0]).shape == (8, 8)


@pytest.mark.parametrize(("b", "m"), [(30, 100), (40, 200), (16, 64), (60, 400), (40, 1024)])
def test_batches_far_beyond_the_paper_come_back(make_client: MakeClient, b: int, m: int) -> None:
    client = make_client(b, m, 200, depth=3)
    result = spearpp.invert(*client.seen)
    assert client.score(result).exact
    assert bool(result.certified.all())


def test_it_is_the_default_and_repeats_itself(client: Client) -> None:
    first, second = (spearpp.invert(*client.seen) for _ in range(2))
    named = spearpp.invert(*client.seen, search=Gated())
    assert torch.equal(first.inputs, second.inputs)
    assert torch.equal(first.inputs, named.inputs)
    assert first.stats.starts < 1000


def test_it_finds_what_the_paper_cannot(make_client: MakeClient) -> None:
    client = make_client(30, 150, 200, depth=3)
    paper = spearpp.invert(*client.seen, search=RiemannianAdam(starts=1024))
    ours = spearpp.invert(*client.seen, search=Gated(starts=1024))
    assert not client.score(paper).exact
    assert client.score(ours).exact


def test_starts_spread_over_devices(client: Client) -> None:
    one, two = (spearpp.invert(*client.seen, search=Gated(devices=where)) for where in ((), ("cpu", "cpu")))
    assert one.stats.starts == two.stats.starts
    assert client.score(two).exact
    torch.testing.assert_close(one.inputs, two.inputs)


class TestGraded:
    """Samples of very different strength: looked for strongest first, in the leading singular directions."""

    def rounds(self, problem: Problem) -> OneLayerRounds:
        options = RoundOptions(64, 64, (Effort(150, 12, 1e-5),), 0.1, torch.float32, (torch.device("cpu"),))
        return OneLayerRounds(
            problem, options, problem.factors.left.new_zeros(0, problem.batch_size), no_pairs(problem)
        )

    def test_an_even_spectrum_is_within_reach_at_once(self, problem: Problem) -> None:
        assert self.rounds(problem).reach == problem.batch_size

    def test_reach_follows_what_was_found(self, graded_client: Client) -> None:
        problem = graded_client.problem
        rounds, sizes = self.rounds(problem), problem.factors.singular_values
        reaches = []
        for found in range(problem.batch_size):
            rounds.found = torch.eye(problem.batch_size, dtype=torch.float64)[:found]
            reaches.append(rounds.reach)
            assert found < rounds.reach
            assert float(sizes[rounds.reach - 1]) >= 0.01 * float(sizes[found])
        assert reaches[0] < problem.batch_size == reaches[-1]
        rounds.found, rounds.reach_level = rounds.found[:0], 2
        assert rounds.reach == problem.batch_size

    def test_a_round_finds_strong_samples_and_no_other(self, graded_client: Client) -> None:
        problem = graded_client.problem
        columns = graded_client.columns_of_d
        q = sphere.retract(columns @ problem.factors.left)
        rounds = self.rounds(problem)
        for seed in range(3):
            reach = rounds.reach
            new = rounds.run(64, torch.Generator().manual_seed(seed)).directions
            cosine, which = (new @ q.T).abs().max(1)
            assert len(new) > 0
            assert float(cosine.min()) > 1 - 1e-6
            assert int(which.max()) < reach
            assert bool(within_reach(new, reach).all())

    def test_what_is_made_of_noise_comes_last(self, graded_client: Client) -> None:
        problem = graded_client.problem
        q = sphere.retract(graded_client.columns_of_d[:10] @ problem.factors.left)
        faint = torch.eye(problem.batch_size, dtype=torch.float64)[-3:]
        directions = torch.cat([faint, q])
        zeros = problem.tolerance.zeros(directions @ problem.factors.left.T, directions)
        zeros[:3] = True  # noise hides so much of them that they look sparsest
        pool = Pool(directions, zeros)
        assert sorted(init_filt(pool)[:3].tolist()) == [0, 1, 2]
        assert sorted(init_filt(pool, least_noisy_first(problem, pool))[:10].tolist()) == list(range(3, 13))


class TestHarderData:
    """Settings that the paper does not have: in each of them the whole batch is recovered and certified."""

    def check(self, inputs: torch.Tensor, seen: simulate.LayerGradient) -> Inversion:
        result = spearpp.invert(*seen, search=Gated(starts=4096))
        assert spearpp.score(result.inputs, inputs).exact
        assert bool(result.certified.all())
        return result

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("name", [name for name in CASES if "float16" not in name])
    def test_the_cases_of_the_benchmark(self, name: str, seed: int) -> None:
        self.check(*CASES[name](torch.Generator().manual_seed(seed)))

    def test_a_sum_of_clients_is_one_large_batch(self) -> None:
        generator = torch.Generator().manual_seed(0)
        model = simulate.mlp(60, [200, 100], 10, generator=generator)
        batches = [simulate.random_batch(6, features=60, generator=generator) for _ in range(4)]
        parts = [simulate.fedsgd(model, batch)[0] for batch in batches]
        weight_sum = torch.stack([part.grad_weight for part in parts]).sum(0)
        bias_sum = torch.stack([part.grad_bias for part in parts if part.grad_bias is not None]).sum(0)
        inputs = torch.cat([batch.inputs for batch in batches])
        result = self.check(inputs, parts[0]._replace(grad_weight=weight_sum, grad_bias=bias_sum))
        assert result.batch_size == 24

    @pytest.mark.parametrize("seed", [1000, 1001])
    def test_cifar10_at_a_batch_of_forty(self, make_client: MakeClient, cifar_path: Path, seed: int) -> None:
        batch = simulate.cifar10(40, path=cifar_path, generator=torch.Generator().manual_seed(seed))
        self.check(batch.inputs, make_client(m=200, depth=3, batch=batch, seed=seed).seen)


class TestNoise:
    """One rule for FedAvg, DP noise and half precision."""

    def photographs(self) -> tuple[Batch, torch.nn.Sequential, torch.Generator]:
        generator = torch.Generator().manual_seed(1)
        batch = simulate.photographs(12, generator=generator)
        return batch, simulate.mlp(3072, [200, 200, 200], 10, generator=generator), generator

    def test_fedavg(self) -> None:
        batch, model, generator = self.photographs()
        seen = simulate.linear_layers(model, simulate.FedAvg(3, 4, 0.01)(model, batch, generator))[0]
        result = spearpp.invert(*seen, search=Gated(starts=2048))
        score = spearpp.score(result.inputs, batch.inputs, normalisation=batch.normalisation)
        assert result.batch_size == 12
        assert score.exact
        assert bool(result.certified.all())
        assert result.evidence is not None
        assert result.evidence.scope == "one layer"
        assert 0 < result.evidence.numbers["drift"] < 0.03  # what the three local epochs moved, in units of the update

    def test_dp_noise_costs_what_the_true_masks_cost(self) -> None:
        batch, model, generator = self.photographs()
        seen = simulate.linear_layers(model, simulate.DPSGD(2.0, 1e-5)(model, batch, generator))[0]
        result = spearpp.invert(*seen, search=Gated(starts=1024))
        compare = partial(spearpp.score, truth=batch.inputs, normalisation=batch.normalisation, threshold=25)
        assert compare(result.inputs).exact
        assert not bool(result.certified.any())
        assert compare(result.inputs).mean_psnr > compare(with_true_masks(seen, batch)).mean_psnr - 0.5


def test_a_budget_of_time_is_kept_to_a_round(make_client: MakeClient) -> None:
    client = make_client(80, 100, 200)  # far too much for this layer
    result = spearpp.invert(*client.seen, search=Gated(seconds=0.05), batch_size=80)
    assert result.stats.starts <= 512
    assert not bool(result.certified.any())


def test_starts_are_a_bound(make_client: MakeClient) -> None:
    client = make_client(80, 100, 200)
    result = spearpp.invert(*client.seen, search=Gated(starts=200), batch_size=80)
    assert result.stats.starts == 200


def test_options_out_of_range_are_refused() -> None:
    for options in (
        {"seconds": 0.0},
        {"rate": 0.0},
        {"round_starts": 0},
        {"efforts": ()},
        {"starts": 0},
        {"devices": ("gpu",)},
    ):
        with pytest.raises(OptionError, match="Gated"):
            Gated(**options)


def local_training(
    seed: int, client: simulate.FedAvg, *, next_layer: bool, samples: int = 24
) -> tuple[Inversion, Score]:
    """What comes of tiles of photographs, many of them alike, after local training."""
    generator = torch.Generator().manual_seed(seed)
    batch = simulate.photographs(samples, generator=generator)
    model = simulate.mlp(3072, [200] * 3, 10, generator=generator)
    update = client(model, batch, generator)
    result = spearpp.invert(
        *update.layer("0.weight", "0.bias"),
        next_grad_weight=update.gradients["2.weight"] if next_layer else None,
        next_weight=update.weights["2.weight"] if next_layer else None,
        search=Gated(starts=2048),
    )
    return result, spearpp.score(result.inputs, batch.inputs, normalisation=batch.normalisation)


class TestSamplesAlikeUnderLocalTraining:
    @pytest.mark.parametrize("seed", [0, 3])
    def test_what_was_swapped_out_is_tried_again(self, seed: int) -> None:
        """All directions are in the pool after two rounds; one pass of swaps leaves wrong ones in the choice."""
        result, score = local_training(seed, simulate.FedAvg(1, 8, 0.01), next_layer=False)
        assert bool(result.certified.all())
        assert score.exact

    @pytest.mark.parametrize("seed", [1, 3])
    def test_a_next_layer_that_sees_the_first_mini_batch_alone_does_not_hide_the_others(self, seed: int) -> None:
        result, score = local_training(seed, simulate.FedAvg(1, 8, 0.01), next_layer=True)
        assert int(result.certified.sum()) >= 21  # some are told apart by a single neuron whose sign is not clear
        assert score.exact

    def test_a_mixture_that_drift_would_excuse_is_not_certified(self) -> None:
        """Samples 3 and 16 activate the same neurons but for eleven, which drift may have moved."""
        for seed in (3, 1005):
            result, score = local_training(seed, simulate.FedAvg(1, 6, 0.03), next_layer=False)
            near = torch.full((len(result.inputs),), 0.0)
            near[score.assignment[score.assignment >= 0]] = score.psnr[score.assignment >= 0].float()
            assert bool((near[result.certified] > 60).all())


def test_how_the_user_set_the_precision_of_products_is_left_alone() -> None:
    """torch has two ways to say it, and reading the old after setting the new is an error."""
    code = (
        "import torch; torch.backends.cuda.matmul.fp32_precision = 'tf32'\n"
        "from spearpp.linalg.tensor_cores import tensor_cores\n"
        "for allowed in (False, True):\n"
        "    with tensor_cores(allowed):\n"
        "        pass\n"
        "from spearpp import audit, simulate\n"  # the equations of a network use the setting too
        "net = torch.nn.Sequential(torch.nn.Linear(30, 60), torch.nn.GELU(), torch.nn.Linear(60, 10))\n"
        "audit(simulate.FedSGD()(net, simulate.random_batch(4, features=30)), net)\n"
        "assert torch.backends.cuda.matmul.fp32_precision == 'tf32'\n"
    )
    python("-c", code)
