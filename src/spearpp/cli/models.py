"""Build the network that ``--model`` names: the user's own factory, or an MLP with the shapes of the weights."""

import importlib
import importlib.util
import sys
from itertools import pairwise
from pathlib import Path

from torch import nn

from spearpp.errors import OptionError
from spearpp.model.assumed import AssumedNetwork
from spearpp.update import ClientUpdate
from spearpp.update.lazy import tensor_specs
from spearpp.update.rounds import by_number


def model_of(text: str, update: ClientUpdate) -> nn.Module | None:
    """Build the network that ``--model`` names: ``none``, ``mlp``, ``pkg.mod:factory`` or ``file.py:factory``.

    The weights of the update give the shapes for ``mlp``. The result is None for ``none``.
    """
    if text in ("none", ""):
        return None
    if text == "mlp":
        return chain(update)
    return named_model(text, "none, mlp, ")


def describe_model(text: str, model: nn.Module | None) -> str:
    """Name the network of ``--model`` for the report."""
    if model is None:
        return "not given: every 2-D weight was tried as a Linear layer"
    if text == "mlp":
        return "mlp: Linear layers with ReLU, built from the shapes of the weights"
    return f"{text} ({type(model).__name__})"


def named_model(text: str, others: str = "") -> nn.Module:
    """Build the network that ``pkg.mod:factory`` or ``file.py:factory`` names.

    ``others`` is what else the option accepts, for the error message.
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


def chain(update: ClientUpdate) -> nn.Module:
    """Build an MLP with the shapes of the update's weights, in the natural order of their names.

    If the names are numbers, as those of a list are, the bias of a layer is the tensor after its weight.
    """
    weights = tensor_specs(update.weights)
    matrices = sorted((name for name, each in weights.items() if each.ndim == 2), key=by_number)
    layers, used = [], set(matrices)
    numbered = all(name.isdecimal() for name in weights)
    for name in matrices:
        outputs, inputs = weights[name].shape
        bias = str(int(name) + 1) if numbered else name.removesuffix("weight") + "bias"
        has_bias = bias in weights and weights[bias].shape == (outputs,)
        used |= {bias} if has_bias else set()
        layer = nn.Linear(inputs, outputs, bias=has_bias, dtype=weights[name].dtype, device=weights[name].device)
        layers.append((name.removesuffix("weight").rstrip(".") or "linear", layer))
    connected = all(a.out_features == b.in_features for (_, a), (_, b) in pairwise(layers))
    named = numbered or all(name.endswith("weight") for name in matrices)
    if len(layers) < 2 or not connected or used != set(weights) or not named:
        raise OptionError(
            "--model mlp: the weights do not form a chain of Linear layers",
            hint="name your own class with --model pkg.mod:Net, or omit --model",
        )
    return AssumedNetwork(layers, nn.functional.relu)
