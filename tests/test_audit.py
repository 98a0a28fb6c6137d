"""Audits from an update to a verdict, for clients, models and transports that users have."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import spearpp
from conftest import present
from models import TwoInputs
from spearpp import ClientUpdate, Verdict, audit, check, find_layers, simulate
from spearpp.auditing.measurements import quick_spectrum
from spearpp.auditing.replay import replay
from spearpp.errors import OptionError
from spearpp.search import Gated
from spearpp.simulate import DPSGD, Batch, Cast, Client, FedAvg, FedSGD, OpacusDPSGD, Quantise, SumOfClients, TopK


def batch_of(b: int, features: int = 60, seed: int = 1) -> Batch:
    return simulate.random_batch(b, features=features, generator=torch.Generator().manual_seed(seed))


def mlp(features: int = 60, widths: tuple[int, ...] = (120, 120)) -> nn.Sequential:
    return simulate.mlp(features, list(widths), 10, generator=torch.Generator().manual_seed(0))


def psnr(result: spearpp.AuditResult, batch: Batch) -> float:
    return float(spearpp.score(result.inputs, batch.inputs).psnr.min())


class TestVerdicts:
    def test_a_gradient_leaks_with_labels_and_replay(self) -> None:
        model, batch = mlp(), batch_of(12)
        result = audit(FedSGD()(model, batch), model, batch_size=12)
        assert result.verdict is Verdict.LEAKS
        assert result.summary == "LEAKS: 12 of 12 training inputs were recovered exactly from layer 0"
        assert psnr(result, batch) > 90
        best = present(result.best)
        order = spearpp.score(result.inputs, batch.inputs).assignment
        assert present(best.labels)[order].tolist() == batch.labels.tolist()
        assert result.replay is not None
        assert result.replay.difference < 1e-5
        assert result.replay.scale == pytest.approx(1, abs=1e-5)
        assert any("personal data" in caveat for caveat in result.caveats)

    def test_weights_sent_back_leak_too_and_the_replay_tells_the_rate(self) -> None:
        model, batch = mlp(), batch_of(10)
        update = FedAvg(epochs=1, mini_batch=10, rate=0.1)(model, batch)
        wrong = ClientUpdate.from_weights(
            update.weights, {n: update.weights[n] - 0.1 * g for n, g in update.gradients.items()}, lr=0.025
        )
        result = audit(wrong, model)
        assert result.verdict is Verdict.LEAKS
        assert psnr(result, batch) > 60
        assert present(result.replay).scale == pytest.approx(4, rel=1e-3)

    def test_without_a_model(self) -> None:
        model, batch = mlp(), batch_of(10)
        update = FedSGD()(model, batch)
        lists = ClientUpdate.from_gradients(list(update.weights.values()), list(update.gradients.values()))
        for each in (update, lists):
            result = audit(each)
            assert result.verdict is Verdict.LEAKS
            assert psnr(result, batch) > 90
            assert any("assumed" in caveat for caveat in result.caveats)

    def test_without_a_model_a_replay_proves_the_network_that_was_assumed(self) -> None:
        model, batch = mlp(), batch_of(10)
        result = audit(FedSGD()(model, batch), batch_size=10)
        assert "10 of 10 training inputs were recovered exactly" in result.summary
        assert present(result.replay).difference < 1e-5
        assert any("No model was given" in caveat for caveat in result.caveats)

    def test_a_batch_that_fills_the_layer_is_not_applicable(self) -> None:
        model = mlp(widths=(20, 20))
        result = audit(FedSGD()(model, batch_of(30)), model)
        assert result.verdict is Verdict.NOT_APPLICABLE
        assert "rank" in result.summary

    def test_noise_stops_it_within_the_budget(self) -> None:
        model = mlp()
        result = audit(DPSGD(clip=1.0, noise=1e-2)(model, batch_of(12)), model, budget=5)
        assert result.verdict is not Verdict.LEAKS
        assert result.budget == 5

    def test_an_unknown_mask_behind_another_activation_is_not_applicable(self) -> None:
        model = nn.Sequential(nn.Linear(60, 80), nn.GELU(), nn.Dropout(0.5), nn.Linear(80, 10))
        result = audit(FedSGD()(model, batch_of(8)), model)
        assert result.verdict is Verdict.NOT_APPLICABLE
        assert "GELU" in result.summary
        assert "Dropout" in result.summary

    def test_a_batch_size_that_the_update_does_not_show_is_said(self) -> None:
        model, batch = mlp(), batch_of(8)
        result = audit(FedSGD()(model, batch), model, batch_size=9)
        assert result.verdict is Verdict.LEAKS
        assert any("its gradient shows 8 samples, but the client trained on 9" in caveat for caveat in result.caveats)

    def test_weight_decay_is_taken_off(self) -> None:
        model, batch = mlp(), batch_of(8)
        update = FedAvg(epochs=1, mini_batch=8, rate=0.1, weight_decay=5e-4)(model, batch)
        result = audit(update, model)
        assert result.verdict is Verdict.LEAKS
        assert psnr(result, batch) > 60
        assert any("Weight decay of 0.0005" in caveat for caveat in result.caveats)

    def test_momentum_does_not_hide_a_batch(self) -> None:
        model, batch = mlp(), batch_of(8)
        update = FedAvg(epochs=2, mini_batch=8, rate=1e-3, momentum=0.9)(model, batch)
        assert audit(update, model).verdict is Verdict.LEAKS

    def test_progress_and_options(self) -> None:
        model, seen = mlp(), []
        audit(FedSGD()(model, batch_of(8)), model, progress=lambda layer, state: seen.append((layer.name, state.found)))
        assert ("0", 8) in seen
        with pytest.raises(OptionError):
            audit(FedSGD()(model, batch_of(8)), model, budget=0)

    def test_one_seed_gives_one_result(self) -> None:
        model, batch = mlp(), batch_of(20)
        first, second = (audit(FedSGD()(model, batch), model) for _ in range(2))
        torch.testing.assert_close(first.inputs, second.inputs, rtol=0, atol=0)


class TestOddModels:
    def test_one_output(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(60, 90), nn.ReLU(), nn.Linear(90, 1))
        batch = batch_of(6)
        model(batch.inputs).square().mean().backward()
        result = audit(ClientUpdate.from_gradients(model), model)
        assert result.verdict is Verdict.LEAKS
        assert psnr(result, batch) > 90
        assert any("was not replayed" in caveat for caveat in result.caveats)

    def test_labels_behind_a_relu_in_place(self) -> None:
        model = nn.Sequential(nn.Linear(60, 120), nn.ReLU(inplace=True), nn.Linear(120, 10))
        batch = batch_of(6)
        result = audit(FedSGD()(model, batch), model)
        assert present(result.replay).difference < 1e-5

    def test_the_second_input_is_audited_too(self) -> None:
        torch.manual_seed(0)
        model, x, z = TwoInputs(40, 30, 80), torch.randn(6, 40), torch.randn(6, 30)
        nn.functional.cross_entropy(model(x, z), torch.arange(6)).backward()
        result = audit(ClientUpdate.from_gradients(model), model)
        assert [each.exact for each in result.layers] == [6, 6, 0]

    def test_the_mean_of_a_noisy_batch_is_no_input(self) -> None:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.rand(1, 200, generator=generator) + 0.2 + 0.3 * torch.randn(8, 200, generator=generator)
        batch = Batch(inputs, torch.zeros(8, dtype=torch.long), spearpp.Normalisation.identity(200))
        model = simulate.mlp(200, [200, 200], 10, generator=generator)
        update = FedSGD()(model, batch)
        noisy = {
            name: each + 0.3 * each.square().mean().sqrt() * torch.randn(each.shape, generator=generator)
            for name, each in update.gradients.items()
        }
        result = audit(ClientUpdate.from_gradients(model, noisy), model, budget=5)
        near = [float((x - inputs).norm(dim=1).min() / x.norm()) for x in result.inputs if len(x) == 200]
        assert all(each < 0.1 for each in near)

    def test_when_the_budget_is_spent_the_rest_is_said_not_to_be_tried(self) -> None:
        model = mlp(widths=(60, 60, 60, 60, 60, 60))
        result = audit(FedSGD()(model, batch_of(28)), model, budget=0.2, search=Gated(starts=512))
        assert any(each.reason == "not tried: the time budget was spent" for each in result.layers)

    def test_every_search_keeps_a_budget(self) -> None:
        model = mlp(widths=(60,))
        search = spearpp.search.RiemannianAdam(starts=10**9, chunk=256)
        result = audit(FedSGD()(model, batch_of(25)), model, budget=2, search=search)
        assert "time budget" in present(result.layers[0].inversion).stats.stopped


class TestReplay:
    def test_inputs_of_others_prove_nothing(self) -> None:
        model, batch = mlp(), batch_of(10)
        update = FedSGD()(model, batch)
        assert replay(model, update, batch.inputs, batch.labels).proves
        for inputs in (batch_of(10, seed=2).inputs, batch.inputs.mean(0, keepdim=True).repeat(10, 1)):
            assert not replay(model, update, inputs, batch.labels).proves
        assert not replay(model, update, batch.inputs, batch.labels.roll(1)).proves

    def test_clipping_makes_samples_count_unequally(self) -> None:
        model, batch = mlp(), batch_of(10)
        update = DPSGD(clip=0.5, noise=0.0)(model, batch)
        again = replay(model, update, batch.inputs, batch.labels)
        assert again.weighted
        assert again.difference < 1e-4

    def test_noise_that_keeps_certificates_away_does_not_hide_the_leak(self) -> None:
        model, batch = mlp(features=300), batch_of(8, features=300)
        clean = FedSGD()(model, batch).gradients["0.weight"]
        noise = 0.1 * float(clean.square().mean().sqrt())
        result = audit(DPSGD(clip=1e9, noise=noise)(model, batch), model, search=Gated(starts=512))
        assert result.verdict is Verdict.LEAKS
        assert "up to" in result.summary
        assert len(result.inputs) >= 7
        for x, error in zip(
            result.inputs, (each.error for each in result.layers[0].claims if each.recovered), strict=True
        ):
            apart = torch.linalg.vector_norm(batch.inputs - x, dim=1) / torch.linalg.vector_norm(batch.inputs, dim=1)
            assert float(apart.min()) < min(0.1, error)


class Head(nn.Module):
    """A convolution in front of a classifier's head, as image models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 6, 3, stride=2), nn.ReLU(), nn.Flatten())
        self.classifier = nn.Sequential(nn.Linear(54, 150), nn.ReLU(), nn.Linear(150, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.classifier(self.features(x.reshape(-1, 1, 8, 8)))
        return outputs


class Block(nn.Module):
    """A transformer block whose tokens are pieces of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(16, 2, 200, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.block(x.reshape(len(x), 4, 16)).mean(1))
        return outputs


class TestArchitectures:
    @pytest.mark.parametrize(
        ("model", "inside", "samples"),
        [(Head(), "classifier.0", 12), (Block(), "block.linear1", 12)],
        ids=["cnn", "transformer"],
    )
    def test_features_come_back_as_the_forward_pass_had_them(self, model: nn.Module, inside: str, samples: int) -> None:
        batch = batch_of(samples if inside.startswith("c") else samples // 4, features=64)
        seen: list[torch.Tensor] = []
        handle = model.get_submodule(inside).register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0]))
        model(batch.inputs)
        handle.remove()
        result = audit(FedSGD()(model, batch), model)
        assert result.verdict is Verdict.LEAKS
        assert "the features of" in result.summary
        truth = seen[0].detach().reshape(-1, seen[0].shape[-1])
        assert len(result.inputs) == samples
        assert float(spearpp.score(result.inputs, truth).psnr.min()) > 80

    def test_an_autoencoder_gives_its_inputs(self) -> None:
        generator = torch.Generator().manual_seed(0)
        model, batch = simulate.mlp(60, [120, 30, 120], 60, generator=generator), batch_of(9)
        (model(batch.inputs) - batch.inputs).square().mean().backward()
        result = audit(ClientUpdate.from_gradients(model), model)
        assert result.verdict is Verdict.LEAKS
        assert psnr(result, batch) > 90


class TestWire:
    @pytest.mark.parametrize(
        ("client", "leaks"),
        [
            (FedSGD() | Cast(torch.float16), True),
            (FedSGD() | Cast(torch.bfloat16), True),
            (FedSGD() | Quantise(8), True),
            (FedSGD() | TopK(0.05), False),
            (FedSGD() | TopK(0.999) | Cast(torch.float16), True),
            (SumOfClients(FedSGD(), 3), True),
            (OpacusDPSGD(clip=1.0, noise_multiplier=1e-6), True),
            (OpacusDPSGD(clip=1.0, noise_multiplier=1.0), False),
        ],
    )
    def test_what_leaks_is_right(self, client: Client, leaks: bool) -> None:
        model, batch = mlp(), batch_of(9)
        result = audit(client(model, batch), model, search=Gated(starts=512))
        assert (result.verdict is Verdict.LEAKS) is leaks
        assert bool(len(result.inputs)) is leaks
        for x in result.inputs:
            assert float(spearpp.score(x[None], batch.inputs).psnr.max()) > 20

    def test_opacus_draws_what_poisson_draws(self) -> None:
        model, batch = mlp(), batch_of(40)
        client = OpacusDPSGD(clip=10.0, noise_multiplier=0.0, sample_rate=0.25)
        found = {
            audit(client(model, batch, torch.Generator().manual_seed(s)), model).layers[0].batch_size for s in range(3)
        }
        assert len(found) > 1, "the batch varies from round to round"
        assert client.epsilon(steps=1, delta=1e-5) == float("inf")

    def test_clients_say_what_they_do_not_take(self) -> None:
        for make in (
            lambda: FedAvg(0, 1, 0.1),
            lambda: FedAvg(1, 1, 0.1, momentum=1.0),
            lambda: DPSGD(0.0, 1.0),
            lambda: OpacusDPSGD(1.0, 1.0, 0.0),
            lambda: TopK(0.0),
            lambda: Quantise(1),
            lambda: SumOfClients(FedSGD(), 99)(mlp(), batch_of(3)),
        ):
            with pytest.raises(OptionError):
                make()


def strangers() -> Iterator[tuple[str, ClientUpdate]]:
    """Updates that hold no batch behind a Linear+ReLU layer."""
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        for name, activation in (("gelu", nn.GELU()), ("tanh", nn.Tanh()), ("leaky", nn.LeakyReLU(0.1))):
            model = nn.Sequential(nn.Linear(30, 80), activation, nn.Linear(80, 10))
            yield name, FedSGD()(model, batch_of(8, 30, seed))
        model = simulate.mlp(30, [80], 10, generator=generator)
        update = FedSGD()(model, batch_of(8, 30, seed))
        adam = {name: each / (each.abs() + 1e-8) for name, each in update.gradients.items()}
        yield "adam", ClientUpdate.from_gradients(update.weights, adam)
        low = {
            name: torch.randn(len(each), 8, generator=generator) @ torch.randn(8, *each.shape[1:], generator=generator)
            if each.ndim == 2
            else torch.randn(each.shape, generator=generator)
            for name, each in update.gradients.items()
        }
        yield "random of the same rank", ClientUpdate.from_gradients(update.weights, low)
        u, s, v = torch.linalg.svd(update.gradients["0.weight"], full_matrices=False)
        turned = torch.linalg.qr(torch.randn(80, 80, generator=generator))[0] @ u
        yield (
            "the same spectrum",
            ClientUpdate.from_gradients(update.weights, {**update.gradients, "0.weight": turned @ torch.diag(s) @ v}),
        )


def test_no_false_alarm() -> None:
    count = 0
    for name, update in strangers():
        count += 1
        result = audit(update, search=Gated(starts=256))
        assert result.verdict is not Verdict.LEAKS, name
    assert count == 12


class TestConsistency:
    def messages(self, update: ClientUpdate, model: nn.Module) -> str:
        return "; ".join(f"{f.level}: {f.message}" for f in check(update, find_layers(model, update)))

    def test_a_plain_gradient_has_nothing_to_say(self) -> None:
        model = mlp()
        assert self.messages(FedSGD()(model, batch_of(8)), model) == ""

    @pytest.mark.parametrize(
        ("client", "words"),
        [
            (FedSGD() | Cast(torch.float16), "note: every number is a float16 value"),
            (FedSGD() | Cast(torch.bfloat16), "bfloat16"),
            (FedSGD() | Quantise(8), "different values: it was quantised"),
            (FedSGD() | TopK(0.05), "the update was pruned"),
            (DPSGD(clip=1.0, noise=1e-5), "DP noise"),
            (DPSGD(clip=1.0, noise=1.0), "has full rank"),
            (FedAvg(1, 8, 0.1, weight_decay=1e-3), "weight decay"),
        ],
    )
    def test_what_was_done_to_it_is_said(self, client: Client, words: str) -> None:
        model = mlp()
        assert words in self.messages(client(model, batch_of(8)), model)

    def test_black_pixels_are_not_pruning(self) -> None:
        model, batch = mlp(), batch_of(8)
        inputs = batch.inputs * (torch.arange(60) < 12)
        update = FedSGD()(model, Batch(inputs, batch.labels, batch.normalisation))
        assert "pruned" not in self.messages(update, model)

    def test_noise_is_not_weight_decay(self) -> None:
        model = mlp()
        for seed in range(20):
            generator = torch.Generator().manual_seed(seed)
            noise = [torch.randn(each.shape, generator=generator) for each in model.parameters()]
            assert "weight decay" not in self.messages(ClientUpdate.from_gradients(model, noise), model)

    def test_weights_of_another_round(self) -> None:
        model, batch = mlp(), batch_of(8)
        after = FedAvg(1, 8, 0.1)(model, batch)
        other = {n: each + 0.01 * torch.randn_like(each) for n, each in after.weights.items()}
        sent = {n: after.weights[n] - 0.1 * g for n, g in after.gradients.items()}
        assert "weights of another round" in self.messages(ClientUpdate.from_weights(other, sent, lr=0.1), model)

    def test_a_rate_that_cannot_be(self) -> None:
        model, batch = mlp(), batch_of(8)
        sent = FedAvg(1, 8, 0.1)(model, batch)
        after = {n: sent.weights[n] - 0.1 * g for n, g in sent.gradients.items()}
        wrong = ClientUpdate.from_weights(sent.weights, after, lr=1e-4)
        assert "lr or steps is too small" in self.messages(wrong, model)

    def test_nothing_changed_and_parts_not_sent(self) -> None:
        model = mlp()
        zero = ClientUpdate.from_weights(model, model)
        assert "nothing changed" in self.messages(zero, model)
        part = ClientUpdate.from_gradients(model, {"0.weight": torch.randn(120, 60), "0.bias": torch.randn(120)})
        assert "parameters were not sent" in self.messages(part, model)

    def test_of_a_large_gradient_a_part_is_enough(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = simulate.mlp(3072, [1100], 10)
        update = DPSGD(clip=1.0, noise=1e-6)(model, batch_of(16, 3072))
        sizes: list[int] = []
        eigh = torch.linalg.eigh

        def counted(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            sizes.append(len(matrix))
            values, vectors = eigh(matrix)
            return values, vectors

        monkeypatch.setattr(torch.linalg, "eigh", counted)
        assert quick_spectrum(update.gradients, update.weights, "0.weight").rank == 16
        assert sizes == [550]
        noise = {"0.weight": torch.randn(1100, 3072)}
        assert quick_spectrum(noise, update.weights, "0.weight").rank is None
        assert sizes[1:] == [550, 1100]  # what fills the part is looked at as a whole


def test_nothing_found_between_two_weight_files_hints_at_their_order() -> None:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 60), nn.GELU(), nn.Linear(60, 4))
    batch = simulate.random_batch(5, features=30, classes=4, generator=generator)
    sent = {name: each.clone() for name, each in model.state_dict().items()}
    nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    trained = model.state_dict()
    for before, after, verdict in ((sent, trained, "LEAKS"), (trained, sent, "NOT_FOUND")):
        result = spearpp.audit(ClientUpdate.from_weights(before, after), model, budget=10)
        assert result.verdict == verdict
        assert any("swapped" in each for each in result.caveats) == (verdict == "NOT_FOUND")
