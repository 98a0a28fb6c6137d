"""The bound on reconstruction that stated DP-SGD implies, and updates that contradict the statement."""

import json
import math
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import spearpp
from conftest import present
from spearpp import ClientUpdate, simulate
from spearpp.cli import main
from spearpp.cli.options import stated_dp
from spearpp.dp import DELTA, KAPPA, StatedDP, compare, possible_noise, probability
from spearpp.dp.comparison import MAX_SIDE
from spearpp.errors import MissingExtraError, OptionError

MODEL = simulate.mlp(40, [60, 60], 10)
BATCH = simulate.random_batch(8, features=40)
CLIP = 0.5


def client(noise_multiplier: float, clip: float = CLIP) -> ClientUpdate:
    """One step of DP-SGD on all samples."""
    noise = noise_multiplier * clip / len(BATCH.inputs)
    return simulate.DPSGD(clip, noise)(MODEL, BATCH, torch.Generator().manual_seed(3))


@pytest.mark.parametrize("kappa", [0.1, 1e-4])
@pytest.mark.parametrize("sigma", [0.5, 2.0])
def test_the_bound_is_the_best_test_between_two_normal_distributions(sigma: float, kappa: float) -> None:
    drawn = np.random.default_rng(0).normal(1.0, sigma, 200_000)  # the update, with the sample in it
    guessed = stats.norm.isf(kappa, scale=sigma)  # without the sample, this test succeeds with probability κ
    expected = float((drawn > guessed).mean())
    assert StatedDP(sigma, kappa=kappa).bound == pytest.approx(expected, abs=4 * math.sqrt(expected / 200_000))


def test_many_steps_on_all_samples_count_as_one_with_less_noise() -> None:
    assert StatedDP(2.0, steps=16).bound == pytest.approx(StatedDP(0.5).bound, rel=1e-12)


@pytest.mark.parametrize(("sigma", "rate", "kappa"), [(1.0, 0.1, 0.1), (1.0, 0.1, 0.01), (2.0, 0.5, 0.001)])
def test_one_subsampled_step_is_a_mixture(sigma: float, rate: float, kappa: float) -> None:
    pytest.importorskip("dp_accounting")
    mixture = (1 - rate) * kappa + rate * StatedDP(sigma, kappa=kappa).bound  # exact for one step
    bound = StatedDP(sigma, sample_rate=rate, kappa=kappa).bound
    assert mixture <= bound * (1 + 1e-9)
    assert bound <= 1.001 * mixture


def test_subsampling_never_weakens_and_steps_never_strengthen_the_bound() -> None:
    pytest.importorskip("dp_accounting")
    rates = [StatedDP(0.8, sample_rate=rate, steps=20).bound for rate in (0.01, 0.1, 0.9, 1.0)]
    assert rates == sorted(rates)
    assert rates[-1] == StatedDP(0.8, steps=20).bound
    steps = [StatedDP(0.8, sample_rate=0.05, steps=count).bound for count in (1, 10, 1000)]
    assert KAPPA < steps[0] < steps[1] < steps[2] <= 1


def test_almost_no_noise_gives_a_bound_and_no_overflow() -> None:
    pytest.importorskip("dp_accounting")
    for sigma in (1e-6, 0.005, 0.01, 0.1):
        assert 0.1 < StatedDP(sigma, sample_rate=0.2, steps=3).bound <= 1


@pytest.mark.parametrize(
    ("sigma", "steps", "delta"), [(1.0, 1, 1e-5), (0.5, 8, 1e-3), (30.0, 3, 1e-6), (1e-4, 8, 1e-3)]
)
def test_the_composed_epsilon_of_full_steps_is_exact(sigma: float, steps: int, delta: float) -> None:
    """The most powerful test between the two outputs: its power at ε must exceed e^ε times its size by exactly δ."""
    stated = StatedDP(sigma, steps=steps, delta=delta)
    mean = math.sqrt(steps) / sigma
    threshold = stated.epsilon / mean + mean / 2  # a likelihood ratio of e^ε
    size = math.exp(stated.epsilon + stats.norm.logsf(threshold))
    assert stats.norm.sf(threshold, loc=mean) - size == pytest.approx(delta, rel=1e-3)
    assert StatedDP(1e6).epsilon == 0.0


def test_the_composed_epsilon_agrees_with_two_accountants() -> None:
    pytest.importorskip("dp_accounting")
    accountants = pytest.importorskip("opacus.accountants")
    for sigma, rate, steps in ((1.0, 1.0, 8), (1.0, 0.1, 20), (0.6, 0.5, 4)):
        renyi = accountants.RDPAccountant()
        renyi.history = [(sigma, rate, steps)]
        above = renyi.get_epsilon(1e-5)  # Rényi orders give an upper bound
        epsilon = StatedDP(sigma, sample_rate=rate, steps=steps, delta=1e-5).epsilon
        assert 0.5 * above < epsilon < above
    nearly = StatedDP(1.0, sample_rate=1 - 1e-9, steps=8).epsilon  # by dp-accounting, not by the formula
    assert nearly == pytest.approx(StatedDP(1.0, steps=8).epsilon, rel=1e-2)


def test_without_the_package_subsampling_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)
    assert StatedDP(1.0).bound < 0.4
    assert 4.37 < StatedDP(1.0).epsilon < 4.38
    with pytest.raises(MissingExtraError, match=r"dp-accounting is not installed: pip install 'spearpp\[dp\]'"):
        _ = StatedDP(1.0, sample_rate=0.1).bound


@pytest.mark.parametrize(
    "wrong", [{"clip": 0.0}, {"sample_rate": 0.0}, {"sample_rate": 1.1}, {"steps": 0}, {"kappa": 1.0}, {"delta": 0.0}]
)
def test_numbers_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        StatedDP(1.0, **wrong)
    with pytest.raises(OptionError):
        StatedDP(0.0)


@pytest.mark.parametrize("value", [1e-9, 0.38914, 0.5, 0.99951, 1.0])
def test_a_printed_bound_is_never_below_the_bound(value: float) -> None:
    assert value * (1 - 1e-6) <= float(probability(value)) <= max(1.011 * value, 1.0)


@pytest.mark.parametrize("shape", [(20, 64), (200, 300), (64, 64)])
@pytest.mark.parametrize("rank", [0, 1, 12, 64])
@pytest.mark.parametrize("scale", [0.3, 3.0, 100.0])
def test_no_signal_hides_noise(shape: tuple[int, int], rank: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(rank)
    left, right = (torch.randn(side, rank, generator=generator) for side in shape)
    noisy = scale * left @ right.T / max(1, rank) ** 0.5 + 0.01 * torch.randn(shape, generator=generator)
    found = present(possible_noise(ClientUpdate.from_gradients({"w": torch.zeros(shape)}, {"w": noisy})))
    assert found >= 0.01
    assert rank > 1 or found <= 0.014


def test_the_noise_of_a_large_matrix_is_measured_in_a_part_of_it() -> None:
    shape = (2 * MAX_SIDE, MAX_SIDE + 7)
    noise = 0.01 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = possible_noise(ClientUpdate.from_gradients({"w": torch.zeros(shape)}, {"w": noise}))
    assert found == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize("sigma", [0.3, 1.0, 5.0])
def test_a_truthful_client_gets_no_warning(sigma: float) -> None:
    update = client(sigma)
    shown = compare(StatedDP(sigma, CLIP), update, spearpp.audit(update, MODEL), batch_size=8)
    assert shown.warnings == ()
    assert shown.not_checked is None
    assert shown.recovered == 0.0
    assert shown.possible_noise == pytest.approx(shown.stated_noise, rel=0.3)


def test_noise_that_is_weaker_than_stated_is_noticed() -> None:
    update = client(0.5)
    shown = compare(StatedDP(1.0, CLIP), update, spearpp.audit(update, MODEL), batch_size=8)
    assert len(shown.warnings) == 1
    assert "weaker than stated, so the bound does not hold" in shown.warnings[0]


def test_gradients_that_are_not_clipped_are_noticed() -> None:
    update = client(0.01, clip=CLIP)  # the client clips to 0.5 and states 0.1, with the same noise
    shown = compare(StatedDP(0.05, CLIP / 5), update, spearpp.audit(update, MODEL, budget=0.5), batch_size=8)
    assert any("not clipped as stated" in each for each in shown.warnings)


def test_recovery_beyond_the_bound_is_noticed() -> None:
    update = simulate.FedSGD()(MODEL, BATCH)
    shown = compare(StatedDP(2.0), update, spearpp.audit(update, MODEL), batch_size=8)
    assert shown.recovered == 1.0
    assert "has a probability of at most 0.218" in shown.warnings[0]
    assert "clipping norm" in present(shown.not_checked)


def test_weights_without_a_learning_rate_and_pruned_updates_are_not_compared() -> None:
    update = client(1.0)
    result = spearpp.audit(update, MODEL)
    after = {name: each - 0.1 * update.gradients[name] for name, each in update.weights.items()}
    unknown = compare(StatedDP(1.0, CLIP), ClientUpdate.from_weights(dict(update.weights), after), result, 8)
    assert "learning rate" in present(unknown.not_checked)
    known = ClientUpdate.from_weights(dict(update.weights), after, lr=0.1, steps=1)
    assert compare(StatedDP(1.0, CLIP), known, result, 8).warnings == ()
    pruned = compare(StatedDP(1.0, CLIP), simulate.TopK(0.5)(update), result, 8)
    assert "exactly zero" in present(pruned.not_checked)
    assert pruned.warnings == ()
    together = compare(StatedDP(1.0, CLIP), ClientUpdate.sum([update, update]), result, 8)
    assert "several clients" in present(together.not_checked)


def test_the_command_shows_the_bound_and_every_file_of_the_report_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    client(0.5).save("update.safetensors")
    numbers = f"--noise-multiplier 1 --clip {CLIP} --batch-size 8 --kappa 0.01 --dp-steps 4".split()
    command = ["audit", "update.safetensors", "--model", "mlp", "--budget", "1s", "--out", "out", *numbers]
    assert main(command) in (0, 3)
    said = capsys.readouterr().out
    sentence = StatedDP(1.0, CLIP, 1.0, 4, 0.01)
    assert (
        f"κ = 0.01 without the update succeeds with probability at most {probability(sentence.bound)} with it" in said
    )
    assert "weaker than stated" in said
    content = json.loads(Path("out/report.json").read_text())
    schema = json.loads(resources.files("spearpp.report").joinpath("report.schema.json").read_text())
    pytest.importorskip("jsonschema").validate(content, schema)
    assert content["dp"]["bound"] == sentence.bound
    page = Path("out/report.html").read_text()
    assert content["dp"]["sentence"] in page
    assert content["dp"]["warnings"][0] in page
    assert "weaker than stated" in Path("out/report.junit.xml").read_text()


def test_local_epochs_need_the_number_of_dp_steps() -> None:
    with pytest.raises(OptionError, match="pass --dp-steps"):
        stated_dp(1.0, None, 1.0, None, KAPPA, DELTA, epochs=3, rounds=1)
    stated = present(stated_dp(1.0, None, 1.0, 12, KAPPA, DELTA, epochs=3, rounds=1))
    assert stated.steps == 12
    one_step_each = present(stated_dp(1.0, None, 1.0, None, KAPPA, DELTA, epochs=1, rounds=2))
    assert one_step_each.steps == 2


@pytest.mark.parametrize(
    "numbers",
    [
        (1.0, 1.0, None, KAPPA, DELTA),
        (None, 0.1, None, KAPPA, DELTA),
        (None, 1.0, 3, KAPPA, DELTA),
        (None, 1.0, None, 0.5, DELTA),
        (None, 1.0, None, KAPPA, 1e-3),
    ],
)
def test_numbers_about_noise_without_the_noise_multiplier_are_refused(
    numbers: tuple[float | None, float, int | None, float, float],
) -> None:
    assert stated_dp(None, None, 1.0, None, KAPPA, DELTA, epochs=1, rounds=1) is None
    with pytest.raises(OptionError, match="pass --noise-multiplier too"):
        stated_dp(None, *numbers, epochs=1, rounds=1)
