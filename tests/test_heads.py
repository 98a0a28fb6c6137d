"""The output layer alone: features and labels from the equations of cross-entropy."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import spearpp
from conftest import present
from spearpp.auditing import ClaimKind
from spearpp.model.following import Following
from spearpp.types import Tensor
from spearpp.update import ClientUpdate


class Backbone(nn.Module):
    """A frozen convolution with a new head of 40 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Conv2d(1, 4, 3, stride=2).requires_grad_(False)
        self.head = nn.Linear(64, 40)

    def features(self, x: Tensor) -> Tensor:
        return 3 * torch.relu(self.front(x)).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def client(b: int, seed: int = 0) -> tuple[ClientUpdate, Backbone, Tensor, Tensor]:
    torch.manual_seed(seed)
    model = Backbone()
    inputs, labels = torch.randn(b, 1, 9, 9), torch.randint(40, (b,))
    functional.cross_entropy(model(inputs), labels).backward()
    return ClientUpdate.from_gradients(model), model, model.features(inputs), labels


def test_a_frozen_backbone_with_a_new_head_reveals_features_and_labels() -> None:
    update, model, features, labels = client(12)
    result = spearpp.audit(update, model, batch_size=12)
    assert result.summary.startswith("LEAKS: the features of 12 of 12 samples were recovered exactly")
    assert result.best is not None
    distance, row = (torch.cdist(result.inputs, features) / features.norm(dim=1)).min(1)
    assert float(distance.max()) < 1e-3
    assert sorted(row.tolist()) == list(range(12))
    assert torch.equal(present(result.best.labels)[result.rows], labels[row])


def test_without_a_model_the_last_matrix_is_assumed_to_be_the_output_layer() -> None:
    update, _, features, _ = client(8)
    result = spearpp.audit(update)
    assert result.best is not None
    assert len(result.inputs) >= 6
    assert float((torch.cdist(result.inputs, features) / features.norm(dim=1)).min(1).values.max()) < 1e-3
    assert any("it is the output layer of a classifier" in caveat for caveat in result.caveats)


def test_more_samples_than_half_of_the_classes_are_not_determined() -> None:
    update, model, _, _ = client(25)
    result = spearpp.audit(update, model)
    assert result.verdict is spearpp.Verdict.NOT_APPLICABLE
    assert "too many for the equations of 40 outputs" in result.summary


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "label smoothing": lambda o, y: functional.cross_entropy(o, y, label_smoothing=0.1),
    "mse": lambda o, y: functional.mse_loss(o, functional.one_hot(y, 40).float()),
    "bce": lambda o, y: functional.binary_cross_entropy_with_logits(o, functional.one_hot(y, 40).float()),
    "temperature": lambda o, y: functional.cross_entropy(o / 2, y),
    "mixed targets": lambda o, y: functional.cross_entropy(
        o, functional.one_hot(y, 40) * 0.7 + 0.3 * functional.one_hot(y.roll(1), 40)
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_another_loss_certifies_nothing(name: str) -> None:
    torch.manual_seed(0)
    head, x, y = nn.Linear(64, 40), torch.randn(8, 64), torch.randint(40, (8,))
    gradients = torch.autograd.grad(LOSSES[name](head(x), y), [head.weight, head.bias])
    tensors = (gradients[0], gradients[1], head.weight.detach(), head.bias.detach())
    result = spearpp.invert(*tensors, following=Following.of_output(40), seconds=1)
    assert not bool(result.certified.any())


@pytest.mark.parametrize("weights", [None, torch.linspace(0.1, 2, 40)])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_class_weights_and_sums_change_nothing(weights: Tensor | None, reduction: str) -> None:
    torch.manual_seed(0)
    head, x, y = nn.Linear(64, 40), torch.randn(8, 64), torch.randint(40, (8,))
    loss = functional.cross_entropy(head(x), y, weight=weights, reduction=reduction)
    gradients = torch.autograd.grad(loss, [head.weight, head.bias])
    tensors = (gradients[0], gradients[1], head.weight.detach(), head.bias.detach())
    result = spearpp.invert(*tensors, following=Following.of_output(40))
    assert bool(result.certified.all())
    assert float((torch.cdist(result.inputs, x) / x.norm(dim=1)).min(1).values.max()) < 1e-3


def test_repeated_samples_and_a_sure_softmax_are_not_called_single_samples() -> None:
    for seed, scale in ((0, 1.0), (1, 30.0)):
        torch.manual_seed(seed)
        model = Backbone()
        with torch.no_grad():
            model.head.weight.mul_(scale)
        x, y = torch.randn(6, 1, 9, 9), torch.randint(40, (6,))
        x[1], y[1] = x[0], y[0]
        functional.cross_entropy(model(x), y).backward()
        result = spearpp.audit(ClientUpdate.from_gradients(model), model, batch_size=6, budget=1)
        features = model.features(x)
        head = result.layers[-1]
        for row, claim in enumerate(head.claims):
            distance = (present(head.inversion).inputs[row] - features).norm(dim=1) / features.norm(dim=1)
            if claim.recovered:
                assert float(distance.min()) < 1e-3
                assert claim.kind is not ClaimKind.ONE or int(distance.argmin()) > 1
