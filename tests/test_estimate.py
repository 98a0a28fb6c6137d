"""Estimates of learning rate, steps and momentum from an update: right, or not given."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import spearpp
from conftest import present
from spearpp import AuditResult, ClientUpdate, simulate
from spearpp.auditing.estimate import Estimate, estimate


def trained(rate: float, steps: int, momentum: float, *, mini_batch: int = 8, seed: int = 1) -> ClientUpdate:
    """Return the update of a client whose learning rate and steps are not known."""
    batch = simulate.digits(8, generator=torch.Generator().manual_seed(seed))
    client = simulate.FedAvg(epochs=steps, mini_batch=mini_batch, rate=rate, momentum=momentum)
    update = client(net(), batch, torch.Generator().manual_seed(seed))
    plain = {name: each * (rate * steps) for name, each in update.gradients.items()}
    return replace(update, gradients=plain, lr=None, steps=None)


def net() -> torch.nn.Sequential:
    return simulate.mlp(64, [100, 100], 10, generator=torch.Generator().manual_seed(5))


def audited(update: ClientUpdate) -> AuditResult:
    return spearpp.audit(update, net(), budget=20)


def told(result: AuditResult) -> list[str]:
    return [each.message for each in result.findings if " fits " in each.message]


@pytest.mark.parametrize(
    ("rate", "steps", "momentum"),
    [(0.1, 1, 0.0), (0.01, 1, 0.0), (0.1, 2, 0.0), (0.01, 2, 0.9), (0.1, 3, 0.5), (0.1, 5, 0.9), (0.01, 5, 0.0)],
)
def test_rate_steps_and_momentum_come_apart_where_the_weights_move(rate: float, steps: int, momentum: float) -> None:
    found = present(audited(trained(rate, steps, momentum)).estimated)
    assert found.steps == steps
    assert found.lr == pytest.approx(rate, rel=1e-3)
    assert found.momentum is None if steps == 1 else found.momentum == pytest.approx(momentum, abs=1e-3)


def test_one_step_with_momentum_is_one_of_plain_sgd() -> None:
    plain, with_momentum = (audited(trained(0.1, 1, momentum)).estimated for momentum in (0.0, 0.9))
    assert plain == with_momentum


def test_of_tiny_steps_the_product_is_told_alone() -> None:
    found = present(audited(trained(0.001, 2, 0.0)).estimated)
    assert (found.lr, found.steps, found.momentum) == (None, None, None)
    assert found.product == pytest.approx(0.002, rel=1e-2)
    assert "does not determine lr, steps and momentum separately" in str(found)


@pytest.mark.parametrize("rate", [0.1, 0.01, 0.001, 0.0003])
@pytest.mark.parametrize("mini_batch", [2, 4])
def test_mini_batches_are_not_taken_for_steps_with_the_whole_batch(rate: float, mini_batch: int) -> None:
    batch = simulate.digits(8, generator=torch.Generator().manual_seed(1))
    found = estimate(net(), trained(rate, 1, 0.0, mini_batch=mini_batch), batch.inputs, batch.labels)
    assert found.steps is None
    assert found.product == pytest.approx(rate * 8 / mini_batch, rel=0.15)


def test_the_audit_says_what_fits_and_whether_it_was_given_wrongly() -> None:
    update = trained(0.1, 2, 0.9)
    result = audited(update)
    assert told(result) == ["the update fits 2 steps with the whole batch at lr 0.1 and momentum 0.9"]
    assert not [each for each in result.caveats if "several local steps" in each], "it is known how many"
    given = ClientUpdate.from_weights(update.weights, {n: -g for n, g in update.gradients.items()}, lr=1.0, deltas=True)
    (warning,) = [each for each in audited(given).findings if each.level == "warning"]
    assert warning.message.startswith("lr=1 was given, but the update fits 2 steps")
    right = replace(trained(0.1, 1, 0.0), lr=0.1, steps=1)
    right = replace(right, gradients={name: each / 0.1 for name, each in right.gradients.items()})
    assert told(audited(right)) == ["the update fits one step with the whole batch at lr 0.1"]


def test_where_nothing_comes_back_there_is_a_bound() -> None:
    result = spearpp.audit(trained(0.5, 5, 0.9), net(), budget=0.5)
    assert result.estimated is None
    (bound,) = [each.message for each in result.findings if "lr is not known" in each.message]
    assert 0 < float(bound.split("at least ")[1].split()[0]) <= 0.5 * 5 / (1 - 0.9)


def test_gradients_have_no_rate() -> None:
    batch = simulate.digits(8, generator=torch.Generator().manual_seed(1))
    assert audited(simulate.FedSGD()(net(), batch)).estimated is None


def test_it_is_in_the_report(tmp_path: Path) -> None:
    result = audited(trained(0.1, 2, 0.9))
    result.save(tmp_path)
    again = AuditResult.load(tmp_path).estimated
    assert isinstance(again, Estimate)
    assert again == result.estimated
