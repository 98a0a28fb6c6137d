"""Frozen backbones: loading from local files, the new head, and one clear error if a library is missing."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

import spearpp
from spearpp import ClientUpdate, simulate
from spearpp.errors import DataError, OptionError
from spearpp.types import Tensor


class Net(nn.Module):
    """A small network with the module names of a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 32, 3, stride=2), nn.BatchNorm2d(32)
        self.fc: nn.Module = nn.Linear(32, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(functional.relu(self.bn1(self.conv1(x))).mean((2, 3)))


class Encoder(nn.Module):
    """A model that returns what a model of ``transformers`` returns."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=16)
        self.words = nn.Embedding(50, 16)
        self.words.weight.data.copy_(torch.load(Path(folder) / "pytorch_model.bin", weights_only=True)["words.weight"])

    def forward(self, tokens: Tensor) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.words(tokens), pooler_output=None)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the three libraries, with the functions that ``backbone`` calls."""

    def build(name: str, **_: object) -> nn.Module:
        if name != "net":
            raise ValueError(f"unknown model {name}")
        return Net()

    def from_pretrained(folder: str, local_files_only: bool) -> nn.Module:
        assert local_files_only
        return Encoder(folder)

    torchvision, models, timm, transformers = map(
        ModuleType, ("torchvision", "torchvision.models", "timm", "transformers")
    )
    models.__dict__["get_model"] = timm.__dict__["create_model"] = build
    transformers.__dict__["AutoModel"] = SimpleNamespace(from_pretrained=from_pretrained)
    for each in (torchvision, models, timm, transformers):
        monkeypatch.setitem(sys.modules, each.__name__, each)


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("kind", ["torchvision", "timm"])
def test_weights_of_a_local_file_and_a_new_head(kind: str, tmp_path: Path) -> None:
    stored = Net()
    torch.save(stored.state_dict(), tmp_path / "weights.pt")
    model = simulate.backbone(f"{kind}:net", 12, weights=tmp_path / "weights.pt")
    model.train()
    pictures = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    stored.eval().fc = nn.Identity()
    assert torch.equal(model[0](pictures), stored(pictures)), "the backbone has the stored weights, in evaluation mode"
    assert [name for name, each in model.named_parameters() if each.requires_grad] == ["1.weight", "1.bias"]
    functional.cross_entropy(model(pictures), torch.tensor([0, 3, 7, 9])).backward()
    (head,) = spearpp.find_layers(model, ClientUpdate.from_gradients(model))
    assert (head.name, head.neurons, head.output, head.qualifies) == ("1", 12, True, True)


@pytest.mark.usefixtures("libraries")
def test_a_folder_of_transformers(tmp_path: Path) -> None:
    words = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    torch.save({"words.weight": words}, tmp_path / "pytorch_model.bin")
    model = simulate.backbone(f"huggingface:{tmp_path}", 3)
    assert torch.equal(model[0](torch.tensor([[4, 7]])), words[4:5])
    assert model(torch.tensor([[4, 7]])).shape == (1, 3)
    with pytest.raises(DataError, match="could not load a model"):
        simulate.backbone(f"huggingface:{tmp_path / 'missing'}", 3)


@pytest.mark.usefixtures("libraries")
def test_wrong_names_and_wrong_weights(tmp_path: Path) -> None:
    torch.save({"other": torch.zeros(3)}, tmp_path / "weights.pt")
    with pytest.raises(DataError, match="are not those of net"):
        simulate.backbone("timm:net", 3, weights=tmp_path / "weights.pt")
    for source, classes in (("timm:other", 3), ("net", 3), ("keras:net", 3), ("timm:", 3), ("timm:net", 1)):
        with pytest.raises(OptionError):
            simulate.backbone(source, classes)


@pytest.mark.parametrize("source", ["torchvision:resnet18", "timm:resnet18", "huggingface:folder"])
def test_a_missing_library_is_one_clear_error(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("torchvision", "timm", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=r"is not installed: pip install (torchvision|timm|transformers)$"):
        simulate.backbone(source, 10)
