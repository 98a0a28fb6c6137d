"""The true inputs are certified, and nothing else is."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, poisson
from torch import nn

import spearpp
from clients import weighted
from conftest import Client, MakeClient, batch_and_model, present
from spearpp import simulate
from spearpp.inversion.evidence import CHANCE_OF_LOST_CERTIFICATE, EXACT, chance_of_zeros, most_by_chance
from spearpp.inversion.evidence.one_layer import certify
from spearpp.inversion.evidence.patterns import widened
from spearpp.inversion.problem import Problem
from spearpp.inversion.result import Inversion
from spearpp.inversion.selection import Selection
from spearpp.model.following import Following
from spearpp.search import Gated, KernelSampling, RiemannianAdam, Search, Suggested
from spearpp.simulate import Batch, LayerGradient

LITTLE = Gated(starts=512)


def choice(problem: Problem, directions: torch.Tensor) -> Selection:
    zeros = problem.tolerance.zeros(directions @ problem.factors.left.T, directions)
    return Selection.of(problem, directions, zeros)


def noisy(seen: LayerGradient, level: float, seed: int = 0) -> LayerGradient:
    generator = torch.Generator().manual_seed(seed)
    assert seen.grad_bias is not None
    return seen._replace(
        grad_weight=seen.grad_weight + level * torch.randn(seen.grad_weight.shape, generator=generator),
        grad_bias=seen.grad_bias + level * torch.randn(seen.grad_bias.shape, generator=generator),
    )


@pytest.fixture(scope="module")
def client(make_client: MakeClient) -> Client:
    return make_client(6, 120, 60)


@pytest.mark.parametrize("b", [1, 2, 8, 20])
def test_the_truth_is_certified(make_client: MakeClient, b: int) -> None:
    for seed in range(4):
        client = make_client(b, 150, 80, seed=seed)
        problem = client.problem
        evidence = certify(problem, choice(problem, client.true_directions(problem)))
        assert bool(evidence.exact.all())
        assert evidence.numbers["residual"] < 1e-5
        assert float(evidence.share.sum()) == pytest.approx(1.0)
        assert int(evidence.details["moved"].sum()) == 0
        assert evidence.numbers["drift"] == 0


@given(place=st.integers(0, 5), other=st.integers(0, 5), weight=st.floats(-3, 3))
def test_a_mixture_of_two_is_not(client: Client, place: int, other: int, weight: float) -> None:
    problem = client.problem
    q = client.true_directions(problem).clone()
    if place == other or abs(weight) < 1e-3:
        return
    q[place] = torch.nn.functional.normalize(q[place] + weight * q[other], dim=0)
    assert not bool(certify(problem, choice(problem, q)).exact.any())


@given(place=st.integers(0, 5), size=st.floats(1e-4, 1.0), seed=st.integers(0, 1000))
def test_a_direction_that_is_off_takes_all_certificates_with_it(
    client: Client, place: int, size: float, seed: int
) -> None:
    problem = client.problem
    q = client.true_directions(problem).clone()
    turn = torch.randn(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    q[place] = torch.nn.functional.normalize(q[place] + size * turn, dim=0)
    assert not bool(certify(problem, choice(problem, q)).exact.any())


SEARCHES: list[Search] = [LITTLE, RiemannianAdam(starts=256), KernelSampling(starts=500)]


@pytest.mark.parametrize("search", SEARCHES, ids=["gated", "descent", "kernels"])
@pytest.mark.parametrize(("m", "n", "b"), [(40, 200, 6), (64, 100, 2), (100, 60, 1), (200, 300, 12)])
def test_pure_noise_is_never_certified(search: Search, m: int, n: int, b: int) -> None:
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        gradient, weight = (torch.randn(m, n + 1, generator=generator) for _ in range(2))
        weight = weight / n**0.5
        result = spearpp.invert(
            gradient[:, :n], gradient[:, n], weight[:, :n], weight[:, n], search=search, batch_size=b
        )
        assert not bool(result.certified.any())


@pytest.mark.parametrize("level", [1e-8, 1e-6, 1e-5, 1e-4, 1e-2])
def test_under_noise_what_is_certified_is_still_exact(make_client: MakeClient, level: float) -> None:
    certified = 0
    for seed in range(3):
        client = make_client(6, 200, 100, seed=seed)
        result = spearpp.invert(*noisy(client.seen, level), search=LITTLE, batch_size=6)
        certified += int(result.certified.sum())
        for x in result.inputs[result.certified]:
            truth = client.batch.inputs
            apart = torch.linalg.vector_norm(truth - x, dim=1) / torch.linalg.vector_norm(truth, dim=1)
            assert float(apart.min()) <= EXACT
    assert (certified == 18) if level <= 1e-8 else (certified == 0 or level <= 1e-5)


@pytest.mark.parametrize("weight", [1e-2, 1e-4, 1e-5, 1e-6])
def test_weak_samples_are_certified_only_if_exact(weight: float) -> None:
    """Two of six samples with a small loss: their columns of D drown in the rounding of the others."""
    certified = 0
    for seed in range(4):
        batch, model = batch_and_model(6, 60, [100, 100], seed=seed)
        seen = weighted(model, batch, torch.tensor([1, 1, 1, 1, weight, weight]))[0]
        result = spearpp.invert(*seen, search=LITTLE)
        score = spearpp.score(result.inputs, batch.inputs, normalisation=batch.normalisation)
        wrong = [
            i
            for i in torch.nonzero(result.certified)[:, 0].tolist()
            if i not in score.assignment[score.psnr > 60].tolist()
        ]
        assert not wrong
        certified += int(result.certified.sum())
    assert certified >= 4


def test_a_scaled_copy_does_not_pass_for_a_sample() -> None:
    """With zero bias x and 3 x activate the same neurons, and their directions mix without a trace in λ.

    The other samples do not depend on which mixture was found.
    """
    others = 0
    for seed in range(4):
        batch, model = batch_and_model(4, 60, [100, 100], seed=seed)
        inputs = batch.inputs.clone()
        inputs[1] = 3 * inputs[0]
        dict(model.named_parameters())["0.bias"].data.zero_()
        seen = simulate.fedsgd(model, Batch(inputs, batch.labels, batch.normalisation))[0]
        result = spearpp.invert(*seen, search=LITTLE)
        for certified in result.inputs[result.certified]:
            assert float(spearpp.score(certified[None], inputs).psnr.max()) > 90
        others += int(result.certified.sum())
    assert others >= 2 * 4


def test_a_bias_gradient_of_zero_gives_no_infinity(make_client: MakeClient) -> None:
    for seed in range(8):
        seen = make_client(1, 60, 30, seed=seed).seen
        result = spearpp.invert(seen.grad_weight, 0 * present(seen.grad_bias), seen.weight, seen.bias, search=LITTLE)
        assert bool(torch.isfinite(result.inputs).all())
        assert not bool(result.certified.any())


def test_a_pruned_neuron_does_not_spoil_the_certificate() -> None:
    batch, model = batch_and_model(6, 40, [100, 100])
    dict(model.named_parameters())["2.weight"].data[:, :3] = 0
    result = spearpp.invert(*simulate.fedsgd(model, batch)[0], search=LITTLE)
    assert result.score < 1.0
    assert bool(result.certified.all())
    assert spearpp.score(result.inputs, batch.inputs, normalisation=batch.normalisation).exact


def test_the_error_is_the_error(make_client: MakeClient) -> None:
    """The stated error, four standard deviations, against the real one, under planted noise."""
    for level in (1e-7, 1e-6):
        client = make_client(6, 200, 100, dtype=torch.float64)
        result = spearpp.invert(*noisy(client.seen, level), search=LITTLE)
        order = client.score(result).assignment
        truth = client.batch.inputs.double()
        deviation = (result.inputs[order] - truth).square().mean(1).sqrt() / truth.square().mean(1).sqrt()
        ratio = deviation / present(result.evidence).error[order]
        assert bool(((ratio > 0.05) & (ratio < 1.5)).all())


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU()], ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("seed", range(3))
def test_the_stated_error_covers_the_length_of_large_inputs(activation: nn.Module, seed: int) -> None:
    """x is scaled by the last entry of x̂. If x is large, noise of the bias gradient changes mostly its length."""
    torch.manual_seed(seed)
    layers = [nn.Linear(20, 100), activation, nn.Linear(100, 100), activation, nn.Linear(100, 10)]
    model = nn.Sequential(*layers).double()
    batch = simulate.random_batch(6, features=20, generator=torch.Generator().manual_seed(seed))
    batch = replace(batch, inputs=30 * batch.inputs.double())
    with torch.no_grad():
        next(model.parameters()).div_(30)
    first, *later = (noisy(seen, 1e-7, seed) for seen in simulate.fedsgd(model, batch))
    if isinstance(activation, nn.ReLU):
        result = spearpp.invert(*first, search=LITTLE)
    else:
        result = spearpp.invert(*first, following=Following.of_layers("gelu", later))
    assert bool(result.certified.all())
    inputs = result.inputs.double()
    errors = torch.cdist(inputs, batch.inputs).amin(1) / torch.linalg.vector_norm(inputs, dim=1)
    # The stated error is at least four standard deviations, so this is about a quarter.
    assert float((errors / present(result.evidence).error).square().mean().sqrt()) <= 0.4


@pytest.mark.parametrize("seed", range(2))
def test_the_stated_error_covers_the_errors_of_all_other_directions(seed: int) -> None:
    """With nearly as many samples as features, weak samples mix into strong ones."""
    batch, model = batch_and_model(38, 40, [300], seed=seed)
    weights = torch.ones(38)
    weights[:3] = 30.0
    seen = noisy(weighted(model, batch, weights)[0], 3e-8, seed)
    result = spearpp.invert(*seen, search=Suggested(batch.inputs, batch.labels), batch_size=38)
    assert bool(result.certified.all())
    distance = torch.cdist(result.inputs.double(), batch.inputs.double()).amin(1)
    assert bool((distance <= present(result.evidence).error * torch.linalg.vector_norm(result.inputs, dim=1)).all())


@given(st.integers(2, 12), st.integers(30, 200), st.data())
def test_chance_is_above_the_binomial_tail(b: int, m: int, data: st.DataObject) -> None:
    """Chernoff's bound against scipy's exact tail."""
    zeros = data.draw(st.integers(0, m))
    relative = data.draw(st.floats(1e-4, 1.0))
    bounds = torch.full((1, m), relative, dtype=torch.float64)
    bound = float(chance_of_zeros(torch.tensor([zeros]), bounds, torch.ones(m, dtype=torch.bool), b))
    under = float(torch.special.erf(torch.tensor(relative / 2**0.5, dtype=torch.float64)))
    assert bound >= binom.sf(zeros - (b - 1) - 1, m - (b - 1), under) * (1 - 1e-6)


def test_local_steps_do_not_cost_exact_inputs_their_certificate() -> None:
    """One neuron is moved farther than all others, and drift is what explains just that one."""
    drifted = 0
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        batch = simulate.random_batch(14, features=400, generator=generator)
        model = simulate.mlp(400, [150, 150], 10, generator=generator)
        seen = simulate.linear_layers(model, simulate.FedAvg(3, 7, 1e-2)(model, batch, generator))[0]
        result = spearpp.invert(*seen, search=LITTLE)
        assert result.evidence is not None
        assert result.evidence.scope == "one layer"
        assert bool(result.certified.all())
        drifted += result.evidence.numbers["drift"] > 0
    assert drifted >= 5


@given(st.floats(1e-6, 1e3), st.floats(1e-9, 1e-3), st.floats(1e-6, 1e6))
def test_the_neuron_that_drift_was_taken_from_is_within_it(z: float, slack: float, reach: float) -> None:
    z = z + slack
    drift = (z - slack) / reach
    tensors = (torch.tensor([[each]], dtype=torch.float64) for each in (slack, reach))
    one = widened(next(tensors), drift, next(tensors))
    assert z <= float(one) <= z * (1 + 1e-8)


@given(mean=st.floats(0, 300))
def test_what_may_be_hidden_is_the_poisson_quantile(mean: float) -> None:
    most = int(most_by_chance(torch.tensor([mean], dtype=torch.float64)))
    assert poisson.sf(most, mean) <= CHANCE_OF_LOST_CERTIFICATE * (1 + 1e-6)
    assert most == 0 or poisson.sf(most - 1, mean) >= CHANCE_OF_LOST_CERTIFICATE * (1 - 1e-6)


def test_evidence_has_one_row_for_each_input(client: Client) -> None:
    result = spearpp.invert(*client.seen)
    assert result.evidence is not None
    assert result.evidence.scope == "one layer"
    assert torch.equal(result.certified, result.evidence.exact)
    assert len(result.evidence.details["zeros"]) == 6
    assert float(result.evidence.details["chance"].max()) < 1e-9


def certified_wrongly(result: Inversion, batch: Batch) -> list[float]:
    """The PSNR of certified inputs that are none."""
    psnrs = [
        float(spearpp.score(x[None], batch.inputs, normalisation=batch.normalisation).psnr.max())
        for x in result.inputs[result.certified]
    ]
    return [each for each in psnrs if each < 60]


@pytest.mark.parametrize("seed", range(12))
def test_a_faint_copy_does_not_make_a_mixture_pass(seed: int) -> None:
    """Zeros that a strong and a faint sample share leave a plane; what tells in it lies below the faint one's noise."""
    chosen = random.Random(seed)  # noqa: S311
    width, faint = chosen.choice([60, 100, 200]), 10 ** chosen.uniform(-4, -1.5)
    generator = torch.Generator().manual_seed(seed)
    batch = simulate.random_batch(1 + chosen.randint(0, 4), features=64, classes=2, generator=generator)
    copy = chosen.choice([0.3, 0.5, 2.0, 3.0]) * batch.inputs[0]
    batch = replace(
        batch, inputs=torch.cat([batch.inputs, copy[None]]), labels=torch.cat([batch.labels, batch.labels[:1]])
    )
    model = simulate.mlp(64, [width] if seed % 2 else [width, width], 2, generator=generator)
    with torch.no_grad():
        dict(model.named_parameters())["0.bias"].mul_(chosen.choice([0.03, 0.1, 0.3]))
    weights = torch.ones(len(batch.inputs))
    weights[-1] = faint
    result = spearpp.invert(*weighted(model, batch, weights)[0], search=LITTLE)
    if result.batch_size == len(batch.inputs):  # else the copy is below the noise, and one with the sample
        assert certified_wrongly(result, batch) == []


@pytest.mark.parametrize("seed", range(8))
def test_two_samples_with_one_mask_are_not_certified_by_each_other(seed: int) -> None:
    """Every mixture of theirs solves the equations of both layers; only each speaks against the other."""
    generator = torch.Generator().manual_seed(seed)
    batch = simulate.random_batch(16, features=150, generator=generator)
    near = batch.inputs[:4] + 10 ** (-1 - 0.5 * (seed % 3)) * torch.randn(4, 150, generator=generator)
    inputs = torch.cat([batch.inputs, near, 1.5 * batch.inputs[4:8]])
    labels = torch.cat([batch.labels, (batch.labels[:8] + 1) % 10])  # or their gradients would be one
    batch = replace(batch, inputs=inputs, labels=labels)
    model = simulate.mlp(150, [80, 160], 10, generator=generator)
    first, following, _ = simulate.fedsgd(model, batch)
    result = spearpp.invert(*first, next_grad_weight=following.grad_weight, next_weight=following.weight, search=LITTLE)
    assert certified_wrongly(result, batch) == []


def test_weights_of_another_network_are_no_error() -> None:
    """Negated weights leave a direction without a single zero row at an inactive neuron, and drift."""
    generator = torch.Generator().manual_seed(0)
    model = simulate.mlp(30, [40, 40], 10, generator=generator)
    seen = simulate.fedsgd(model, simulate.random_batch(3, features=30, generator=generator))[0]
    result = spearpp.invert(
        seen.grad_weight, seen.grad_bias, -seen.weight, -present(seen.bias), search=Gated(starts=512)
    )
    assert not bool(result.certified.any())
