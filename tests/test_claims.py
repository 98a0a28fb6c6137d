"""Claims of an audit: they follow from the replay of each input, its weight and the number of samples."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import spearpp
from clients import gradient_of
from conftest import present
from spearpp import ClientUpdate, simulate
from spearpp.auditing.claims import ClaimKind, Known, one_sample
from spearpp.auditing.replay import replay
from spearpp.inversion.evidence import chance_in_bits
from spearpp.simulate import Batch

CLIENT = torch.Generator().manual_seed(5)


def mlp(*widths: int, seed: int = 1) -> nn.Sequential:
    features, *hidden, classes = widths
    return simulate.mlp(features, hidden, classes, generator=torch.Generator().manual_seed(seed))


def batch_of(samples: int, features: int = 60, classes: int = 10, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return simulate.random_batch(samples, features=features, classes=classes, generator=generator)


def update_of(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, *, reduction: str = "mean") -> ClientUpdate:
    return gradient_of(nn.functional.cross_entropy(model(inputs), labels, reduction=reduction), model)


def kinds(result: spearpp.AuditResult) -> list[ClaimKind]:
    return [each.kind for each in result.layers[0].claims]


def distance(x: torch.Tensor, inputs: torch.Tensor) -> float:
    apart = torch.linalg.vector_norm(inputs.double() - x.double(), dim=1)
    return float((apart / torch.linalg.vector_norm(inputs.double(), dim=1)).min())


class TestCounting:
    def test_a_known_number_of_samples_makes_inputs_single_samples(self) -> None:
        model, batch = mlp(60, 120, 120, 10), batch_of(8)
        told = spearpp.audit(simulate.FedSGD()(model, batch), model, batch_size=8)
        untold = spearpp.audit(simulate.FedSGD()(model, batch), model)
        assert kinds(told) == [ClaimKind.ONE] * 8
        assert kinds(untold) == [ClaimKind.ONE_OR_MEAN] * 8
        for each in untold.layers[0].claims:
            assert each.samples == pytest.approx(1, abs=1e-3)
            assert "implies 8 samples" in each.why
            assert 0 < each.apart < 0.2

    def test_a_repeated_sample_counts_twice(self) -> None:
        model, batch = mlp(60, 120, 120, 10), batch_of(8)
        inputs, labels = (torch.cat([each, each[:2]]) for each in (batch.inputs, batch.labels))
        for told in (10, None):
            result = spearpp.audit(update_of(model, inputs, labels), model, batch_size=told)
            several = [each for each in result.layers[0].claims if each.kind is ClaimKind.SEVERAL]
            assert [each.samples for each in several] == pytest.approx([2, 2], abs=1e-2)
            assert result.layers[0].exact == 6
            assert result.fitting == 2
            assert any("several samples" in caveat for caveat in result.caveats)

    def test_samples_that_are_one_to_the_layer_are_never_called_one(self) -> None:
        """One image at two contrasts, under one label: only their weighted mean is in the gradient."""
        model, batch = mlp(60, 200, 10), batch_of(6)
        inputs = torch.cat([batch.inputs, 1.1 * batch.inputs[:2]])
        labels = torch.cat([batch.labels, batch.labels[:2]])
        for told in (8, None):
            result = spearpp.audit(update_of(model, inputs, labels), model, batch_size=told, budget=4)
            found = result.layers[0]
            for x, claim in zip(present(found.inversion).inputs, found.claims, strict=True):
                if claim.kind is ClaimKind.ONE:
                    assert distance(x, inputs) <= max(3 * claim.error, 1e-6)

    @pytest.mark.parametrize("told", [12, None])
    def test_pairs_throughout_the_batch_are_not_called_one(self, told: int | None) -> None:
        """All weights are those of two samples, so only the number of samples gives the pairs away."""
        model, batch = mlp(60, 150, 10), batch_of(6)
        inputs = torch.cat([batch.inputs, batch.inputs * (1 + 1e-4)])
        result = spearpp.audit(update_of(model, inputs, batch.labels.repeat(2)), model, batch_size=told)
        assert ClaimKind.ONE not in kinds(result)
        if told:
            assert ClaimKind.SEVERAL in kinds(result)

    def test_a_sum_of_losses_weighs_as_it_does(self) -> None:
        model, batch = mlp(60, 120, 120, 10), batch_of(8)
        update = update_of(model, batch.inputs, batch.labels, reduction="sum")
        result = spearpp.audit(update, model, batch_size=8)
        assert kinds(result) == [ClaimKind.ONE] * 8

    def test_the_mean_of_several_people_is_no_leak(self) -> None:
        """A column of 1e5 decides every pattern and saturates the softmax: a batch looks like one sample, its mean."""
        generator = torch.Generator().manual_seed(0)
        inputs = torch.cat(
            [torch.rand(8, 20, generator=generator), 1e5 * (1 + torch.rand(8, 1, generator=generator))], 1
        )
        model = mlp(21, 100, 2)
        labels = 1 - model(inputs).argmax(1)  # wrong throughout, so that every sample has a signal
        for told in (8, None):
            result = spearpp.audit(update_of(model, inputs, labels), model, batch_size=told)
            assert result.verdict != "LEAKS"
            assert result.fitting == 1
            assert "no input was proved to be a training sample" in result.summary

    @given(st.integers(2, 20), st.integers(1, 5))
    def test_one_sample_contributes_as_much_as_most_inputs(self, samples: int, merged: int) -> None:
        found = torch.tensor([1 / 40] * (samples + merged) + [2 / 40] * merged, dtype=torch.float64)
        told = one_sample(found, rank=len(found), known=Known(40))
        assert told.contribution == pytest.approx(1 / 40)
        assert one_sample(found, rank=len(found), known=Known(None)).implied == 40

    def test_contributions_that_contradict_the_rank_tell_nothing(self) -> None:
        found = torch.full((7,), 1 / 6, dtype=torch.float64)
        assert one_sample(found, rank=7, known=Known(None)).contribution is None
        assert one_sample(torch.rand(9, generator=CLIENT).double(), rank=9, known=Known(None)).contribution is None


class TestErrors:
    @pytest.mark.parametrize("classes", [2, 3, 10])
    def test_the_stated_error_bounds_the_true_one(self, classes: int) -> None:
        for seed in range(4):
            batch = batch_of(6, classes=classes, seed=seed)
            model = mlp(60, 150, 60, classes, seed=seed)
            result = spearpp.audit(simulate.FedSGD()(model, batch), model, batch_size=6)
            found = result.layers[0]
            assert [each.kind for each in found.claims] == [ClaimKind.ONE] * 6
            for x, claim in zip(present(found.inversion).inputs, found.claims, strict=True):
                assert distance(x, batch.inputs) <= 3 * claim.error
                assert claim.error < 1e-3

    def test_faint_samples_do_not_take_the_strong_ones_with_them(self) -> None:
        """Two samples of 1e-7 of the others' weight lie below rounding; the others are explained one by one."""
        model, batch = mlp(60, 120, 60, 10), batch_of(10)
        importance = torch.cat([torch.ones(8), torch.full((2,), 1e-7)])
        losses = nn.functional.cross_entropy(model(batch.inputs), batch.labels, reduction="none")
        result = spearpp.audit(gradient_of((losses * importance).mean(), model), model)
        assert len(result.inputs) >= 8
        for x in result.inputs:
            assert distance(x, batch.inputs) < 1e-2


class TestOtherLosses:
    def test_several_labels_at_once(self) -> None:
        model, batch = mlp(60, 150, 80, 10), batch_of(6)
        targets = (torch.rand(6, 10, generator=torch.Generator().manual_seed(3)) < 0.3).float()
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch.inputs), targets)
        update = gradient_of(loss, model)
        assert kinds(spearpp.audit(update, model, batch_size=6)) == [ClaimKind.ONE] * 6
        for each in spearpp.audit(update, model).layers[0].claims:
            assert each.kind is ClaimKind.ONE_OR_MEAN

    def test_a_loss_that_is_not_known_claims_less(self) -> None:
        model, batch = mlp(60, 150, 80, 1), batch_of(6)
        loss = nn.functional.mse_loss(
            model(batch.inputs), torch.randn(6, 1, generator=torch.Generator().manual_seed(3))
        )
        update = gradient_of(loss, model)
        untold, told = (spearpp.audit(update, model, batch_size=size) for size in (None, 6))
        assert kinds(untold) == [ClaimKind.ONE_OR_MEAN] * 6
        assert all(math.isinf(each.apart) for each in untold.layers[0].claims)
        assert "weighted mean" in untold.summary
        assert kinds(told) == [ClaimKind.ONE] * 6

    def test_one_input_of_an_unknown_loss_is_no_leak(self) -> None:
        model = mlp(20, 100, 1)
        inputs = 285 + 0.1 * torch.randn(5, 20, generator=torch.Generator().manual_seed(1))
        targets = torch.randn(5, 1, generator=torch.Generator().manual_seed(2))
        loss = nn.functional.mse_loss(model(inputs), targets)
        update = gradient_of(loss, model)
        result = spearpp.audit(update, model)
        assert result.verdict == "NOT_FOUND"
        assert result.fitting == 1
        assert kinds(spearpp.audit(update, model, batch_size=5)) == [ClaimKind.FITS]

    def test_a_client_with_one_sample_leaks_it_whatever_the_loss(self) -> None:
        model, batch = mlp(20, 100, 1), batch_of(1, features=20)
        loss = nn.functional.mse_loss(model(batch.inputs), torch.ones(1, 1))
        update = gradient_of(loss, model)
        result = spearpp.audit(update, model, batch_size=1)
        assert kinds(result) == [ClaimKind.ONE]
        assert distance(result.inputs[0], batch.inputs) < 1e-6


def flattened(gradient: torch.Tensor) -> torch.Tensor:
    """Return the matrix with the same singular vectors and equal singular values, as Muon approximates it."""
    u, s, v = torch.linalg.svd(gradient, full_matrices=False)
    return u @ torch.diag((s > 1e-5 * s[0]).to(s)) @ v


SEPARATELY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "each tensor has norm 1": lambda each: each / torch.linalg.vector_norm(each),
    "biases have twice the rate": lambda each: each if each.ndim > 1 else 2 * each,
    "rows have mean zero": lambda each: each - each.mean(1, keepdim=True) if each.ndim > 1 else each,
    "matrices are orthogonal": lambda each: flattened(each) if each.ndim > 1 else each,
}
"""What some optimisers do to each tensor of a gradient."""


class TestLength:
    """The gradients of weights and biases together give the length of an input."""

    @pytest.mark.parametrize("change", SEPARATELY)
    @pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU])
    @pytest.mark.parametrize(("samples", "zero"), [(1, False), (1, True), (4, False), (4, True)])
    @pytest.mark.parametrize("given_model", [True, False])
    def test_tensors_that_are_scaled_separately_give_no_wrong_input(
        self, change: str, activation: type[nn.Module], samples: int, zero: bool, given_model: bool
    ) -> None:
        plain, batch = mlp(40, 80, 80, 10), batch_of(samples, features=40)
        model = nn.Sequential(plain[0], activation(), plain[2], activation(), plain[4])
        if zero:
            for each in model.parameters():
                nn.init.zeros_(each) if each.ndim == 1 else None
        sent = update_of(model, batch.inputs, batch.labels)
        changed = {name: SEPARATELY[change](each) for name, each in sent.gradients.items()}
        update = ClientUpdate.from_gradients(model, changed)
        result = spearpp.audit(update, model if given_model else None, batch_size=samples, budget=1)
        if result.layers[0].inversion is None:
            return
        for x, claim in zip(result.layers[0].inversion.inputs, result.layers[0].claims, strict=True):
            assert not claim.recovered or distance(x, batch.inputs) <= max(3 * claim.error, 1e-6)

    @pytest.mark.parametrize("samples", [1, 4])
    def test_biases_of_zero_hide_nothing(self, samples: int) -> None:
        model, batch = mlp(40, 80, 80, 10), batch_of(samples, features=40)
        for each in model.parameters():
            nn.init.zeros_(each) if each.ndim == 1 else None
        update = update_of(model, batch.inputs, batch.labels)
        for told in (model, None):
            assert kinds(spearpp.audit(update, told, batch_size=samples)) == [ClaimKind.ONE] * samples

    def test_another_loss_does_not_contradict_a_single_sample(self) -> None:
        """The signal of the sample is a combination of the derivatives of the outputs, whatever the loss is."""
        plain, batch = mlp(40, 80, 80, 10), batch_of(1, features=40)
        model = nn.Sequential(plain[0], nn.GELU(), plain[2], nn.GELU(), plain[4])
        loss = nn.functional.mse_loss(model(batch.inputs), torch.ones(1, 10))
        result = spearpp.audit(gradient_of(loss, model), model, batch_size=1)
        assert kinds(result) == [ClaimKind.ONE]
        assert distance(result.inputs[0], batch.inputs) < 1e-6

    def test_with_an_unknown_loss_the_model_alone_contradicts_a_wrong_length(self) -> None:
        plain, batch = mlp(40, 80, 80, 10), batch_of(1, features=40)
        model = nn.Sequential(plain[0], nn.GELU(), plain[2], nn.GELU(), plain[4])
        honest = update_of(model, batch.inputs, batch.labels)
        doubled = {name: SEPARATELY["biases have twice the rate"](each) for name, each in honest.gradients.items()}
        changed = ClientUpdate.from_gradients(model, doubled)
        assert kinds(spearpp.audit(honest, model, batch_size=1, loss="unknown")) == [ClaimKind.ONE]
        assert kinds(spearpp.audit(changed, model, batch_size=1, loss="unknown")) == [ClaimKind.FITS]


@pytest.mark.parametrize("records", [2, 3])
def test_means_of_weighted_records_are_not_called_one_sample(records: int) -> None:
    """Each person has several nearly equal records, and each record has the weight of one by their number."""
    generator = torch.Generator().manual_seed(2)
    people, labels = torch.randn(5, 40, generator=generator), torch.randint(10, (5,), generator=generator)
    inputs = people.repeat(records, 1)
    inputs = inputs + 1e-3 * torch.randn(inputs.shape, generator=generator)
    plain = mlp(40, 80, 80, 10)
    model = nn.Sequential(plain[0], nn.GELU(), plain[2], nn.GELU(), plain[4])
    losses = nn.functional.cross_entropy(model(inputs), labels.repeat(records), reduction="none") / records
    result = spearpp.audit(gradient_of(losses.mean(), model), model, batch_size=5 * records, budget=5)
    assert result.layers[0].claims
    assert ClaimKind.ONE not in kinds(result)


def test_dropout_does_not_hide_inputs() -> None:
    plain = mlp(60, 200, 60, 10)
    model = nn.Sequential(plain[0], nn.ReLU(), nn.Dropout(0.2), plain[2], nn.ReLU(), plain[4]).train()
    batch = batch_of(12)
    torch.manual_seed(0)
    update = update_of(model, batch.inputs, batch.labels)
    result = spearpp.audit(update, model)
    assert result.verdict == "LEAKS"
    assert result.layers[0].layer.dropout
    assert len(result.inputs) == 12
    assert all(distance(x, batch.inputs) < 1e-5 for x in result.inputs)


@pytest.mark.parametrize("activation", [nn.GELU, nn.Tanh, nn.SiLU, nn.LeakyReLU, nn.ELU])
@pytest.mark.parametrize("given_model", [True, False])
def test_one_sample_is_inverted_whatever_follows(activation: type[nn.Module], given_model: bool) -> None:
    plain, batch = mlp(60, 50, 10), batch_of(1)
    model = nn.Sequential(plain[0], activation(), plain[2])
    result = spearpp.audit(update_of(model, batch.inputs, batch.labels), model if given_model else None, batch_size=1)
    assert result.verdict == "LEAKS"
    assert kinds(result) == [ClaimKind.ONE]
    assert distance(result.inputs[0], batch.inputs) < 1e-5


def test_a_replay_proves_nothing_where_wrong_inputs_do_as_well() -> None:
    """Temperatures of one place: those of other days reproduce the update fairly well, but so do their mixtures."""
    generator = torch.Generator().manual_seed(4)
    hours = torch.arange(24) / 24 * 2 * math.pi

    def days() -> torch.Tensor:
        level, phase = 8 * torch.randn(16, 1, generator=generator), torch.rand(16, 1, generator=generator)
        return 12 + level + 5 * torch.sin(hours + phase)

    model, inputs, labels = mlp(24, 64, 2), days(), torch.randint(2, (16,), generator=generator)
    update = update_of(model, inputs, labels)
    right = replay(model, update, inputs, labels)
    assert right.proves
    assert right.baseline == min(right.mixed, right.unrelated) > right.difference
    for _ in range(5):
        assert not replay(model, update, days(), labels).proves


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 40))
def test_coins_count_draws_without_putting_back(n: int, k: int, s: int) -> None:
    k, s = min(k, n), min(s, k, n)
    chance = math.prod((k - i) / (n - i) for i in range(s))
    counted = float(chance_in_bits(torch.tensor(n), torch.tensor(k), torch.tensor(s), 0))
    assert counted == pytest.approx(-math.log2(chance) if k else 0.0, abs=1e-9)
