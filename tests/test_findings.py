"""What an audit says about an update uses the right names for things."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from conftest import present
from spearpp import ClientUpdate, Verdict, audit, check, find_layers, simulate
from spearpp.auditing.replay import forward
from spearpp.cli.models import chain
from spearpp.linalg.time_limit import OutOfTimeError, time_limit
from spearpp.simulate import Batch

Optimiser = Callable[..., torch.optim.Optimizer]


def client(features: int = 40, samples: int = 12, seed: int = 1) -> tuple[nn.Sequential, Batch]:
    generator = torch.Generator().manual_seed(seed)
    model = simulate.mlp(features, [120, 120], 10, generator=generator)
    return model, simulate.random_batch(samples, features=features, generator=generator)


def trained(
    model: nn.Module, batch: Batch, optimiser: Optimiser, steps: int, mini_batch: int, **options: float
) -> nn.Module:
    after = copy.deepcopy(model)
    algorithm = optimiser(after.parameters(), **options)
    for step in range(steps):
        rows = torch.arange(step * mini_batch, (step + 1) * mini_batch) % len(batch.inputs)
        algorithm.zero_grad()
        nn.functional.cross_entropy(after(batch.inputs[rows]), batch.labels[rows]).backward()
        algorithm.step()
    return after


def messages(update: ClientUpdate, model: nn.Module, level: str) -> str:
    return " | ".join(each.message for each in check(update, find_layers(model, update)) if each.level == level)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("mini_batch", [12, 4])
@pytest.mark.parametrize("steps", [2, 20])
@pytest.mark.parametrize("optimiser", [torch.optim.Adam, torch.optim.AdamW])
def test_several_steps_of_adam_are_recognised(optimiser: Optimiser, steps: int, mini_batch: int, seed: int) -> None:
    model, batch = client(seed=seed)
    after = trained(model, batch, optimiser, steps, mini_batch, lr=1e-3)
    assert "Adam" in messages(ClientUpdate.from_weights(model, after), model, "error")


def test_adam_is_recognised_on_inputs_with_constant_columns() -> None:
    batch, model = simulate.digits(16), simulate.mlp(64, [100, 100], 10, generator=torch.Generator().manual_seed(1))
    after = trained(model, batch, torch.optim.Adam, 20, 16, lr=1e-3)
    assert "Adam" in messages(ClientUpdate.from_weights(model, after), model, "error")


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("samples", "steps", "mini_batch"), [(1, 1, 1), (12, 1, 12), (12, 20, 4), (118, 1, 118)])
def test_sgd_is_never_taken_for_adam(samples: int, steps: int, mini_batch: int, momentum: float) -> None:
    model, batch = client(samples=samples)
    after = trained(model, batch, torch.optim.SGD, steps, mini_batch, lr=0.05, momentum=momentum)
    assert messages(ClientUpdate.from_weights(model, after), model, "error") == ""


def test_unrelated_weights_and_noise_are_not_called_adam() -> None:
    model, _ = client()
    other, _ = client(seed=5)
    assert "weights of another round" in messages(ClientUpdate.from_weights(model, other), model, "warning")
    assert messages(ClientUpdate.from_weights(model, other), model, "error") == ""
    noisy = [
        each + 0.01 * torch.randn(each.shape, generator=torch.Generator().manual_seed(0)) for each in model.parameters()
    ]
    assert messages(ClientUpdate.from_weights(model, noisy), model, "error") == ""


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bfloat16"), (torch.float16, "float16")])
def test_weights_in_half_precision_are_not_called_pruned(dtype: torch.dtype, name: str) -> None:
    model, batch = client()
    after = trained(model, batch, torch.optim.SGD, 1, 12, lr=0.01)
    stored = [{key: each.to(dtype) for key, each in network.state_dict().items()} for network in (model, after)]
    said = messages(ClientUpdate.from_weights(*stored), model, "warning")
    assert f"the weights are {name} values" in said
    assert "pruned" not in said
    pruned = (simulate.FedSGD() | simulate.TopK(0.1))(model, batch)
    assert "pruned" in messages(pruned, model, "warning")


@pytest.mark.parametrize(
    ("sent", "said", "advice"),
    [
        ("gradients", "weights", "Pass --kind gradients"),
        ("deltas", "weights", "Pass --kind gradients or --kind deltas"),
        ("weights", "deltas", "Omit --kind deltas"),
        ("weights", "gradients", "Omit --kind gradients"),
    ],
)
def test_a_forgotten_kind_is_named_and_the_leak_is_found(sent: str, said: str, advice: str) -> None:
    model, batch = client(samples=6)
    before = dict(model.named_parameters())
    gradients = simulate.FedSGD()(model, batch).gradients
    content = {
        "gradients": gradients,
        "deltas": {name: -0.1 * each for name, each in gradients.items()},
        "weights": {name: before[name].detach() - 0.1 * each for name, each in gradients.items()},
    }[sent]
    if said == "gradients":
        update = ClientUpdate.from_gradients(model, content)
    else:
        update = ClientUpdate.from_weights(model, content, lr=0.1, deltas=said == "deltas")
    result = audit(update, model)
    assert any(advice in each.message for each in result.findings)
    assert not any("decay" in text for text in [*result.caveats, *(each.message for each in result.findings)])
    assert result.verdict is Verdict.LEAKS


def test_ordinary_weight_decay_is_still_called_by_its_name() -> None:
    model, batch = client(samples=6)
    after = trained(model, batch, torch.optim.SGD, 1, 6, lr=0.1, weight_decay=0.05)
    result = audit(ClientUpdate.from_weights(model, after, lr=0.1), model)
    assert any("0.05 times the weights, which is weight decay" in each.message for each in result.findings)
    assert result.verdict is Verdict.LEAKS


def test_a_rank_that_the_bias_makes_visible_is_not_called_full() -> None:
    """With 40 samples of 40 numbers, only the column of the bias makes the rank smaller than the number of columns."""
    model, batch = client(samples=40)
    update = simulate.FedSGD()(model, batch)
    assert "full rank" not in messages(update, model, "warning")


def test_the_relu_of_an_mlp_without_code_is_an_assumption() -> None:
    model, batch = client(samples=4)
    update = simulate.FedSGD()(model, batch)
    layers = find_layers(chain(update), update)
    assert [each.assumed for each in layers] == [True, True, True]
    assert "assumed" in layers[0].reason
    assert not find_layers(model, update)[0].assumed
    result = audit(update, chain(update))
    assert any("the audit assumed that a ReLU follows" in each for each in result.caveats)


def test_a_first_layer_that_does_not_qualify_sees_inputs() -> None:
    class Untraceable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.act, self.last = nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.act(self.first(x))) if bool(x.sum() > 0) else self.last(self.first(x))

    model = Untraceable()
    first, last = find_layers(model, ClientUpdate.from_gradients(model, list(model.parameters())))
    assert (first.sees, first.qualifies, last.sees) == ("inputs", False, "features")


def test_tokens_are_called_tokens_and_more_inputs_than_samples_are_explained() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 160), nn.ReLU(), nn.Flatten(1, 1), nn.Linear(160, 5))
    sequences = torch.randn(6, 4, 64)
    nn.functional.cross_entropy(model(sequences).mean(1), torch.arange(6) % 5).backward()
    result = audit(ClientUpdate.from_gradients(model), model, batch_size=6, budget=10)
    said = " ".join(result.caveats)
    assert "24 different inputs, but the client trained on 6 samples" in said
    assert "every token" in said


def test_the_proof_says_what_its_number_means() -> None:
    model, batch = client(samples=6)
    exact = audit(simulate.FedSGD()(model, batch), model).replay
    several = audit(simulate.FedAvg(epochs=3, mini_batch=6, rate=0.1)(model, batch), model).replay
    one = audit(simulate.FedSGD()(*client(samples=1)), model).replay
    assert exact is not None
    assert several is not None
    assert one is not None
    assert exact.meaning.startswith("Up to rounding, the recovered samples explain the whole update.")
    assert several.difference > 0.01
    assert "several steps, this is expected" in several.meaning
    assert not one.proves
    for each in (exact, several, one):
        assert f"Unrelated data would leave {each.unrelated:.0%} unexplained" in each.meaning
        assert each.unrelated > 2 * each.difference


def test_a_spent_budget_ends_a_round_and_leaves_a_result() -> None:
    """Any stage may run out of time: the result is complete, and nothing wrong is claimed."""
    model, batch = client(samples=40)
    update = simulate.FedSGD()(model, batch)
    for budget in (1e-3, 0.3):
        result = audit(update, model, budget=budget)
        first = present(result.layers[0].inversion)
        assert first.stats.stopped.startswith("the time budget was spent") or first.certified.all()
        for found in result.inputs:
            assert float((batch.inputs - found).norm(dim=1).min()) < 0.1 * float(found.norm())
    with time_limit(0.0), pytest.raises(OutOfTimeError):
        forward(model, batch.inputs)


def test_signs_of_one_layer_are_recognised_beside_a_larger_table() -> None:
    """The first step of Adam moves every entry by the rate. Rows of a table that also decay hide this in the table."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(200, 16), nn.Linear(16, 30), nn.Tanh(), nn.Linear(30, 4))
    gradients = {name: torch.randn(each.shape).sign() for name, each in model.named_parameters()}
    gradients["0.weight"] = torch.randn(200, 16)
    result = audit(ClientUpdate.from_gradients(model, gradients), model, budget=2)
    assert any(finding.level == "error" and "same magnitude" in finding.message for finding in result.findings)
    assert not len(result.inputs)
