"""Preflight: what the layers of a model could reveal, before any training."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from conftest import present
from spearpp.cli import main
from spearpp.errors import OptionError
from spearpp.inversion import pixels
from spearpp.preflight import NOTHING, preflight


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 60), nn.ReLU(), nn.Linear(60, 5))


def test_inputs_of_a_small_batch_leak_and_the_bound_says_up_to_which_batch() -> None:
    torch.manual_seed(0)
    found = preflight(mlp(), [3, 4, 4], 4, budget=10)
    first, head = found.forecasts
    assert (first.reveals, first.largest_batch) == ("inputs", 30)
    assert head.largest_batch == 2
    assert found.exposed == [first]
    assert found.simulated.verdict == "LEAKS"
    assert any("more than 30 samples" in sentence for sentence in found.advice)


def test_a_model_whose_first_layer_sees_the_inputs_is_not_told_to_pool() -> None:
    torch.manual_seed(0)
    deep = nn.Sequential(nn.Linear(12, 60), nn.ReLU(), nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, 5))
    found = preflight(deep, [12], 3, budget=10)
    assert [each.reveals for each in found.exposed][:2] == ["inputs", "inputs from features"]
    assert not any("pooling" in sentence or "fewer features" in sentence for sentence in found.advice)
    behind = replace(found, forecasts=found.forecasts[1:])
    assert any("fewer features" in sentence and "pooling" not in sentence for sentence in behind.advice)


def test_a_batch_above_the_bound_exposes_nothing() -> None:
    torch.manual_seed(0)
    found = preflight(mlp(), [48], 100, budget=5)
    assert found.exposed == []
    assert found.advice == []
    assert found.simulated.verdict != "LEAKS"


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.output = nn.Embedding(200, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.tokens(x).mean(1))


@pytest.mark.parametrize("epochs", [None, 2])
def test_adam_hides_layers_but_not_the_vocabulary(epochs: int | None) -> None:
    torch.manual_seed(0)
    found = preflight(Text(), [6], 8, optimizer="adam", epochs=epochs, budget=5)
    head, table = found.forecasts
    assert (head.reveals, table.reveals, table.largest_batch) == (NOTHING, "vocabulary", None)
    assert found.simulated.vocabulary[0].leaks


def test_the_model_is_not_changed() -> None:
    model = nn.Sequential(nn.Linear(8, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3))
    before = {name: each.clone() for name, each in model.state_dict().items()}
    preflight(model, [8], 4, epochs=2, budget=2)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_inputs_that_follow_from_features_are_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixels, "ADAM_STEPS", 200)
    torch.manual_seed(0)
    front = (nn.Conv2d(1, 16, 3, padding=1), nn.ReLU())
    wide = nn.Sequential(*front, nn.Flatten(), nn.Linear(256, 60), nn.ReLU(), nn.Linear(60, 5))
    found = preflight(wide, [1, 4, 4], 3, budget=120)
    assert found.forecasts[0].reveals == "inputs from features"
    assert present(found.simulated.best).layer.sees == "inputs from features"
    assert any("fewer features" in sentence and "pooling" in sentence for sentence in found.advice)
    narrow = nn.Sequential(
        *front, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 60), nn.ReLU(), nn.Linear(60, 5)
    )
    few = preflight(narrow, [1, 4, 4], 3, budget=10).forecasts[0]
    assert few.reveals == "features"
    assert "for 16 unknowns" in few.reason
    mixed = nn.Sequential(front[0], nn.BatchNorm2d(16), *list(wide)[1:])
    assert "BatchNorm mixes" in preflight(mixed, [1, 4, 4], 3, budget=1).forecasts[0].reason


def test_batch_norm_behind_a_layer_hides_its_samples() -> None:
    model = nn.Sequential(nn.Linear(8, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 3))
    first = preflight(model, [8], 4, budget=1).forecasts[0]
    assert (first.reveals, first.largest_batch) == (NOTHING, 0)
    assert "mixes the samples" in first.reason


def test_the_rows_of_a_sample_divide_the_bound() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Flatten(), nn.Linear(160, 5))
    first = preflight(model, [4, 12], 2, budget=2).forecasts[0]
    assert first.largest_batch == 3
    assert "4 rows of each sample" in first.reason


@pytest.mark.parametrize("last", [[], [nn.Sigmoid()], [nn.Flatten(0)]])
def test_one_output_is_a_classifier_of_two_classes(last: list[nn.Module]) -> None:
    torch.manual_seed(0)
    found = preflight(nn.Sequential(nn.Linear(8, 60), nn.ReLU(), nn.Linear(60, 1), *last), [8], 3, budget=60)
    assert found.simulated.verdict == "LEAKS"
    assert found.forecasts[1].largest_batch == 1


@pytest.mark.parametrize(("model", "shape"), [(mlp(), [7]), (nn.LSTM(4, 3), [4]), (mlp(), [2**20, 2**20])])
def test_models_and_inputs_that_do_not_fit(model: nn.Module, shape: list[int]) -> None:
    with pytest.raises(OptionError):
        preflight(model, shape, 4)


def test_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(
        "from torch import nn\ndef net(): return nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 5))\n"
    )
    command = ["preflight", "net.py:net", "--input", "20", "--batch", "3", "--budget", "10s"]
    assert main([*command, "--fail-on", "leak"]) == 1
    assert "up to batch" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["simulated"]["verdict"] == "LEAKS"
    assert content["layers"][0]["largest_batch"] == 20
    for bad in (["--input", "0"], ["--input", "a"], ["--input", "21"], ["--optimizer", "lion"], ["--fail-on", "x"]):
        assert main([*command, *bad]) == 2
    assert main(["preflight", "missing.py:net", "--input", "20", "--batch", "3"]) == 2
