"""From features to the inputs of the model: front ends, their equations, and clients that must not be believed."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import spearpp
from clients import gradient_of
from spearpp import AuditResult, ClientUpdate
from spearpp.auditing import LayerAudit
from spearpp.auditing.claims import ClaimKind
from spearpp.errors import OptionError
from spearpp.inversion import pixels
from spearpp.inversion.pixels import Pictures, solve
from spearpp.linalg.time_limit import time_limit
from spearpp.model import Sees
from spearpp.model.front import FrontEnd
from spearpp.report.sarif import sarif_log
from spearpp.types import Tensor

SIDE = 12
CLASSES = 6


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pictures need fewer steps."""
    monkeypatch.setattr(pixels, "ADAM_STEPS", 300)


def cnn(*front: nn.Module, hidden: int = 80, features: int = 16 * 36, seed: int = 0) -> nn.Sequential:
    """Return a small CNN. Its front end has 144 unknowns."""
    torch.manual_seed(seed)
    for each in nn.Sequential(*front).modules():
        if isinstance(each, nn.Conv2d | nn.BatchNorm2d | nn.LayerNorm):
            each.reset_parameters()
    return nn.Sequential(*front, nn.Flatten(), nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))


def pooled(seed: int = 0) -> nn.Sequential:
    return cnn(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), seed=seed)


def pictures(count: int, seed: int = 0, side: int = SIDE) -> Tensor:
    """Draw smooth pictures with a deviation of about one."""
    noise = torch.randn(count, 1, side + 2, side + 2, generator=torch.Generator().manual_seed(seed))
    return 2 * functional.avg_pool2d(noise, 3, 1)


def update_of(model: nn.Module, inputs: Tensor, labels: Tensor | None = None, *, train: bool = False) -> ClientUpdate:
    """One gradient of the mean cross-entropy, by default with labels that differ."""
    model.train(train)
    torch.manual_seed(0)
    labels = torch.arange(len(inputs)) % CLASSES if labels is None else labels
    return gradient_of(functional.cross_entropy(model(inputs), labels), model)


def from_features(result: AuditResult) -> list[LayerAudit]:
    return [each for each in result.layers if each.layer.sees == Sees.INPUTS_FROM_FEATURES]


def distances(result: AuditResult, inputs: Tensor) -> Tensor:
    truth = inputs.flatten(1).double()
    return (torch.cdist(result.inputs.double(), truth) / torch.linalg.vector_norm(truth, dim=1)).amin(1)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Residual(nn.Module):
    """A residual block with BatchNorm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(channels, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.two(functional.relu_(self.norm(self.one(x)))))


class Custom(nn.Module):
    """A front end that a function computes."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.function = nn.Conv2d(1, 16, 5, padding=2), function
        self.fc1, self.fc2 = nn.Linear(16 * 36, 80), nn.Linear(80, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.conv(self.function(x))), 2)
        return self.fc2(functional.relu(self.fc1(x.flatten(1))))


FRONT_ENDS: dict[str, tuple[list[nn.Module], int]] = {
    "pooling": ([nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)], 16 * 36),
    "two convolutions": (
        [nn.Conv2d(1, 8, 3), nn.LeakyReLU(), nn.ZeroPad2d(1), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.AvgPool2d(2)],
        16 * 25,
    ),
    "residual block with BatchNorm": ([nn.Conv2d(1, 24, 5, stride=2, padding=2), Residual(24)], 24 * 36),
    "strides and GELU": ([nn.Conv2d(1, 16, 4, stride=2, padding=1), nn.GELU()], 16 * 36),
    "patch embedding": ([nn.Conv2d(1, 24, 4, stride=4), nn.Flatten(2), nn.GELU()], 24 * 9),
}


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_features_of_known_pictures_give_the_pictures(name: str) -> None:
    modules, features = FRONT_ENDS[name]
    front = FrontEnd(cnn(*modules, features=features), str(len(modules) + 1), (1, SIDE, SIDE))
    inputs = pictures(3).flatten(1).double()
    found = solve(front, front(inputs), torch.full((3,), 1e-9), generator=generator())
    assert bool((found.residual <= 1e-9).all())
    assert bool((found.equations > front.unknowns).all())
    assert torch.allclose(found.inputs, inputs, atol=1e-6)


def test_later_attempts_go_on_where_the_last_one_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixels, "ADAM_STEPS", 60)
    front = FrontEnd(pooled(), "4", (1, SIDE, SIDE))
    features, noise = front(pictures(2).flatten(1).double()), torch.full((2,), 1e-9)
    assert bool((solve(front, features, noise, generator=generator()).residual <= 1e-9).all())
    monkeypatch.setattr(pixels, "MAX_ATTEMPTS", 1)
    assert bool((solve(front, features, noise, generator=generator()).residual > 1e-3).all()), (
        "one attempt is too short"
    )


def test_the_stated_error_follows_the_noise_of_the_features() -> None:
    front = FrontEnd(pooled(), "4", (1, SIDE, SIDE))
    inputs = pictures(2).flatten(1).double()
    for noise in (1e-5, 1e-3):
        exact = front(inputs)
        drawn = torch.randn(exact.shape, generator=generator(1), dtype=torch.float64)
        drawn *= noise * torch.linalg.vector_norm(exact, dim=1, keepdim=True) / exact.shape[1] ** 0.5
        found = solve(front, exact + drawn, torch.full((2,), 2 * noise), generator=generator())
        distance = torch.linalg.vector_norm(found.inputs - inputs, dim=1) / torch.linalg.vector_norm(inputs, dim=1)
        assert bool((distance <= 3 * found.error).all())
        assert bool((found.error <= 10 * distance).all()), "the stated error is no wild overestimate"


def test_the_mean_of_two_feature_vectors_has_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixels, "MAX_ATTEMPTS", 1)
    front = FrontEnd(pooled(), "4", (1, SIDE, SIDE))
    both = front(pictures(2).flatten(1).double())
    found = solve(front, both.mean(0, keepdim=True), torch.full((1,), 1e-6), generator=generator())
    assert float(found.residual) > 1e-2


def test_one_generator_gives_one_result_and_a_deadline_in_the_past_gives_nothing() -> None:
    front = FrontEnd(pooled(), "4", (1, SIDE, SIDE))
    features, noise = front(pictures(1).flatten(1).double()), torch.full((1,), 1e-9)
    one, two = (solve(front, features, noise, generator=generator(3)) for _ in range(2))
    assert torch.equal(one.inputs, two.inputs)
    with time_limit(time.monotonic()):
        late: Pictures = solve(front, features, noise, generator=generator())
    assert not bool(torch.isfinite(late.residual).any())


class Even(nn.Module):
    """|z|, written with known operations only. Behind a convolution without bias, x and -x have the same features."""

    def forward(self, z: Tensor) -> Tensor:
        return functional.relu(z) + functional.relu(-z)


class Mirrored(nn.Module):
    """The even part of a picture and the size of its odd part: a picture and its mirror image have the same values."""

    def __init__(self, *axes: int) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x: Tensor) -> Tensor:
        odd = x - x.flip(self.axes)
        return torch.cat([x + x.flip(self.axes), functional.relu(odd) + functional.relu(-odd)], 1)


@pytest.mark.parametrize(
    "front",
    [
        [nn.Conv2d(1, 16, 3, padding=1, bias=False), Even(), nn.AvgPool2d(2)],
        [Mirrored(3), nn.Conv2d(2, 16, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)],
        [Mirrored(2, 3), nn.Conv2d(2, 16, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)],
    ],
)
def test_a_front_end_with_a_symmetry_determines_nothing(
    front: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A second start may end at the same picture by chance, so the test does without. The rule that no values of the
    # same weights are combined would refuse these front ends before anything is solved.
    monkeypatch.setattr(pixels, "_same_from_elsewhere", lambda *_: True)
    monkeypatch.setattr("spearpp.model.front.first_exchangeable", lambda *_: None)
    monkeypatch.setattr(pixels, "ADAM_STEPS", 200)
    side = 4
    psi = FrontEnd(cnn(*front, features=16 * 4), str(len(front) + 1), (1, side, side))
    features = psi(pictures(1, side=side).flatten(1).double())
    found = solve(psi, features, torch.full((1,), 1e-6), generator=generator())
    assert bool((found.residual <= 1e-6).all()), "pictures with these features are found"
    assert not bool(torch.isfinite(found.slope).any())


class TestAudit:
    def test_pictures_are_recovered_and_the_replay_includes_the_convolution(self, tmp_path: Path) -> None:
        model, inputs = pooled(), pictures(4)
        result = spearpp.audit(update_of(model, inputs), model, batch_size=4)
        (entry,) = from_features(result)
        assert result.best is entry, "inputs are the more serious leak"
        assert [claim.kind for claim in entry.claims] == [ClaimKind.ONE] * 4
        errors = torch.tensor([claim.error for claim in entry.claims], dtype=torch.float64)
        assert bool((distances(result, inputs) <= errors).all())
        assert result.replay is not None
        assert result.replay.proves
        assert result.replay.by_parameter["0.weight"] < 1e-2
        assert "equations for the 144 values of an input of shape 1x12x12" in result.summary
        spearpp.report.write(tmp_path, result)
        again = AuditResult.load(tmp_path)
        assert from_features(again)[0].claims == entry.claims
        assert "computed from features of an inner layer" in (tmp_path / "report.html").read_text()
        (leak,) = sarif_log(result.to_dict())["runs"][0]["results"]
        assert (leak["ruleId"], leak["properties"]["sees"]) == (
            "spearpp/recoverable-training-data",
            "inputs from features",
        )

    def test_pictures_without_a_known_batch_size(self) -> None:
        model, inputs = pooled(1), pictures(3, seed=1)
        result = spearpp.audit(update_of(model, inputs), model)
        assert len(result.inputs) == 3
        assert bool((distances(result, inputs) < 1e-3).all())

    def test_a_sample_that_occurs_twice_is_not_called_one_sample(self) -> None:
        model, inputs = pooled(), pictures(3)[[0, 1, 2, 2]]
        update = update_of(model, inputs, torch.tensor([0, 1, 2, 2]))
        result = spearpp.audit(update, model, batch_size=4)
        (entry,) = from_features(result)
        assert sorted(claim.kind for claim in entry.claims) == [ClaimKind.ONE, ClaimKind.ONE, ClaimKind.SEVERAL]

    @pytest.mark.parametrize(
        ("front", "features", "why"),
        [
            ([nn.Conv2d(1, 4, 5, stride=2, padding=2), nn.ReLU()], 4 * 36, "so many inputs have the same features"),
            ([nn.Conv2d(1, 32, 1, stride=2), nn.ReLU()], 32 * 36, "do not determine an input"),
            ([nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.Dropout(0.1), nn.MaxPool2d(2)], 16 * 36, "Dropout"),
        ],
    )
    def test_a_picture_that_is_not_determined_is_not_claimed(
        self, front: list[nn.Module], features: int, why: str
    ) -> None:
        model, inputs = cnn(*front, features=features), pictures(3)
        result = spearpp.audit(update_of(model, inputs), model, input_shape=(1, SIDE, SIDE))
        assert not from_features(result)
        reasons = [each.reason for each in result.layers if each.layer.sees == Sees.FEATURES and len(each.inputs)]
        assert reasons
        assert why in reasons[0]
        (leak,) = sarif_log(result.to_dict())["runs"][0]["results"]
        assert (leak["ruleId"], leak["properties"]["sees"]) == ("spearpp/features", "features")

    def test_a_dark_picture_with_few_features_is_left_out_and_counted(self) -> None:
        model = cnn(nn.Conv2d(1, 7, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), features=7 * 36, seed=4)
        inputs = pictures(3, seed=4)
        inputs[0] -= 3
        assert int((model[:4](inputs[:1]) > 0).sum()) < SIDE * SIDE
        result = spearpp.audit(update_of(model, inputs), model, batch_size=3)
        (entry,) = from_features(result)
        assert len(entry.inputs) == 2
        assert "1 more feature vector does not determine an input" in entry.reason
        assert bool((distances(result, inputs[1:]) < 1e-3).all())

    def test_batch_norm_in_training_mode_is_named_as_the_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = cnn(nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        inputs = pictures(3)
        frozen = spearpp.audit(update_of(model, inputs), model, input_shape=(1, SIDE, SIDE))
        assert bool((distances(frozen, inputs) < 1e-3).all())
        assert len(frozen.inputs) == 3
        monkeypatch.setattr(pixels, "MAX_ATTEMPTS", 1)
        result = spearpp.audit(update_of(model, inputs, train=True), model, input_shape=(1, SIDE, SIDE))
        assert not from_features(result)
        assert "mixes the samples of a batch" in result.layers[0].reason

    def test_an_input_of_another_shape_is_not_claimed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pixels, "MAX_ATTEMPTS", 1)
        model, inputs = pooled(), pictures(3, side=SIDE + 1)
        result = spearpp.audit(update_of(model, inputs), model)
        assert not from_features(result)
        assert "no input of shape 1x12x12" in result.layers[0].reason


def _flip(x: Tensor) -> Tensor:
    return x.flip(3) if torch.rand(()) < 0.5 else x


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x - x.mean(0, keepdim=True), "mix the samples"),
        (lambda x: x + 0.1 * torch.randn(1, SIDE, SIDE), "random"),
        (_flip, "random"),
        (lambda x: functional.dropout(x, 0.1), "mask is unknown"),
        (lambda x: x if bool(x.sum() > 0) else -x, "cannot be traced"),
        (lambda x: x.unflatten(0, (-1, 5)), "does not know the operation unflatten"),
        (lambda x: functional.avg_pool2d(x, 20), "does not accept inputs of shape 1x12x12"),
        (torch.square, "does not know the operation square"),
        (torch.abs, "does not know the operation abs"),
        (lambda x: x * x, "does not know the operation mul"),
        (nn.LPPool2d(2, 1), "does not know the operation LPPool2d"),
        (lambda x: x.mT.abs(), "does not know the operation abs"),
        (lambda x: x.real, "does not know the operation getattr"),
        (lambda x: x.relu() + (-x).relu(), "add before the layer combines values that the same weights computed"),
        (lambda x: torch.stack([x.relu(), x.flip(2, 3).relu()]).amax(0), "the operation stack .* the same weights"),
        (lambda x: 2 * x.relu() - x, "the operation sub .* the same weights"),
        (lambda x: (2 * x - x.mean((1, 2, 3), keepdim=True)) / x.shape[2], None),
    ],
)
def test_a_front_end_that_is_unknown_or_no_function_of_one_sample_is_refused(
    function: Callable[..., Tensor], why: str | None
) -> None:
    torch.manual_seed(0)
    if why is None:
        assert FrontEnd(Custom(function), "fc1", (1, SIDE, SIDE)).unknowns == SIDE * SIDE
        return
    with pytest.raises(OptionError, match=why):
        FrontEnd(Custom(function), "fc1", (1, SIDE, SIDE))


def test_the_shape_of_the_input_is_guessed_only_where_it_fits() -> None:
    assert FrontEnd(pooled(), "4").guessed
    assert not FrontEnd(pooled(), "4", (1, SIDE, SIDE)).guessed
    deep = nn.Sequential(nn.Linear(9, 20), nn.ReLU(), nn.Linear(20, 3))
    assert (FrontEnd(deep, "2").shape, FrontEnd(deep, "2").guessed) == ((9,), False)
    bags = nn.Sequential(nn.Linear(9, 20), nn.Flatten(), nn.Linear(80, 3))
    with pytest.raises(OptionError, match="shape of the model's input is unknown"):
        FrontEnd(bags, "2")
    with pytest.raises(OptionError, match="look up an embedding"):
        FrontEnd(nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3)), "2")


@pytest.mark.parametrize("shape", [(), (0, 2), (True, 4)])
def test_a_shape_that_is_none_is_an_error(shape: Any) -> None:
    model = pooled()
    with pytest.raises(OptionError, match="input_shape"):
        spearpp.audit(update_of(model, pictures(1)), model, input_shape=shape)
