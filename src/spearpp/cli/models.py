"""The model that an update belongs to: a factory of the user's, or an MLP read off the weights."""

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
    """The model that ``--model`` names.

    Raises:
        OptionError: if it names none, or its factory fails.
    """
    if text in ("none", ""):
        return None
    if text == "mlp":
        return chain(update)
    module, colon, name = text.rpartition(":")
    if not colon or not module or not name:
        raise OptionError(f"--model {text}: none, mlp, pkg.mod:factory or file.py:factory")
    made = _made(module, name, text)
    if not isinstance(made, nn.Module):
        raise OptionError(f"--model {text}: gives a {type(made).__name__}, not a torch.nn.Module")
    return made


def _made(module: str, name: str, text: str) -> object:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        if module.endswith(".py"):
            found = importlib.util.spec_from_file_location(Path(module).stem, module)
            if found is None or found.loader is None:
                raise ImportError(f"{module} is no Python file")
            source = importlib.util.module_from_spec(found)
            found.loader.exec_module(source)
        else:
            source = importlib.import_module(module)
        target = getattr(source, name)
        return target if isinstance(target, nn.Module) else target()
    except Exception as error:  # the user's code may fail in any way
        raise OptionError(f"--model {text}: {type(error).__name__}: {error}") from error


class _Chain(nn.Module):
    """Linear layers with ReLU between, under any names."""

    def __init__(self, layers: list[tuple[str, nn.Linear]]) -> None:
        super().__init__()
        self.order: list[nn.Linear] = []
        for path, layer in layers:
            place: nn.Module = self
            *outer, last = path.split(".") if path else ["linear"]
            for part in outer:
                if part not in dict(place.named_children()):
                    place.add_module(part, nn.Module())
                place = place.get_submodule(part)
            place.add_module(last, layer)
            self.order.append(layer)

    def forward(self, x: Tensor) -> Tensor:
        """Through all of them."""
        x = x.flatten(1)
        for layer in self.order[:-1]:
            x = nn.functional.relu(layer(x))
        return self.order[-1](x)


def chain(update: ClientUpdate) -> nn.Module:
    """The MLP that the update's weights are, in the order of their names.

    Raises:
        OptionError: if they are no chain of Linear layers.
    """
    weights = tensor_specs(update.weights)
    matrices = sorted((name for name, each in weights.items() if each.ndim == 2), key=_natural)
    layers, used = [], set(matrices)
    for name in matrices:
        outputs, inputs = weights[name].shape
        bias = name.removesuffix("weight") + "bias"
        held = bias in weights and weights[bias].shape == (outputs,)
        used |= {bias} if held else set()
        made = nn.Linear(inputs, outputs, bias=held, dtype=weights[name].dtype, device=weights[name].device)
        layers.append((name.removesuffix("weight").rstrip("."), made))
    fits = all(a.out_features == b.in_features for (_, a), (_, b) in pairwise(layers))
    if len(layers) < 2 or not fits or used != set(weights) or not all(name.endswith("weight") for name in matrices):
        raise OptionError("--model mlp: the weights are no chain of Linear layers; give a factory, or --model none")
    return _Chain(layers)


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Sorts 2 before 10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]
