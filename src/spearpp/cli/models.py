"""Build the network that ``--model`` names: the user's own factory, or an MLP with the shapes of the weights."""

import importlib
import importlib.util
import re
import sys
from itertools import pairwise
from pathlib import Path

from torch import nn

from spearpp.errors import OptionError
from spearpp.types import Tensor
from spearpp.update import ClientUpdate
from spearpp.update.lazy import tensor_specs


def model_of(text: str, update: ClientUpdate) -> nn.Module | None:
    """Build the network that ``--model`` names.

    Args:
        text: ``none``, ``mlp``, ``pkg.mod:factory`` or ``file.py:factory``.
        update: The update, whose weights give the shapes for ``mlp``.

    Returns:
        The network, or None for ``none``.

    Raises:
        OptionError: If the text has another form, or if the factory fails.
    """
    if text in ("none", ""):
        return None
    if text == "mlp":
        return chain(update)
    return named_model(text, "none, mlp, ")


def named_model(text: str, others: str = "") -> nn.Module:
    """Build the network that a text such as ``file.py:factory`` names.

    Args:
        text: ``pkg.mod:factory`` or ``file.py:factory``.
        others: What else the option accepts, for the error message.

    Raises:
        OptionError: If the text has another form, or if the factory fails.
    """
    module, _, name = text.rpartition(":")
    if not module or not name:
        raise OptionError(f"--model {text}: expected {others}pkg.mod:factory or file.py:factory")
    model = _import_model(module, name, text)
    if not isinstance(model, nn.Module):
        raise OptionError(f"--model {text}: returned a {type(model).__name__}, expected a torch.nn.Module")
    return model


def _import_model(module: str, name: str, text: str) -> object:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        if module.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(module).stem, module)
            if spec is None or spec.loader is None:
                raise ImportError(f"{module} is not a Python file")
            source = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(source)
        else:
            source = importlib.import_module(module)
        target = getattr(source, name)
        return target if isinstance(target, nn.Module) else target()
    except Exception as error:  # The user's code can raise any exception.
        raise OptionError(f"--model {text}: {type(error).__name__}: {error}") from error


class _Chain(nn.Module):
    """Linear layers with ReLU between them. The layers may have any parameter names."""

    def __init__(self, layers: list[tuple[str, nn.Linear]]) -> None:
        super().__init__()
        self.order: list[nn.Linear] = []
        for path, layer in layers:
            parent: nn.Module = self
            *outer, last = path.split(".") if path else ["linear"]
            for part in outer:
                if part not in dict(parent.named_children()):
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            parent.add_module(last, layer)
            self.order.append(layer)

    def forward(self, x: Tensor) -> Tensor:
        """Apply all layers in order."""
        x = x.flatten(1)
        for layer in self.order[:-1]:
            x = nn.functional.relu(layer(x))
        return self.order[-1](x)


def chain(update: ClientUpdate) -> nn.Module:
    """Build an MLP with the shapes of the update's weights, in the natural order of their names.

    Raises:
        OptionError: If the weights do not form a chain of Linear layers.
    """
    weights = tensor_specs(update.weights)
    matrices = sorted((name for name, each in weights.items() if each.ndim == 2), key=_natural_order)
    layers, used = [], set(matrices)
    for name in matrices:
        outputs, inputs = weights[name].shape
        bias = name.removesuffix("weight") + "bias"
        has_bias = bias in weights and weights[bias].shape == (outputs,)
        used |= {bias} if has_bias else set()
        layer = nn.Linear(inputs, outputs, bias=has_bias, dtype=weights[name].dtype, device=weights[name].device)
        layers.append((name.removesuffix("weight").rstrip("."), layer))
    connected = all(a.out_features == b.in_features for (_, a), (_, b) in pairwise(layers))
    named = all(name.endswith("weight") for name in matrices)
    if len(layers) < 2 or not connected or used != set(weights) or not named:
        raise OptionError(
            "--model mlp: the weights do not form a chain of Linear layers. Name your own factory, or use --model none"
        )
    return _Chain(layers)


def _natural_order(name: str) -> list[tuple[int, int | str]]:
    """Sort key that places ``layer.2`` before ``layer.10``."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]
