"""Frozen backbones with a new head, from torchvision, timm or a local folder of Hugging Face ``transformers``.

Nothing is downloaded. Weights are read from local files, or stay random. The three libraries are optional.
"""

import importlib
from typing import Any

from torch import nn

from spearpp.errors import DataError, OptionError
from spearpp.types import Tensor
from spearpp.update.files import FileName, open_tensors

PACKAGES = {"torchvision": "torchvision", "timm": "timm", "huggingface": "transformers"}
"""The Python package that each kind of source needs."""


class Frozen(nn.Module):
    """A backbone without gradients that stays in evaluation mode, also when the model around it is in training mode."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> "Frozen":
        """Keep the evaluation mode."""
        del mode
        return super().train(False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the features, one row per sample."""
        features: Tensor = self.backbone(inputs)
        return features


class _Pooled(nn.Module):
    """A model of ``transformers`` that returns one row of features per sample."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.model(inputs)
        pooled = getattr(outputs, "pooler_output", None)
        features: Tensor = outputs.last_hidden_state[:, 0] if pooled is None else pooled.flatten(1)
        return features


def backbone(source: str, classes: int, *, weights: FileName | None = None) -> nn.Sequential:
    """Return a frozen backbone with a new, untrained head: the model of a client that fine-tunes an output layer.

    Args:
        source: ``"torchvision:resnet18"``, ``"timm:vit_tiny_patch16_224"`` or another name of these libraries; or
            ``"huggingface:FOLDER"`` with a folder that ``save_pretrained`` of ``transformers`` wrote.
        classes: number of outputs of the head.
        weights: for torchvision and timm, a file or folder with the state dict of the whole model. None keeps the
            random weights of the library.

    Returns:
        Two modules in a row: the frozen backbone, and the head with the name ``1``.

    Raises:
        OptionError: if the source or the number of classes is not valid, or the library does not know the name.
        DataError: if the library is not installed, or the weights do not fit.
    """
    kind, _, name = source.partition(":")
    if kind not in PACKAGES or not name:
        raise OptionError(f"source={source!r}: expected torchvision:NAME, timm:NAME or huggingface:FOLDER")
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 2:
        raise OptionError(f"classes={classes!r}: expected two or more")
    try:
        library = importlib.import_module(PACKAGES[kind])
    except ImportError as error:
        package = PACKAGES[kind]
        raise DataError(f"{source} needs {package}, which is not installed: pip install {package}") from error
    if kind == "huggingface":
        body, features = _of_transformers(library, name)
    else:
        body, features = _of_names(library, kind, name, weights)
    return nn.Sequential(Frozen(body), nn.Linear(features, classes))


def _of_names(library: Any, kind: str, name: str, weights: FileName | None) -> tuple[nn.Module, int]:
    """Build a model of torchvision or timm, load its weights, and remove its head."""
    try:
        if kind == "timm":
            model = library.create_model(name, pretrained=False)
        else:
            model = importlib.import_module("torchvision.models").get_model(name, weights=None)
    except Exception as error:  # the libraries raise different errors for a name that they do not know
        raise OptionError(f"{kind} cannot build a model {name!r}: {error}") from error
    if weights is not None:
        tensors, _ = open_tensors(weights)
        try:
            model.load_state_dict({each: tensors[each] for each in tensors})
        except RuntimeError as error:
            raise DataError(f"the weights in {weights} are not those of {name}: {error}") from error
    heads = [each for each, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not heads:
        raise OptionError(f"{name} has no Linear layer, so it has no head that can be replaced")
    features = int(model.get_submodule(heads[-1]).in_features)
    parent, _, last = heads[-1].rpartition(".")
    setattr(model.get_submodule(parent), last, nn.Identity())
    return model, features


def _of_transformers(library: Any, folder: str) -> tuple[nn.Module, int]:
    try:
        model = library.AutoModel.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the library raises many kinds of errors for missing or damaged files
        raise DataError(f"transformers could not load a model from {folder}: {error}") from error
    width = getattr(model.config, "hidden_size", None) or model.config.hidden_sizes[-1]
    return _Pooled(model), int(width)
