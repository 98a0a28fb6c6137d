"""Every search recovers simulated batches exactly, and reports what it cannot recover."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spearpp
from conftest import Client, MakeClient, batch_and_model
from spearpp import simulate
from spearpp.errors import DtypeError, NonFiniteError, RankError, ShapeError
from spearpp.inversion.result import Progress
from spearpp.search import KernelSampling, ProjectedGradient, RiemannianAdam, Search
from spearpp.search.losses import LogCosh, NegativeL4

QUICK = RiemannianAdam(starts=4096, chunk=256)

EVERY_SEARCH: list[tuple[str, Search, int]] = [
    ("l1", RiemannianAdam(starts=8192), 10),
    ("logcosh, sampled", RiemannianAdam(loss=LogCosh(1 / 300), starts=8192), 10),
    ("l4, sampled", RiemannianAdam(loss=NegativeL4(), starts=8192), 5),
    ("projected gradient", ProjectedGradient(starts=8192), 8),
    ("projected gradient, logcosh", ProjectedGradient(loss=LogCosh(1 / 300), starts=8192), 8),
    ("kernel sampling", KernelSampling(starts=50_000), 8),
]


@pytest.mark.parametrize(("search", "b"), [each[1:] for each in EVERY_SEARCH], ids=[each[0] for each in EVERY_SEARCH])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_planted_batch_comes_back_exactly(make_client: MakeClient, search: Search, b: int, seed: int) -> None:
    client = make_client(b, 200, 100, seed=seed)
    result = spearpp.invert(*client.seen, search=search)
    score = client.score(result)
    assert result.batch_size == b
    assert result.score == 1.0
    assert bool(result.certified.all())
    assert score.exact
    assert result.directions.shape == (b, b)
    assert result.stats.starts <= search.starts
    assert result.stats.found == b
    assert set(result.stats.seconds) == {"decompose", "search", "pool", "filter"}
    assert "whole batch" in result.stats.stopped


@pytest.mark.parametrize("search", [RiemannianAdam(starts=3), KernelSampling(starts=300)], ids=["descent", "kernels"])
def test_too_few_starts_give_a_partial_result_that_is_scored_and_not_certified(
    make_client: MakeClient, search: Search
) -> None:
    client = make_client(10, 200, 100)
    result = spearpp.invert(*client.seen, search=search)
    assert 0 < result.stats.found < 10
    assert result.inputs.shape == (10, 100)
    assert result.directions.shape == (result.stats.found, 10)
    assert not bool(result.certified.any())
    assert 0 < result.score < 1
    assert not client.score(result).exact
    assert f"candidates for {result.stats.found} of 10 samples" in result.stats.stopped
    assert bool(torch.isfinite(result.inputs).all())


def test_nothing_found_is_a_result(make_client: MakeClient) -> None:
    client = make_client(12, 100, 60)
    result = spearpp.invert(*client.seen, search=RiemannianAdam(starts=1, steps=1))
    assert result.stats.found == 0
    assert not bool(result.certified.any())
    assert result.directions.shape == (0, 12)


def test_whatever_the_shape_what_is_certified_is_true() -> None:
    certified = 0
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        b, m, n = (int(torch.randint(low, high, (), generator=generator)) for low, high in ((1, 6), (45, 91), (8, 61)))
        batch = simulate.random_batch(b, features=n, generator=generator)
        model = simulate.mlp(n, [m, m], 10, generator=generator)
        result = spearpp.invert(*simulate.fedsgd(model, batch)[0], search=KernelSampling(starts=3000))
        if bool(result.certified.all()):
            certified += 1
            assert spearpp.score(result.inputs, batch.inputs, normalisation=batch.normalisation).exact
    assert certified >= 30


@pytest.fixture(scope="module")
def client(make_client: MakeClient) -> Client:
    return make_client(6, 100, 60)


class TestLaws:
    """What must not change the result."""

    def test_permuting_the_batch_permutes_the_result(self, client: Client) -> None:
        batch = client.batch
        order = torch.randperm(6, generator=torch.Generator().manual_seed(3))
        shuffled = batch.pick(order)
        model = simulate.mlp(60, [100, 100], 10, generator=torch.Generator().manual_seed(9))
        first, second = (spearpp.invert(*simulate.fedsgd(model, each)[0], search=QUICK) for each in (batch, shuffled))
        assert first.score == second.score == 1.0
        assert spearpp.score(second.inputs, first.inputs).exact

    @pytest.mark.parametrize("factor", [1e-6, 0.3, 1e4])
    def test_scaling_the_loss_changes_nothing(self, client: Client, factor: float) -> None:
        grad_weight, grad_bias, weight, bias = client.seen
        assert grad_bias is not None
        scaled = spearpp.invert(grad_weight * factor, grad_bias * factor, weight, bias, search=QUICK)
        assert scaled.score == 1.0
        assert client.score(scaled).exact

    def test_permuting_the_neurons_changes_nothing(self, client: Client) -> None:
        order = torch.randperm(100, generator=torch.Generator().manual_seed(3))
        grad_weight, grad_bias, weight, bias = client.seen
        assert grad_bias is not None
        assert bias is not None
        result = spearpp.invert(grad_weight[order], grad_bias[order], weight[order], bias[order], search=QUICK)
        assert client.score(result).exact

    def test_one_seed_gives_one_result(self, client: Client) -> None:
        first, second = (
            spearpp.invert(*client.seen, search=QUICK, generator=torch.Generator().manual_seed(5)) for _ in range(2)
        )
        assert torch.equal(first.inputs, second.inputs)
        assert first.stats.starts == second.stats.starts

    def test_without_a_generator_it_is_repeatable_too(self, client: Client) -> None:
        torch.manual_seed(1)
        first = spearpp.invert(*client.seen, search=QUICK)
        torch.manual_seed(2)
        assert torch.equal(first.inputs, spearpp.invert(*client.seen, search=QUICK).inputs)

    def test_chunks_change_nothing_but_memory(self, client: Client) -> None:
        for chunk in (7, 100, 4096):
            result = spearpp.invert(*client.seen, search=RiemannianAdam(starts=4096, chunk=chunk))
            assert client.score(result).exact

    def test_the_inputs_are_left_alone(self, client: Client) -> None:
        before = [None if t is None else t.clone() for t in client.seen]
        spearpp.invert(*client.seen, search=QUICK)
        for old, new in zip(before, client.seen, strict=True):
            assert old is not None
            assert new is not None
            assert torch.equal(old, new)


@pytest.mark.parametrize(("dtype", "least"), [(torch.float64, 200.0), (torch.float32, 110.0)])
def test_precision_follows_the_gradients_dtype(make_client: MakeClient, dtype: torch.dtype, least: float) -> None:
    client = make_client(8, 120, 60, dtype=dtype)
    result = spearpp.invert(*client.seen, search=QUICK)
    assert result.inputs.dtype == dtype
    assert float(client.score(result).psnr.min()) > least


@pytest.mark.parametrize(("dtype", "least"), [(torch.float16, 45.0), (torch.bfloat16, 30.0)])
def test_half_precision_wires_still_leak(make_client: MakeClient, dtype: torch.dtype, least: float) -> None:
    client = make_client(6, 200, 100)
    grad_weight, grad_bias, weight, bias = client.seen
    assert grad_bias is not None
    scale = 0.1 / float(grad_weight.abs().max())
    result = spearpp.invert(
        (grad_weight * scale).to(dtype), (grad_bias * scale).to(dtype), weight, bias, search=RiemannianAdam(starts=4096)
    )
    assert result.batch_size == 6
    assert result.inputs.dtype == torch.float32
    assert float(client.score(result).psnr.min()) > least


def test_rounding_of_the_decomposition_is_not_read_as_a_sample_in_float64() -> None:
    batch = simulate.random_batch(20, features=400, generator=torch.Generator().manual_seed(7))
    inputs = batch.inputs.double()
    inputs[:, :200] = 0  # columns of the gradient that are exactly zero
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(400, 100), nn.ReLU(), nn.Linear(100, 10)).double()
    result = spearpp.invert(*simulate.fedsgd(model, replace(batch, inputs=inputs))[0])
    assert result.batch_size == 20
    assert bool(result.certified.all())


def test_an_inner_layer_gives_its_features() -> None:
    batch, model = batch_and_model(6, 40, [80, 120])
    result = spearpp.invert(*simulate.fedsgd(model, batch)[1], search=QUICK)
    features = model[:2](batch.inputs).detach()
    assert result.score == 1.0
    assert spearpp.score(result.inputs, features).exact


class TestEdges:
    """Every awkward case has an outcome."""

    def test_one_sample(self, make_client: MakeClient) -> None:
        client = make_client(1, 60, 30)
        result = spearpp.invert(*client.seen, search=QUICK)
        assert client.score(result).exact
        assert bool(result.certified.all())
        assert result.stats.starts == 0

    def test_without_a_bias_inputs_come_back_up_to_scale(self, make_client: MakeClient) -> None:
        client = make_client(6, 120, 60, bias=False)
        result = spearpp.invert(*client.seen, search=QUICK)
        assert not result.scale_known
        assert "up to scale" in repr(result)
        assert result.score == 1.0
        truth = torch.nn.functional.normalize(client.batch.inputs)
        assert spearpp.score(result.inputs, truth).exact
        torch.testing.assert_close(result.inputs.norm(dim=1), torch.ones(6))

    def test_one_sample_without_a_bias(self, make_client: MakeClient) -> None:
        client = make_client(1, 60, 30, bias=False)
        result = spearpp.invert(*client.seen, search=QUICK)
        assert spearpp.score(result.inputs, torch.nn.functional.normalize(client.batch.inputs)).exact

    def test_dead_neurons_do_not_matter(self) -> None:
        batch, model = batch_and_model(6, 40, [150, 60])
        dict(model.named_parameters())["0.bias"].data[:50] = -100.0
        result = spearpp.invert(*simulate.fedsgd(model, batch)[0], search=QUICK)
        assert result.score == 1.0
        assert spearpp.score(result.inputs, batch.inputs, normalisation=batch.normalisation).exact

    def test_a_sample_that_fires_nothing_is_not_there(self) -> None:
        batch, model = batch_and_model(6, 40, [100, 100])
        dict(model.named_parameters())["0.weight"].data[:, 0] = -10.0  # a direction that silences every neuron
        inputs = batch.inputs.clone()
        inputs[:, 0] = torch.tensor([0.0, 0.01, -0.01, 0.02, 0.0, 50.0])
        seen = simulate.fedsgd(model, simulate.Batch(inputs, batch.labels, batch.normalisation))[0]
        result = spearpp.invert(*seen, search=QUICK)
        assert result.batch_size == 5
        assert bool(result.certified.all())
        score = spearpp.score(result.inputs, inputs)
        assert score.recovered == 5
        assert int(score.assignment[5]) == -1

    def test_a_batch_that_fires_nothing_gives_nothing(self) -> None:
        result = spearpp.invert(*(torch.zeros(s) for s in [(9, 5), (9,), (9, 5), (9,)]), search=QUICK)
        assert result.batch_size == 0
        assert result.inputs.shape == (0, 5)
        assert result.certified.shape == (0,)
        assert "gradient is zero" in result.stats.stopped

    def test_repeated_samples_merge(self) -> None:
        batch, model = batch_and_model(6, 40, [100, 100])
        inputs = batch.inputs[[0, 1, 2, 3, 4, 4]]
        seen = simulate.fedsgd(model, simulate.Batch(inputs, batch.labels, batch.normalisation))[0]
        result = spearpp.invert(*seen, search=QUICK)
        assert result.batch_size == 5
        assert bool(result.certified.all())
        assert spearpp.score(result.inputs, inputs).exact

    @pytest.mark.parametrize(("b", "m", "n"), [(50, 40, 60), (40, 40, 60), (40, 60, 20)])
    def test_more_samples_than_the_layer_holds_is_said(self, make_client: MakeClient, b: int, m: int, n: int) -> None:
        with pytest.raises(RankError, match="fills the"):
            spearpp.invert(*make_client(b, m, n).seen, search=QUICK)

    def test_a_tiny_layer_is_inverted_but_never_certified(self, make_client: MakeClient) -> None:
        client = make_client(2, 24, 20)
        result = spearpp.invert(*client.seen, search=KernelSampling(starts=2000))
        assert result.score == 1.0
        assert client.score(result).exact
        assert not bool(result.certified.any())

    def test_the_batch_size_can_be_given(self, make_client: MakeClient) -> None:
        client = make_client(6, 100, 60)
        assert client.score(spearpp.invert(*client.seen, search=QUICK, batch_size=6)).exact

    def test_a_clear_rank_is_used_although_the_batch_has_more_samples(self, make_client: MakeClient) -> None:
        """Two of eight samples may repeat others or activate no neuron."""
        client = make_client(6, 100, 60)
        result = spearpp.invert(*client.seen, search=QUICK, batch_size=8)
        assert result.batch_size == 6
        assert client.score(result).exact


GOOD: dict[str, Any] = {
    "grad_weight": torch.randn(5, 3, generator=torch.Generator().manual_seed(0)),
    "grad_bias": torch.ones(5),
    "weight": torch.ones(5, 3),
    "bias": torch.ones(5),
}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"grad_weight": torch.full((5, 3), torch.nan)}, NonFiniteError, "grad_weight holds 15 NaN and 0 Inf"),
        ({"bias": torch.tensor([1.0, torch.inf, 0, 0, 0])}, NonFiniteError, "bias holds 0 NaN and 1 Inf"),
        ({"grad_weight": torch.ones(3, 5)}, ShapeError, "looks transposed"),
        ({"grad_weight": torch.ones(5, 4)}, ShapeError, r"\(5, 4\), weight \(5, 3\)"),
        ({"weight": torch.ones(5)}, ShapeError, r"weight has shape \(5,\)"),
        ({"weight": torch.ones(0, 3), "grad_weight": torch.ones(0, 3)}, ShapeError, r"\(0, 3\)"),
        ({"grad_bias": torch.ones(4)}, ShapeError, r"grad_bias has shape \(4,\)"),
        ({"bias": torch.ones(5, 1)}, ShapeError, r"bias has shape \(5, 1\)"),
        ({"grad_bias": None}, ShapeError, "grad_bias is None but bias is not"),
        ({"bias": None}, ShapeError, "bias is None but grad_bias is not"),
        ({"weight": torch.ones(5, 3, dtype=torch.int64)}, DtypeError, "weight has dtype torch.int64"),
        ({"weight": torch.ones(5, 3, dtype=torch.complex64)}, DtypeError, "complex64"),
        ({"weight": torch.ones(5, 3).to_sparse()}, DtypeError, "torch.sparse_coo"),
        ({"grad_bias": torch.ones(5, device="meta")}, DtypeError, "on meta"),
    ],
)
def test_what_is_not_a_layers_gradient_is_refused_in_one_sentence(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        spearpp.invert(**(GOOD | change), search=QUICK)
    assert isinstance(caught.value, spearpp.SpearError)
    assert "\n" not in str(caught.value)


def test_progress_is_told_chunk_by_chunk(make_client: MakeClient) -> None:
    told: list[Progress] = []
    client = make_client(8, 100, 60)
    result = spearpp.invert(*client.seen, search=RiemannianAdam(starts=4096, chunk=8), progress=told.append)
    assert [each.starts for each in told] == [8 * (i + 1) for i in range(len(told))]
    assert all(each.batch_size == 8 and each.total_starts == 4096 for each in told)
    found = [each.found for each in told]
    assert found == sorted(found)
    assert found[-1] == 8
    assert told[0].score is None
    assert told[-1].score == result.score == 1.0


def test_the_library_prints_nothing(make_client: MakeClient, capfd: pytest.CaptureFixture[str]) -> None:
    spearpp.invert(*make_client(4, 60, 30).seen, search=QUICK)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("data", ["photographs", "digits", "breast_cancer"])
def test_real_data_leaks_too(make_client: MakeClient, data: str) -> None:
    load: Callable[..., simulate.Batch] = getattr(simulate, data)
    batch = load(8, generator=torch.Generator().manual_seed(3))
    client = make_client(m=200, depth=3, batch=batch, seed=3)
    result = spearpp.invert(*client.seen, search=RiemannianAdam(starts=8192))
    assert bool(result.certified.all())
    assert client.score(result).exact


@pytest.mark.parametrize("seed", [1000, 1001])
def test_cifar10_comes_back_at_the_papers_smallest_setting(
    make_client: MakeClient, cifar_path: Path, seed: int
) -> None:
    batch = simulate.cifar10(20, path=cifar_path, generator=torch.Generator().manual_seed(seed))
    client = make_client(m=200, depth=3, batch=batch, seed=seed)
    result = spearpp.invert(*client.seen, search=RiemannianAdam(starts=16_384))
    assert bool(result.certified.all())
    assert client.score(result).exact
