"""Layers that feed a ReLU are found in any model, and the others are named with the reason."""

import pytest
import torch
from opacus import GradSampleModule
from torch import nn
from torch.nn import functional

from models import TwoInputs
from spearpp import ClientUpdate, find_layers
from spearpp.errors import DataError, ShapeError


def update_of(model: nn.Module) -> ClientUpdate:
    return ClientUpdate.from_gradients(model, [torch.ones_like(each) for each in model.parameters()])


def found(model: nn.Module) -> dict[str, tuple[bool, str, str | None]]:
    return {each.name: (each.qualifies, each.sees, each.next) for each in find_layers(model, update_of(model))}


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.fc1, self.fc2, self.fc3 = nn.Linear(144, 20), nn.Linear(20, 10), nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.conv(x))
        x = x.view(x.size(0), -1)
        x = functional.dropout(functional.relu(self.fc1(x)), 0.5, self.training)
        outputs: torch.Tensor = self.fc3(torch.tanh(self.fc2(x)))
        return outputs


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        outputs: torch.Tensor = self.last(torch.relu(self.second(hidden) + hidden))
        return outputs


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(8, 8, bias=False), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.last(torch.relu(self.inner(torch.relu(self.inner(x)))))
        return outputs


class Dynamic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.second = nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            x = -x
        outputs: torch.Tensor = self.second(self.relu(self.first(x)))
        return outputs


def test_an_mlp() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    assert found(model) == {
        "1": (True, "inputs", "3.weight"),
        "3": (True, "features", "5.weight"),
        "5": (True, "features", None),
    }


def test_functional_code_with_a_convolution_in_front() -> None:
    assert found(Functional()) == {
        "fc1": (True, "features", "fc2.weight"),
        "fc2": (True, "features", None),
        "fc3": (True, "features", None),
    }
    layers = {each.name: each for each in find_layers(Functional(), update_of(Functional()))}
    assert layers["fc2"].equations
    assert not layers["fc1"].equations
    assert layers["fc2"].reason == "its output goes to tanh: the equations of the network are solved"


def test_a_skip_connection_leaves_no_next_layer() -> None:
    layers = {each.name: each for each in find_layers(Skip(), update_of(Skip()))}
    assert layers["first"].qualifies
    assert layers["first"].next is None
    assert not layers["second"].qualifies
    assert "add" in layers["second"].reason


def test_a_shared_layer_without_bias() -> None:
    layers = {each.name: each for each in find_layers(Shared(), update_of(Shared()))}
    assert layers["inner"].qualifies
    assert layers["inner"].bias is None
    assert layers["inner"].next is None
    assert "used 2 times" in layers["inner"].reason


@pytest.mark.parametrize("between", [nn.GELU(), nn.LeakyReLU(), nn.Tanh(), nn.BatchNorm1d(5), nn.Sigmoid()])
def test_other_activations_are_named(between: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(6, 5), between, nn.Linear(5, 3))
    first = find_layers(model, update_of(model))[0]
    assert first.qualifies
    assert first.equations
    assert type(between).__name__ in first.reason


def test_the_equations_end_at_dropout() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Dropout(0.5), nn.Linear(5, 3))
    first = find_layers(model, update_of(model))[0]
    assert not first.qualifies
    assert "GELU" in first.reason
    assert "the mask of Dropout is unknown" in first.reason


def test_transformer_blocks_of_pytorch() -> None:
    for activation, qualifies in (("relu", True), ("gelu", False)):
        layer = nn.TransformerEncoderLayer(8, 2, 16, activation=activation, batch_first=True)
        model = nn.Sequential(nn.Linear(4, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
        layers = {each.name: each for each in find_layers(model, update_of(model))}
        first = layers["1.layers.0.linear1"]
        assert first.qualifies is qualifies
        assert first.next == ("1.layers.0.linear2.weight" if qualifies else None)
        assert not layers["1.layers.1.linear2"].qualifies


def test_what_cannot_be_traced_is_assumed_from_its_definition() -> None:
    first, second = find_layers(Dynamic(), update_of(Dynamic()))
    assert first.qualifies
    assert first.assumed
    assert first.next == "second.weight"
    assert second.output
    assert second.assumed


def test_frozen_and_silent_layers_are_named() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    grads = {name: torch.ones_like(each) for name, each in model.named_parameters() if not name.startswith("0.")}
    grads["2.weight"] = torch.zeros(4, 5)
    first, second, _ = find_layers(model, ClientUpdate.from_gradients(model, grads))
    assert "no gradient was sent" in first.reason
    assert "its gradient is zero" in second.reason


def test_without_a_model_every_matrix_counts() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    for update in (
        update_of(model),
        ClientUpdate.from_weights(list(model.parameters()), [e + 1 for e in model.parameters()]),
    ):
        first, second = find_layers(None, update)
        assert (first.qualifies, first.sees, first.assumed) == (True, "inputs", True)
        assert first.bias is not None
        assert first.next == second.weight
        assert second.output
        assert second.assumed


class Own(nn.Linear):
    """A subclass, as libraries have them."""


class Clamped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Own(8, 8), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.second(self.first(x).clamp(min=0).view(-1, 4))
        return outputs


def test_subclasses_clamps_and_reshaped_neighbours() -> None:
    first, second = find_layers(Clamped(), update_of(Clamped()))
    assert first.qualifies
    assert first.next is None  # it takes pieces of this layer's output
    assert second.output


class Bare(nn.Module):
    """Parameters without a Linear module."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(7, 6)), nn.Parameter(torch.randn(7))
        self.w2 = nn.Parameter(torch.randn(3, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(functional.linear(x, self.w1, bias=self.b1).relu(), self.w2)


def test_functional_linear() -> None:
    first, second = find_layers(Bare(), update_of(Bare()))
    assert (first.qualifies, first.sees, first.weight, first.bias) == (True, "inputs", "w1", "b1")
    assert not second.qualifies
    assert second.bias is None


def test_a_model_of_two_inputs_has_no_one_input() -> None:
    assert {name: sees for name, (_, sees, _) in found(TwoInputs(8, 6, 8)).items()} == {
        "left": "one input of several",
        "right": "one input of several",
        "last": "features",
    }


@pytest.mark.parametrize("between", [nn.ReLU6(), nn.Hardtanh(0, 1), nn.Threshold(0, 0), nn.LeakyReLU(0.0)])
def test_what_is_nearly_relu_is_tried(between: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(6, 5), between, nn.Linear(5, 3))
    first = find_layers(model, update_of(model))[0]
    assert first.qualifies
    assert first.assumed is isinstance(between, nn.ReLU6 | nn.Hardtanh)


def test_a_computed_weight_is_named() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), nn.ReLU(), nn.Linear(5, 3))
    layers = find_layers(model, update_of(model))
    assert any("computed from other parameters" in each.reason for each in layers)


def test_another_model_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    other = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    with pytest.raises(ShapeError, match="another model"):
        find_layers(other, update_of(model))


def test_a_model_with_other_names_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU())
    with pytest.raises(DataError, match="another model"):
        find_layers(Functional(), update_of(model))


def test_wrapped_models() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    plain = find_layers(model, update_of(model))
    assert [each.weight for each in plain] == ["0.weight", "2.weight"]
    for wrapped in (nn.DataParallel(model), GradSampleModule(model)):
        assert find_layers(wrapped, update_of(model)) == plain
