"""What an update of a model could reveal, before any training: counting bounds, and an audit of a simulated client.

The counting bound of a layer is the largest batch for which the gradients give at least as many equations as there are
unknowns (docs/method.md). A batch above the bound is not determined by one update. A batch below the bound may be
recovered, if a search finds the samples. The simulated client trains on random inputs with the model's own weights.

Behind convolutions a Linear layer sees features. The inputs follow from them if more features depend on an input than
the input has values (``spearpp.inversion.pixels``). Random inputs show how many there are.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from spearpp.auditing import AuditResult, audit
from spearpp.errors import OptionError
from spearpp.model import Layer, Sees, find_layers, unwrapped
from spearpp.model.embeddings import find_tables
from spearpp.model.following import Following
from spearpp.model.front import FrontEnd
from spearpp.model.operations import Tracer, calls_of, is_batch_norm, is_linear
from spearpp.model.rest import nodes_after
from spearpp.types import Tensor
from spearpp.update import ClientUpdate
from spearpp.update.lazy import nonzero
from spearpp.update.names import plain

Optimiser = Literal["sgd", "adam"]
NOTHING = "nothing known"
FROM_FEATURES = str(Sees.INPUTS_FROM_FEATURES)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers that show that a model has convolutions, so that more pooling is possible."""
RATES = {"sgd": 0.01, "adam": 1e-3}
"""Learning rate of the simulated client. Design choice: the common defaults."""
PROBES = 8
"""Number of random inputs that show how many features are not zero. A design choice: a median needs a few."""
MAX_INPUTS = 2**28
"""Largest number of input values of the simulated batch. Design choice: 1 GiB in float32."""


@dataclass(frozen=True)
class Forecast:
    """What one layer or embedding table could reveal."""

    layer: str
    reveals: str
    """Inputs, inputs from features, features, labels and features, vocabulary, or nothing known."""
    largest_batch: int | None
    """The counting bound on the batch size. None means any batch size; 0 if the layer reveals nothing."""
    reason: str


@dataclass(frozen=True)
class Preflight:
    """The forecasts of all layers, and the audit of a simulated client."""

    forecasts: list[Forecast]
    batch: int
    simulated: AuditResult
    convolutions: bool = False
    """Whether the model has convolutions, so that pooling can reduce its features."""

    @property
    def exposed(self) -> list[Forecast]:
        """The layers and tables that could reveal something at this batch size."""
        return [each for each in self.forecasts if each.largest_batch is None or each.largest_batch >= self.batch]

    @property
    def advice(self) -> list[str]:
        """Sentences about changes that would prevent what the layers could reveal, most effective first."""
        bounded = [each.largest_batch for each in self.exposed if each.largest_batch is not None]
        sentences = []
        if any(each.reveals == "vocabulary" for each in self.exposed):
            sentences.append("Freeze the embedding, or add noise to all its rows: no batch size hides the vocabulary.")
        revealed = {each.reveals for each in self.exposed}
        if FROM_FEATURES in revealed and "inputs" not in revealed:
            example = ", for example by more pooling" if self.convolutions else ""
            sentences.append(
                f"Let the first Linear layer see fewer features than an input has values{example}: "
                "the features then do not determine the inputs."
            )
        if bounded:
            sentences.append(
                f"Train on more than {max(bounded):,} samples, or sum the updates of clients that together have more: "
                "one update then no longer determines the samples."
            )
        if self.exposed:
            sentences.append("Add calibrated noise (DP-SGD) before an update leaves the client, and audit the result.")
        return sentences


def preflight(
    model: nn.Module,
    shape: Sequence[int],
    batch: int,
    *,
    optimizer: Optimiser = "sgd",
    epochs: int | None = None,
    budget: float | None = 60.0,
    generator: torch.Generator | None = None,
) -> Preflight:
    """Predict what each layer of a model could reveal, and audit a simulated client.

    Args:
        model: the network: a classifier with the outputs (batch, classes), one class per position with (batch,
            classes, positions), or one output per sample for two classes.
        shape: shape of one input, without the batch. For a model that starts with an embedding, the number of tokens.
        batch: number of samples of the client.
        optimizer: "sgd" or "adam".
        epochs: number of passes over the batch, after which the client sends weights. None means one gradient for SGD,
            and one step for Adam.
        budget: seconds for the simulated audit, or None.
        generator: source of randomness; None is a generator with seed 0.

    Raises:
        OptionError: if an option is out of range, or the model does not accept such inputs or is not a classifier.

    >>> net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    >>> report = preflight(net, [20], 4)
    >>> [(each.layer, each.reveals, each.largest_batch) for each in report.forecasts]
    [('0', 'inputs', 20), ('2', 'labels and features', 2)]
    """
    if optimizer not in RATES:
        raise OptionError(f"optimizer={optimizer!r}: expected one of {', '.join(RATES)}")
    if batch < 1 or (epochs is not None and epochs < 1) or not shape or min(shape) < 1:
        raise OptionError(f"shape={tuple(shape)}, batch={batch}, epochs={epochs}: expected positive numbers")
    if math.prod(shape) * batch > MAX_INPUTS:
        raise OptionError(f"{batch} inputs of shape {tuple(shape)} have more than {MAX_INPUTS:,} values")
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    update, rows = _simulate(model, tuple(shape), batch, optimizer, epochs, generator)
    one_step = optimizer == "sgd" and epochs in (None, 1)
    forecasts = []
    for layer in find_layers(model, update):
        count = rows.get(layer.name, 1)
        forecast = _of_layer(layer, model, update, count, optimizer, one_step)
        forecasts.append(_with_front(forecast, layer, model, tuple(shape)) if count == 1 else forecast)
    for table in find_tables(model, update):
        known = Forecast(table.name, "vocabulary", None, "only the rows that are looked up get a gradient")
        forecasts.append(known if table.why_not is None else Forecast(table.name, NOTHING, 0, table.why_not))
    simulated = audit(update, model, budget=budget, batch_size=batch, input_shape=tuple(shape), generator=generator)
    convolutions = any(isinstance(each, CONVOLUTIONS) for each in model.modules())
    return Preflight(forecasts, batch, simulated, convolutions)


def _simulate(
    model: nn.Module, shape: tuple[int, ...], batch: int, optimizer: str, epochs: int | None, generator: torch.Generator
) -> tuple[ClientUpdate, dict[str, int]]:
    """Train a copy of the model on random inputs.

    Return the update, and how many rows each Linear layer sees of each sample: the number of tokens or patches, or 1.
    """
    local = copy.deepcopy(model).train()
    rows: dict[str, int] = {}
    for name, module in local.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(partial(_count_rows, rows, plain(name), batch))
    inputs = numbers = torch.randn(batch, *shape, generator=generator)
    outputs = None
    sizes = [each.num_embeddings for each in local.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)]
    tokens = torch.randint(min(sizes, default=1), (batch, *shape), generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**31, (1,), generator=generator)))
        for given in (tokens, numbers) if sizes else (numbers,):
            try:
                inputs, outputs = given, local(given)
                break
            except Exception as error:  # forward is user code and may raise anything
                failure = error
        if outputs is None:
            raise OptionError(f"the model does not accept inputs of shape {(batch, *shape)}: {failure}") from failure
        loss = _random_loss(outputs, batch, generator)
        local = copy.deepcopy(model).train()  # without the running statistics of the first pass
        trained = [each for each in local.parameters() if each.requires_grad]
        if not trained:
            raise OptionError("every parameter of the model is frozen, so there is nothing to train")
        rate = RATES[optimizer]
        step = torch.optim.SGD(trained, rate) if optimizer == "sgd" else torch.optim.Adam(trained, rate)
        for _ in range(epochs or 1):
            step.zero_grad()
            loss(local(inputs)).backward()
            if optimizer == "sgd" and epochs is None:
                return ClientUpdate.from_gradients(local), rows
            step.step()
    lr = rate if optimizer == "sgd" else None
    return ClientUpdate.from_weights(model, local, lr=lr, steps=epochs or 1), rows


def _count_rows(rows: dict[str, int], name: str, batch: int, _: nn.Module, args: tuple[Tensor, ...]) -> None:
    rows[name] = max(1, math.prod(args[0].shape[:-1]) // batch)


def _random_loss(outputs: object, batch: int, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    """Return the loss of a classifier with random labels: cross-entropy, or binary cross-entropy for one output."""
    if not isinstance(outputs, Tensor) or outputs.ndim < 1 or len(outputs) != batch:
        raise OptionError("the model is not a classifier: its output must be a tensor with one row per sample")
    if outputs.numel() == batch:
        answers = torch.randint(2, outputs.shape, generator=generator).to(outputs.dtype)
        probabilities = bool(((outputs >= 0) & (outputs <= 1)).all())
        binary = functional.binary_cross_entropy if probabilities else functional.binary_cross_entropy_with_logits
        return lambda given: binary(given, answers)
    if outputs.ndim < 2 or outputs.shape[1] < 2:
        raise OptionError(f"the model is not a classifier: its output has the shape {tuple(outputs.shape)}")
    labels = torch.randint(outputs.shape[1], (batch, *outputs.shape[2:]), generator=generator)
    return lambda given: functional.cross_entropy(given, labels)


def _of_layer(
    layer: Layer, model: nn.Module, update: ClientUpdate, rows: int, optimizer: str, one_step: bool
) -> Forecast:
    """Return what a Linear layer could reveal that sees this number of rows of each sample."""
    if layer.weight not in update.gradients or not nonzero(update.gradients, layer.weight):
        return Forecast(layer.name, NOTHING, 0, layer.reason)
    if optimizer == "adam":
        return Forecast(layer.name, NOTHING, 0, "Adam hides the gradient of the layer")
    reveals = "inputs" if layer.sees != "features" else "labels and features" if layer.output else "features"
    if not layer.qualifies and rows > 1:
        return Forecast(layer.name, NOTHING, 0, f"{layer.reason}; it sees {rows:,} rows of each sample")
    if not layer.qualifies:
        reason = f"{layer.reason}; the gradient of a single sample has rank one"
        return Forecast(layer.name, reveals if layer.bias else NOTHING, int(layer.bias is not None), reason)
    if layer.equations and not one_step:
        reason = f"{layer.reason}, but they hold for one step only; a single sample may be visible"
        return Forecast(layer.name, reveals, 1, reason)
    if _batch_norm_follows(layer, model):
        return Forecast(layer.name, NOTHING, 0, f"{layer.reason}; BatchNorm behind it mixes the samples of a batch")
    bound = counting_bound(layer, model, update)
    if rows == 1:
        return Forecast(layer.name, reveals, bound, layer.reason)
    reason = f"{layer.reason}; up to {bound:,} rows, and it sees {rows:,} rows of each sample"
    return Forecast(layer.name, reveals, bound // rows, reason)


def _batch_norm_follows(layer: Layer, model: nn.Module) -> bool:
    """Return whether BatchNorm comes between the layer and the next Linear layer, or anywhere behind for equations."""
    try:
        model = unwrapped(model)
        calls = calls_of(Tracer().trace(model), layer.name)
    except Exception:  # forward is user code and may raise anything when it runs on symbols
        return False
    for start in calls:
        for node in nodes_after(model, start)[0]:
            module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
            if module is not None and is_batch_norm(module):
                return True
            if is_linear(module) and not layer.equations:
                return False
    return False


def _with_front(forecast: Forecast, layer: Layer, model: nn.Module, shape: tuple[int, ...]) -> Forecast:
    """Return the forecast of a layer with features, with what they say about the inputs of the model."""
    if layer.sees != Sees.FEATURES or not forecast.largest_batch or not layer.qualifies:
        return forecast
    try:
        front = FrontEnd(unwrapped(model), layer.name, shape)
        drawn = torch.randn(PROBES, front.unknowns, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        count = int((front(drawn) != 0).sum(1).median())
    except OptionError as error:
        return replace(forecast, reason=f"{forecast.reason}; the inputs do not follow: {error}")
    if front.batch_norm:
        why = "BatchNorm mixes the samples of a batch in training mode, so the inputs do not follow"
        return replace(forecast, reason=f"{forecast.reason}; {why}")
    follow = count > front.unknowns and not layer.output
    counts = f"about {count:,} of {front.features:,} features are not zero, for {front.unknowns:,} unknowns"
    reveals = FROM_FEATURES if follow else forecast.reveals
    return replace(forecast, reveals=reveals, reason=f"{forecast.reason}; {counts}")


def counting_bound(layer: Layer, model: nn.Module, update: ClientUpdate) -> int:
    """Return the largest batch for which the gradients give at least as many equations as there are unknowns.

    A batch of b samples leaves m - b equations for the signals of the layer, and for every later Linear layer whose
    gradient can show b samples the equations of its inputs and of its signals. The unknowns are b - 1. The inputs must
    also be linearly independent, so b is at most the number of inputs, and the gradient must have a lower rank than m.
    """
    later: list[tuple[int, int]] = []
    try:
        following = Following.of_model(model, update, layer)
        later = [(int(each[2].shape[0]), int(each[2].shape[1])) for each in following.layers.values()]
    except OptionError:  # nothing behind the layer can be computed from it alone: only its own signals remain
        pass
    for b in range(min(layer.neurons - 1, layer.features), 1, -1):
        equations = layer.neurons - b - layer.output
        equations += sum(outputs + inputs + 1 - 2 * b for outputs, inputs in later if min(outputs, inputs + 1) > b)
        if equations >= b - 1:
            return b
    return 1
