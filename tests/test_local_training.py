"""Local training with any activation: the samples and the order of the mini-batches, and nothing wrong claimed."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import spearpp
from clients import distances
from conftest import present
from spearpp import simulate
from spearpp.auditing import AuditResult
from spearpp.auditing.claims import ClaimKind
from spearpp.auditing.local_training import invert_training
from spearpp.auditing.refine import least_squares, refine
from spearpp.auditing.task import Task
from spearpp.inversion.result import Inversion
from spearpp.inversion.training import LocalTraining, likely_orders, mixing_of, number_of_batches
from spearpp.model import find_layers
from spearpp.simulate import Batch, Client, FedAvg
from spearpp.types import select_rows
from spearpp.update import ClientUpdate

FEATURES, WIDTH, B = 40, 60, 6
Change = Callable[[ClientUpdate], ClientUpdate]


def batch_of(b: int = B) -> Batch:
    return simulate.random_batch(b, features=FEATURES, generator=torch.Generator().manual_seed(1))


def network(activation: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    hidden = (nn.Linear(FEATURES, WIDTH), activation, nn.Linear(WIDTH, WIDTH), activation)
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 10))


def inverted(model: nn.Module, update: ClientUpdate, seconds: float | None = None) -> Inversion | None:
    layer = find_layers(model, update)[0]
    return invert_training(layer, update, Task(model, budget=seconds))


def check_claims(result: AuditResult, batch: Batch) -> None:
    """Every claim about an input of the model must be right."""
    layer = result.layers[0]
    stated = torch.tensor([claim.error for claim in layer.claims if claim.recovered])
    assert bool((distances(layer.inputs, batch) <= stated).all())


@pytest.mark.parametrize(
    ("activation", "client"),
    [
        (nn.GELU(), FedAvg(epochs=2, mini_batch=3, rate=0.05)),
        (nn.Tanh(), FedAvg(epochs=1, mini_batch=2, rate=0.05)),
        (nn.SiLU(), FedAvg(epochs=3, mini_batch=B, rate=0.05)),
    ],
    ids=["two epochs", "one epoch", "full batches"],
)
def test_the_samples_of_local_training(activation: nn.Module, client: Client) -> None:
    model, batch = network(activation), batch_of()
    found = present(inverted(model, client(model, batch)))
    assert bool(found.certified.all())
    assert bool((distances(found.inputs, batch) <= present(found.evidence).error).all())
    assert "reproduces the update" in found.stats.stopped


def test_an_audit_of_local_training() -> None:
    model, batch = network(nn.GELU()), batch_of()
    update = FedAvg(epochs=2, mini_batch=3, rate=0.05)(model, batch)
    result = spearpp.audit(update, model, batch_size=B)
    assert result.layers[0].exact == B
    assert sorted(present(result.layers[0].labels).tolist()) == sorted(batch.labels.tolist())
    check_claims(result, batch)


def other_weights(update: ClientUpdate) -> ClientUpdate:
    return replace(update, weights={name: 1.05 * each for name, each in update.weights.items()})


def noisy(update: ClientUpdate) -> ClientUpdate:
    generator = torch.Generator().manual_seed(2)
    return replace(
        update,
        gradients={
            name: each + 1e-3 * each.std() * torch.randn(each.shape, generator=generator)
            for name, each in update.gradients.items()
            if each.numel() > 1
        },
    )


@pytest.mark.parametrize("change", [other_weights, noisy])
def test_nothing_is_claimed_if_the_training_does_not_reproduce_the_update(change: Change) -> None:
    model, batch = network(nn.GELU()), batch_of()
    update = change(FedAvg(epochs=2, mini_batch=3, rate=0.05)(model, batch))
    assert inverted(model, update) is None


@pytest.mark.parametrize(
    ("named", "client"),
    [
        (nn.SiLU(), FedAvg(epochs=2, mini_batch=3, rate=0.05)),
        (nn.GELU(), FedAvg(epochs=2, mini_batch=3, rate=0.05, momentum=0.9)),
    ],
    ids=["wrong activation", "momentum"],
)
def test_other_training_is_not_explained(named: nn.Module, client: Client) -> None:
    batch = batch_of()
    assert inverted(network(named), client(network(nn.GELU()), batch), seconds=4) is None


def test_a_repeated_sample_is_not_claimed_as_two() -> None:
    model, batch = network(nn.GELU()), batch_of()
    twice = batch.pick(torch.tensor([0, 0, 1, 2, 3, 4]))
    found = inverted(model, FedAvg(epochs=2, mini_batch=3, rate=0.05)(model, twice))
    assert found is None


def test_repeating_a_known_order_is_the_training() -> None:
    """The movement in coordinates is that of SGD in float64."""
    model, batch = network(nn.GELU()).double(), batch_of()
    order = torch.tensor([[0, 1, 0, 1, 2, 2], [2, 1, 0, 0, 1, 2]])
    local = network(nn.GELU()).double()
    optimiser = torch.optim.SGD(local.parameters(), lr=0.1)
    for batches in order:
        for number in range(3):
            rows = batches == number
            optimiser.zero_grad()
            nn.functional.cross_entropy(local(batch.inputs[rows].double()), batch.labels[rows]).backward()
            optimiser.step()

    def joined(net: nn.Sequential) -> list[torch.Tensor]:
        linear = [each for each in net if isinstance(each, nn.Linear)]
        return [torch.cat([each.weight, each.bias[:, None]], dim=1).detach() for each in linear]

    training = LocalTraining(joined(model), [True] * 3, [nn.functional.gelu] * 2, batch.labels, passes=3)
    points = torch.cat([batch.inputs.double(), torch.ones(B, 1, dtype=torch.float64)], dim=1)
    epochs = training.run(points, torch.full((2, B), 0.1 / 2, dtype=torch.float64), mixing_of(order))
    for number, (before, after) in enumerate(zip(joined(model), joined(local), strict=True)):
        moved = sum(0.05 * each.signals[number].T @ each.inputs[number] for each in epochs)
        assert torch.allclose(torch.as_tensor(moved), before - after, rtol=1e-10, atol=1e-14)


def test_the_order_follows_from_inexact_mixing() -> None:
    generator = torch.Generator().manual_seed(0)
    order = torch.stack([torch.arange(12)[torch.randperm(12, generator=generator)] // 4 for _ in range(2)])
    mixing = mixing_of(order).mean(0) + 0.05 * torch.randn(12, 12, generator=generator)
    assert number_of_batches(mixing) == 3
    found = likely_orders(mixing, 2, 3, 1, generator)[0]
    assert torch.equal(mixing_of(found).sum(0), mixing_of(order).sum(0))


def test_inputs_that_are_not_reported_are_fitted_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = network(nn.GELU()), batch_of()
    update = simulate.DPSGD(clip=1e9, noise=3e-4)(model, batch, torch.Generator().manual_seed(1))
    every = spearpp.audit(update, model, batch_size=B).layers[0]
    for limit in ("claims.MAX_UNREPLAYED_ERROR", "judge.MAX_UNREPLAYED_ERROR"):
        monkeypatch.setattr(f"spearpp.auditing.{limit}", 0.1)
    some = spearpp.audit(update, model, batch_size=B).layers[0]
    assert bool(every.is_recovered.all())
    assert 0 < int(some.is_recovered.sum()) < B
    assert torch.equal(present(some.inversion).inputs, present(every.inversion).inputs)


def test_a_missing_input_follows_from_all_others() -> None:
    """If noise hides one input from the equations, the fit finds it. Without noise it is not needed."""
    model, batch = network(nn.GELU()), batch_of()
    update = simulate.DPSGD(clip=1e9, noise=1e-5)(model, batch, torch.Generator().manual_seed(1))
    whole = spearpp.audit(update, model, batch_size=B).layers[0]
    found, labels = whole.inversion, whole.labels
    assert found is not None
    assert found.evidence is not None
    assert labels is not None
    for left_out in (0, B - 1):
        kept = torch.arange(B) != left_out
        columns = {name: getattr(found, name)[kept] for name in ("inputs", "certified", "directions", "zeros", "fits")}
        rest = replace(found, **columns, evidence=select_rows(found.evidence, kept))
        some = replace(whole, inversion=rest, labels=labels[kept], claims=whole.claims[: B - 1])
        (completed,) = refine([some], update, model)
        assert completed.inversion is not None
        assert completed.labels is not None
        assert torch.allclose(completed.inversion.inputs[-1], found.inputs[left_out], atol=1e-3)
        assert int(completed.labels[-1]) == int(labels[left_out])
        assert [claim.kind for claim in completed.claims[B - 1 :]] == [ClaimKind.FITS]
        other = replace(some, labels=(labels[kept] + 1) % 10)  # with wrong labels the gradients explain nothing
        assert refine([other], update, model) == [other]


def test_noise_leaves_what_the_best_fit_leaves() -> None:
    """The audit ends at the inputs that least squares finds from the truth."""
    model, batch = network(nn.GELU()), batch_of()
    update = simulate.DPSGD(clip=1e9, noise=1e-5)(model, batch)
    result = spearpp.audit(update, model, batch_size=B)
    layer = result.layers[0]
    assert len(layer.inputs) == B
    check_claims(result, batch)
    exact = network(nn.GELU()).double()
    weights = {name: each.detach() for name, each in exact.named_parameters()}

    def gradients(inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
            outputs = torch.func.functional_call(exact, parameters, (inputs,))
            return nn.functional.cross_entropy(outputs, batch.labels)

        return torch.func.grad(loss)(weights)

    observed = {name: each.double() for name, each in update.gradients.items()}
    best = least_squares(gradients, observed, batch.inputs.double())
    behind = distances(layer.inputs, batch).log10().mean() - distances(best, batch).log10().mean()
    assert 20 * float(behind) < 0.5
