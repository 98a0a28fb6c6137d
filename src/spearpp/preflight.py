"""What an update of a model could reveal, before any training: counting bounds, and an audit of a simulated client.

The counting bound of a layer is the largest batch for which the gradients give at least as many equations as there are
unknowns (docs/method.md). A batch above the bound is not determined by one update. A batch below the bound may be
recovered, if a search finds the samples. The simulated client trains on random inputs with the model's own weights.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from spearpp.auditing import AuditResult, audit
from spearpp.errors import OptionError
from spearpp.model import Layer, find_layers
from spearpp.model.embeddings import Table, find_tables
from spearpp.model.following import Following
from spearpp.types import Tensor
from spearpp.update import ClientUpdate
from spearpp.update.lazy import nonzero

OPTIMISERS = ("sgd", "adam")
NOTHING = "nothing known"
RATES = {"sgd": 0.01, "adam": 1e-3}
"""Learning rate of the simulated client. Design choice: the common defaults."""
MAX_INPUTS = 2**28
"""Largest number of input values of the simulated batch. Design choice: 1 GiB in float32."""


@dataclass(frozen=True)
class Forecast:
    """What one layer or embedding table could reveal."""

    layer: str
    reveals: str
    """What it could reveal: inputs, features, labels and features, vocabulary, or nothing that this audit recovers."""
    largest_batch: int | None
    """The counting bound on the batch size. None means any batch size; 0 if the layer reveals nothing."""
    reason: str


@dataclass(frozen=True)
class Preflight:
    """The forecasts of all layers, and the audit of a simulated client."""

    forecasts: list[Forecast]
    batch: int
    simulated: AuditResult

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
            sentences.append(
                "Freeze the embedding, or add noise to all of its rows: no batch size hides the vocabulary."
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
    optimizer: str = "sgd",
    epochs: int | None = None,
    budget: float | None = 60.0,
    generator: torch.Generator | None = None,
) -> Preflight:
    """Say which layers of a model could leak what, and audit a simulated client.

    Args:
        model: the network, a classifier.
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
    if optimizer not in OPTIMISERS:
        raise OptionError(f"optimizer={optimizer!r}: expected one of {', '.join(OPTIMISERS)}")
    if batch < 1 or (epochs is not None and epochs < 1) or not shape or min(shape) < 1:
        raise OptionError(f"shape={tuple(shape)}, batch={batch}, epochs={epochs}: expected positive numbers")
    if math.prod(shape) * batch > MAX_INPUTS:
        raise OptionError(f"{batch} inputs of shape {tuple(shape)} have more than {MAX_INPUTS:,} values")
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    update = _simulate(model, tuple(shape), batch, optimizer, epochs, generator)
    one_step = optimizer == "sgd" and epochs in (None, 1)
    forecasts = [_of_layer(each, model, update, optimizer, one_step) for each in find_layers(model, update)]
    forecasts += [_of_table(each) for each in find_tables(model, update)]
    simulated = audit(update, model, budget=budget, batch_size=batch, generator=generator)
    return Preflight(forecasts, batch, simulated)


def _simulate(
    model: nn.Module, shape: tuple[int, ...], batch: int, optimizer: str, epochs: int | None, generator: torch.Generator
) -> ClientUpdate:
    """Train a copy of the model on random inputs, and return the update."""
    local = copy.deepcopy(model).train()
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
        if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != batch or outputs.shape[1] < 2:
            raise OptionError("the model is not a classifier: its output must have the shape (batch, classes)")
        labels = torch.randint(outputs.shape[1], (batch,), generator=generator)
        local = copy.deepcopy(model).train()  # without the running statistics of the first pass
        trained = [each for each in local.parameters() if each.requires_grad]
        if not trained:
            raise OptionError("every parameter of the model is frozen, so there is nothing to train")
        rate = RATES[optimizer]
        step = torch.optim.SGD(trained, rate) if optimizer == "sgd" else torch.optim.Adam(trained, rate)
        for _ in range(epochs or 1):
            step.zero_grad()
            functional.cross_entropy(local(inputs), labels).backward()
            if optimizer == "sgd" and epochs is None:
                return ClientUpdate.from_gradients(local)
            step.step()
    return ClientUpdate.from_weights(model, local, lr=rate if optimizer == "sgd" else None, steps=epochs or 1)


def _of_layer(layer: Layer, model: nn.Module, update: ClientUpdate, optimizer: str, one_step: bool) -> Forecast:
    """Return what a Linear layer could reveal."""
    if layer.weight not in update.gradients or not nonzero(update.gradients, layer.weight):
        return Forecast(layer.name, NOTHING, 0, layer.reason)
    if optimizer == "adam":
        return Forecast(layer.name, NOTHING, 0, "Adam hides the gradient of the layer")
    reveals = "inputs" if layer.sees != "features" else "labels and features" if layer.output else "features"
    if not layer.qualifies:
        reason = f"{layer.reason}; the gradient of a single sample has rank one"
        return Forecast(layer.name, reveals if layer.bias else NOTHING, int(layer.bias is not None), reason)
    if layer.equations and not one_step:
        reason = f"{layer.reason}, but they hold for one step only; a single sample may be visible"
        return Forecast(layer.name, reveals, 1, reason)
    return Forecast(layer.name, reveals, counting_bound(layer, model, update), layer.reason)


def _of_table(table: Table) -> Forecast:
    """Return what an embedding table could reveal."""
    if table.why_not is not None:
        return Forecast(table.name, NOTHING, 0, table.why_not)
    return Forecast(table.name, "vocabulary", None, "only the rows that are looked up get a gradient")


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
