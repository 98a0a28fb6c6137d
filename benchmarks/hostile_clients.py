"""Clients that try to break a certificate, each with the true inputs of its first Linear layer.

A family is a function from a random generator to a ``HostileClient``. Forward hooks record the inputs of the layer, and
backward hooks record the gradients with respect to its outputs. ``benchmarks.hostile`` uses both to decide which
samples can be recovered.
"""

import copy
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional

from spearpp import ClientUpdate
from spearpp.simulate import mlp

Loss = Callable[[Tensor], Tensor]
"""Maps the outputs of a model to the loss."""
Family = Callable[[torch.Generator], "HostileClient"]


@dataclass(frozen=True, eq=False)
class HostileClient:
    """An update, and the true inputs, gradients and activation patterns of its first Linear layer."""

    model: nn.Module
    update: ClientUpdate
    layer: str
    """The name of the first Linear layer, as ``find_layers`` reports it."""
    inputs: Tensor
    """All inputs of the layer over all local steps, (rows, n)."""
    signals: Tensor
    """Gradient dL/dz of each input, (rows, m)."""
    fires: Tensor
    """Activation pattern z > 0 of each input, (rows, m)."""
    samples: int = 0
    """Number of samples of the client."""
    pass_model: bool = True
    """Whether the audit is given the model."""
    equations: bool = False
    """Whether no ReLU follows the layer, so that the audit solves the equations of the network. Samples are then merged
    whatever neurons they activate, and the audit chooses its own search."""
    said: int = 0
    """The number of samples that the audit is given, if it is wrong; 0 for the true number."""


FAMILIES: dict[str, Family] = {}
"""All families by name. Their order determines their seeds (``benchmarks.hostile.seed_of``)."""


def family(name: str) -> Callable[[Family], Family]:
    """Decorator: add a function to ``FAMILIES``."""

    def enter(function: Family) -> Family:
        FAMILIES[name] = function
        return function

    return enter


class Recorder:
    """Records the inputs, the activation patterns and the output gradients of a Linear layer."""

    def __init__(self, layer: nn.Module) -> None:
        self.inputs: list[Tensor] = []
        self.signals: list[Tensor] = []
        self.fires: list[Tensor] = []
        self.handle = layer.register_forward_hook(self._forward)

    def _forward(self, _module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
        # The hook returns a copy of the output, because an in-place activation would change the recorded one.
        self.inputs.append(given[0].detach().reshape(-1, given[0].shape[-1]).clone())
        self.fires.append((output.detach() > 0).reshape(-1, output.shape[-1]))
        if output.requires_grad:
            output.register_hook(lambda grad: self.signals.append(grad.reshape(-1, grad.shape[-1]).clone()))
        return output.clone()

    def stop(self) -> tuple[Tensor, Tensor, Tensor]:
        """Remove the hook, and return inputs, signals and activation patterns."""
        self.handle.remove()
        return torch.cat(self.inputs), torch.cat(self.signals), torch.cat(self.fires)


def first_linear(model: nn.Module) -> tuple[str, nn.Linear]:
    """Return the first Linear layer of a model and its name."""
    return next((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))


def one_step(model: nn.Module, x: Tensor, loss: Loss, *, pass_model: bool = True) -> HostileClient:
    """Return a FedSGD client, which sends one gradient."""
    name, layer = first_linear(model)
    recorder = Recorder(layer)
    value = loss(model(x))
    names, parameters = zip(*[(n, p) for n, p in model.named_parameters() if p.requires_grad], strict=True)
    gradients = torch.autograd.grad(value, parameters, allow_unused=True)
    used = {n: g for n, g in zip(names, gradients, strict=True) if g is not None}
    inputs, signals, fires = recorder.stop()
    update = ClientUpdate.from_gradients(model, used)
    return HostileClient(model, update, name, inputs, signals, fires, len(x), pass_model)


def local_steps(
    model: nn.Module,
    steps: Iterable[tuple[Tensor, Loss]],
    rate: float,
    *,
    say_rate: bool = True,
    optimiser: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    samples: int,
) -> HostileClient:
    """Return a FedAvg client, which sends its weights after local steps.

    With ``say_rate=False``, the update does not contain the learning rate.
    """
    local = copy.deepcopy(model)
    name, layer = first_linear(local)
    recorder = Recorder(layer)
    stepping = optimiser(local.parameters(), lr=rate)
    for x, loss in steps:
        stepping.zero_grad()
        loss(local(x)).backward()
        stepping.step()
    inputs, signals, fires = recorder.stop()
    update = ClientUpdate.from_weights(model, local, lr=rate if say_rate else None)
    return HostileClient(model, update, name, inputs, signals, fires, samples)


def with_noise(client: HostileClient, level: float, g: torch.Generator) -> HostileClient:
    """Return the client with Gaussian noise of standard deviation ``level`` on its gradients."""
    sent = {n: v + level * torch.randn(v.shape, generator=g) for n, v in client.update.gradients.items()}
    return replace(client, update=ClientUpdate.from_gradients(client.model, sent))


def sent_as(client: HostileClient, dtype: torch.dtype) -> HostileClient:
    """Return the client with its gradients in another dtype."""
    sent = {name: each.to(dtype) for name, each in client.update.gradients.items()}
    return replace(client, update=ClientUpdate.from_gradients(client.model, sent))


def entropy(labels: Tensor, **options: Any) -> Loss:
    """Return the cross-entropy loss for these labels."""
    return lambda outputs: functional.cross_entropy(outputs, labels, **options)


def weighted(weights: Tensor, labels: Tensor, **options: Any) -> Loss:
    """Return the mean of the cross-entropy of all samples, each with its own weight."""
    return lambda outputs: (weights * functional.cross_entropy(outputs, labels, reduction="none", **options)).mean()


def with_copies(x: Tensor, y: Tensor, copies: int, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Append copies of the first samples, multiplied by a factor, with the same labels."""
    return with_rows(x, y, factor * x[:copies])


def with_rows(x: Tensor, y: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Append changed versions of the first samples, with the same labels."""
    return torch.cat([x, rows]), torch.cat([y, y[: len(rows)]])


def moved(model: nn.Module, level: Callable[[], float], g: torch.Generator) -> nn.Module:
    """Return a copy of a model whose weights differ by ``level`` times their standard deviation."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for each in other.parameters():
            each.add_(level() * each.std() * torch.randn(each.shape, generator=g))
    return other


# --- Data -----------------------------------------------------------------------------------------------------------

TABLES: dict[str, numpy.ndarray] = {}
"""Data sets that ``use_tables`` has loaded from a file, for machines without scikit-learn and scikit-image."""


def use_tables(file: str) -> None:
    """Load the data sets from a file that ``save_tables`` wrote."""
    with numpy.load(file) as arrays:
        TABLES.update({name: arrays[name] for name in arrays.files})


def save_tables(file: str) -> None:
    """Write all data sets to an npz file."""
    names = ("digits", "wine", "cancer", "diabetes", "iris", "images")
    arrays = {}
    for name in names:
        x, y = table(name)
        arrays[f"{name}_x"], arrays[f"{name}_y"] = x.numpy(), y.numpy()
    numpy.savez_compressed(file, allow_pickle=False, **arrays)


@cache
def table(name: str) -> tuple[Tensor, Tensor]:
    """Return a data set in its original units: inputs (count, n) and labels or targets (count,)."""
    if f"{name}_x" in TABLES:
        return torch.from_numpy(TABLES[f"{name}_x"]), torch.from_numpy(TABLES[f"{name}_y"])
    if name == "images":
        from spearpp.simulate import photographs

        batch = photographs(600, size=16, normalise=False, generator=torch.Generator().manual_seed(99))
        return batch.inputs.float(), batch.labels
    from sklearn import datasets

    loaded = getattr(datasets, "load_breast_cancer" if name == "cancer" else f"load_{name}")()
    return torch.from_numpy(numpy.asarray(loaded.data)).float(), torch.from_numpy(numpy.asarray(loaded.target))


def draw(name: str, b: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sample b rows of a data set without replacement."""
    x, y = table(name)
    rows = torch.randperm(len(x), generator=g)[:b]
    return x[rows], y[rows]


def images(b: int, g: torch.Generator, *, normalise: bool = True) -> tuple[Tensor, Tensor]:
    """Sample colour images of 16 x 16 pixels (768 numbers), with random labels of ten classes."""
    x, _ = draw("images", b, g)
    return ((x - 0.45) / 0.25 if normalise else x), torch.randint(10, (b,), generator=g)


def number(low: int, high: int, g: torch.Generator) -> int:
    """Sample a whole number from low to high, both included."""
    return int(torch.randint(low, high + 1, (), generator=g))


def uniform(low: float, high: float, g: torch.Generator) -> float:
    """Sample a number between low and high."""
    return low + (high - low) * float(torch.rand((), generator=g))


def pick(options: list[Any], g: torch.Generator) -> Any:
    """Sample one of the options."""
    return options[number(0, len(options) - 1, g)]


def standard(x: Tensor, name: str) -> Tensor:
    """Scale columns to mean 0 and standard deviation 1 over the data set."""
    whole, _ = table(name)
    return (x - whole.mean(0)) / whole.std(0).clamp_min(1e-6)


def minmax(x: Tensor, name: str) -> Tensor:
    """Scale columns to the range [0, 1] over the data set."""
    whole, _ = table(name)
    low, high = whole.amin(0), whole.amax(0)
    return (x - low) / (high - low).clamp_min(1e-6)


def trained(model: nn.Module, name: str, g: torch.Generator, *, steps: int = 300, scale: bool = True) -> nn.Module:
    """Train a model with SGD on a data set and return it."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        x, y = draw(name, 64, g)
        x = standard(x, name) if scale else x
        optimiser.zero_grad()
        functional.cross_entropy(model(x), y.long()).backward()
        optimiser.step()
    return model


def trained_on_images(model: nn.Module, g: torch.Generator, steps: int = 200) -> nn.Module:
    """Train a model with SGD on the images and return it."""
    x, y = table("images")
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        rows = torch.randperm(len(x), generator=g)[:64]
        optimiser.zero_grad()
        functional.cross_entropy(model((x[rows] - 0.45) / 0.25), y[rows].long() % 10).backward()
        optimiser.step()
    return model


# --- Ordinary clients, which must be certified ----------------------------------------------------------------------


@family("images, FedSGD")
def plain_images(g: torch.Generator) -> HostileClient:
    x, y = images(number(2, 24, g), g)
    return one_step(mlp(768, [200, 200], 10, generator=g), x, entropy(y))


@family("images, FedSGD, no model given")
def plain_images_without_model(g: torch.Generator) -> HostileClient:
    x, y = images(number(2, 24, g), g)
    return one_step(mlp(768, [200, 200], 10, generator=g), x, entropy(y), pass_model=False)


@family("digits, one hidden layer")
def plain_digits(g: torch.Generator) -> HostileClient:
    x, y = draw("digits", number(4, 16, g), g)
    return one_step(mlp(64, [pick([100, 200], g)], 10, generator=g), x / 16, entropy(y))


@family("wide layer, m=1000")
def wide(g: torch.Generator) -> HostileClient:
    x, y = images(number(30, 80, g), g)
    return one_step(mlp(768, [1000], 10, generator=g), x, entropy(y))


@family("two layers, b up to 0.45 m")
def near_half(g: torch.Generator) -> HostileClient:
    m = pick([60, 100, 160], g)
    x, y = images(int(m * uniform(0.2, 0.45, g)), g)
    return one_step(mlp(768, [m, m, m], 10, generator=g), x, entropy(y))


@family("FedAvg, images")
def fedavg_images(g: torch.Generator) -> HostileClient:
    b, epochs = number(4, 16, g), number(1, 4, g)
    x, y = images(b, g)
    return local_steps(mlp(768, [200, 200], 10, generator=g), [(x, entropy(y))] * epochs, 0.01, samples=b)


# --- Families from a bug report about wrong certificates ------------------------------------------------------------


@family("small layers, min-max table")
def small_table(g: torch.Generator) -> HostileClient:
    name, m, b = pick(["wine", "cancer", "iris"], g), number(12, 24, g), number(2, 6, g)
    x, y = draw(name, b, g)
    x = minmax(x, name)
    return one_step(mlp(x.shape[1], [m, m], 3, generator=g), x, entropy(y))


@family("small layers, raw pixels")
def small_pixels(g: torch.Generator) -> HostileClient:
    m, b = number(12, 24, g), number(2, 6, g)
    x, y = images(b, g, normalise=False)
    return one_step(mlp(768, [m, m], 10, generator=g), x, entropy(y))


@family("contrast copies, same label")
def contrast(g: torch.Generator) -> HostileClient:
    copies, factor = number(2, 4, g), pick([1.1, 1.3, 1.6, 2.0], g)
    x, y = images(8, g)
    x, y = with_copies(x, y, copies, factor)
    return one_step(mlp(768, [200], 10, generator=g), x, entropy(y))


@family("contrast copies, two hidden layers")
def contrast_deep(g: torch.Generator) -> HostileClient:
    copies, factor = number(1, 4, g), pick([1.02, 1.1, 1.3, 0.5], g)
    x, y = images(8, g)
    x, y = with_copies(x, y, copies, factor)
    return one_step(mlp(768, [200, 200], 10, generator=g), x, entropy(y))


@family("every image with a contrast copy")
def contrast_all(g: torch.Generator) -> HostileClient:
    factor = pick([1.01, 1.05, 1.1], g)
    x, y = with_copies(*images(6, g), 6, factor)
    return one_step(mlp(768, [200, 200], 10, generator=g), x, entropy(y))


@family("raw table with a column of 1e5, two classes")
def huge_column(g: torch.Generator) -> HostileClient:
    x, y = draw("cancer", 8, g)
    income = 1e5 * (0.2 + torch.rand(8, 1, generator=g))
    x = torch.cat([x, income], 1)
    return one_step(mlp(31, [pick([64, 128], g)], 2, generator=g), x, entropy(y))


@family("Kelvin, one output")
def kelvin(g: torch.Generator) -> HostileClient:
    b = number(3, 16, g)
    hours = torch.arange(24) / 24 * 2 * math.pi
    x = 285 + 8 * torch.randn(b, 1, generator=g) + 5 * torch.sin(hours + torch.rand(b, 1, generator=g))
    target = torch.randn(b, 1, generator=g)
    return one_step(mlp(24, [100], 1, generator=g), x, lambda out: functional.mse_loss(out, target))


@family("inputs of size 1e-3, two classes")
def tiny_inputs(g: torch.Generator) -> HostileClient:
    b = number(1, 8, g)
    x = 1e-3 * torch.randn(b, 40, generator=g)
    return one_step(mlp(40, [100], 2, generator=g), x, entropy(torch.randint(2, (b,), generator=g)))


class NormalisingLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.normalize(x, dim=1))


class NoisyLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.3 * torch.sin(37 * x))


class LinearWithReLU(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


@family("subclass of Linear")
def subclass(g: torch.Generator) -> HostileClient:
    x, y = images(number(4, 12, g), g)
    kind = pick([NormalisingLinear, NoisyLinear, LinearWithReLU], g)
    model = nn.Sequential(kind(768, 200), nn.ReLU(), nn.Linear(200, 10))
    for new, old in zip(model.parameters(), mlp(768, [200], 10, generator=g).parameters(), strict=True):
        new.data.copy_(old.data)
    client = one_step(model, x, entropy(y))
    if kind is NormalisingLinear:  # the true input is the one that the weights are multiplied with
        client = replace(client, inputs=functional.normalize(client.inputs, dim=1))
    if kind is NoisyLinear:
        client = replace(client, inputs=client.inputs + 0.3 * torch.sin(37 * client.inputs))
    return client


def temperatures(b: int, g: torch.Generator) -> Tensor:
    """Sample temperatures of b days, 24 hours each, in Celsius."""
    hours = torch.arange(24) / 24 * 2 * math.pi
    x = 12 + 8 * torch.randn(b, 1, generator=g) + 5 * torch.sin(hours + 0.5 * torch.rand(b, 1, generator=g))
    return x + 0.3 * torch.randn(b, 24, generator=g)


@family("temperatures in Celsius, two classes")
def celsius(g: torch.Generator) -> HostileClient:
    x = temperatures(16, g)
    return one_step(mlp(24, [pick([64, 128], g)], 2, generator=g), x, entropy(torch.randint(2, (16,), generator=g)))


@family("word counts, l1-normalised")
def word_shares(g: torch.Generator) -> HostileClient:
    b = number(6, 16, g)
    counts = torch.poisson(torch.rand(b, 300, generator=g) ** 6 * 3, generator=g)
    x = counts / counts.sum(1, keepdim=True).clamp_min(1)
    return one_step(mlp(300, [128], pick([2, 4], g), generator=g), x, entropy(torch.randint(2, (b,), generator=g)))


@family("trained, pairs 1 to 3 % apart")
def near_pairs(g: torch.Generator) -> HostileClient:
    x, y = images(8, g)
    x, y = with_rows(x, y, x[:3] * (1 + uniform(0.01, 0.03, g) * torch.randn(3, 768, generator=g)))
    model = trained_on_images(mlp(768, [200, 100], 10, generator=g), g, 60)
    return one_step(model, x, entropy(y))


@family("every image in a pair 1 % apart")
def all_pairs(g: torch.Generator) -> HostileClient:
    x, y = images(6, g)
    x, y = with_rows(x, y, x * (1 + uniform(0.003, 0.03, g) * torch.randn(6, 768, generator=g)))
    return one_step(mlp(768, [200, 100], 10, generator=g), x, entropy(y))


@family("augmented over local epochs")
def augmented_epochs(g: torch.Generator) -> HostileClient:
    x, y = images(number(4, 8, g), g)
    rate = pick([0.001, 0.01, 0.03], g)
    steps = [(x + 0.01 * torch.randn(x.shape, generator=g), entropy(y)) for _ in range(3)]
    return local_steps(
        mlp(768, [200, 100], 10, generator=g), steps, rate, say_rate=pick([True, False], g), samples=len(x)
    )


@family("rows that differ in one unit of one column")
def one_unit(g: torch.Generator) -> HostileClient:
    x, y = draw("wine", 8, g)
    copies = x[:3].clone()
    copies[:, number(0, 12, g)] += 1
    x, y = with_rows(x, y, copies)
    return one_step(mlp(13, [100, 50], 3, generator=g), standard(x, "wine"), entropy(y))


@family("constant images, trained network")
def constant_images(g: torch.Generator) -> HostileClient:
    x = torch.tensor([1.0, 2.0, -1.0])[:, None].expand(3, 768) * uniform(0.5, 1.5, g)
    model = trained_on_images(mlp(768, [200, 100], 10, generator=g), g, 60)
    return one_step(model, x.contiguous(), entropy(torch.randint(10, (3,), generator=g)))


@family("Dropout after ReLU")
def dropout(g: torch.Generator) -> HostileClient:
    x, y = images(number(8, 20, g), g)
    model = mlp(768, [200, 200], 10, generator=g)
    model = nn.Sequential(model[0], nn.ReLU(), nn.Dropout(pick([0.1, 0.2, 0.5], g)), model[2], nn.ReLU(), model[4])
    torch.manual_seed(number(0, 10**6, g))
    return one_step(model.train(), x, entropy(y))


def module(name: str, function: Callable[[Tensor], Tensor]) -> type[nn.Module]:
    """Return a class of modules that apply a function."""
    return type(name, (nn.Module,), {"forward": lambda _self, x: function(x)})


class ZeroPReLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prelu = nn.PReLU(init=0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.prelu(x)


SPELLINGS = [
    module("Times", lambda x: x * (x > 0)),
    module("Maximum", lambda x: torch.maximum(x, torch.zeros_like(x))),
    module("Where", lambda x: torch.where(x > 0, x, 0.0)),
    module("Threshold", lambda x: functional.threshold(x, 0.0, 0.0)),
    module("Relu6", functional.relu6),
    module("Leaky", lambda x: functional.leaky_relu(x, 0.0)),
    module("HalfSum", lambda x: (x + x.abs()) / 2),
    ZeroPReLU,
]
"""Modules that compute ReLU, or nearly ReLU, without ``nn.ReLU``."""


@family("ReLU in other words")
def spelling(g: torch.Generator) -> HostileClient:
    x, y = images(number(4, 12, g), g)
    model = mlp(768, [200, 100], 10, generator=g)
    relu = pick(SPELLINGS, g)
    return one_step(nn.Sequential(model[0], relu(), model[2], relu(), model[4]), x, entropy(y))


@family("one sample, any activation, no model")
def single(g: torch.Generator) -> HostileClient:
    x, y = images(1, g)
    model = mlp(768, [100], 10, generator=g)
    kind = pick([nn.GELU, nn.Tanh, nn.SiLU, nn.LeakyReLU, nn.Sigmoid], g)
    return one_step(nn.Sequential(model[0], kind(), model[2]), x, entropy(y), pass_model=pick([True, False], g))


# --- More families --------------------------------------------------------------------------------------------------


@family("one sample, ReLU")
def single_relu(g: torch.Generator) -> HostileClient:
    x, y = images(1, g)
    return one_step(mlp(768, [100, 100], 10, generator=g), x, entropy(y))


@family("one-hot rows, some equal")
def one_hot(g: torch.Generator) -> HostileClient:
    b = number(6, 14, g)
    groups = [torch.eye(k)[torch.randint(k, (b,), generator=g)] for k in (2, 3, 4)]
    x = torch.cat(groups, 1)
    return one_step(mlp(9, [pick([64, 128], g), 64], 3, generator=g), x, entropy(torch.randint(3, (b,), generator=g)))


@family("ordinal answers of 1 to 5")
def ordinal(g: torch.Generator) -> HostileClient:
    b = number(4, 12, g)
    x = torch.randint(1, 6, (b, 20), generator=g).float()
    return one_step(mlp(20, [128, 64], 4, generator=g), x, entropy(torch.randint(4, (b,), generator=g)))


@family("panel data, rows of one person")
def panel(g: torch.Generator) -> HostileClient:
    people = torch.randn(3, 20, generator=g).repeat_interleave(3, 0)
    year = torch.arange(3).repeat(3)[:, None] * pick([0.01, 0.1, 1.0], g)
    x = torch.cat([people, year], 1)
    y = torch.randint(2, (3,), generator=g).repeat_interleave(3)
    return one_step(mlp(21, [128, 32], 2, generator=g), x, entropy(y))


@family("raw table of mixed units")
def mixed_units(g: torch.Generator) -> HostileClient:
    x, y = draw(pick(["wine", "cancer"], g), number(4, 12, g), g)
    return one_step(mlp(x.shape[1], [100, 50], 3, generator=g), x, entropy(y))


@family("label smoothing")
def smoothing(g: torch.Generator) -> HostileClient:
    x, y = images(number(4, 16, g), g)
    x, y = with_copies(x, y, number(0, 3, g), 1.1)
    loss = entropy(y, label_smoothing=pick([0.1, 0.3], g))
    return one_step(mlp(768, [200, 100], 10, generator=g), x, loss)


@family("mixup")
def mixup(g: torch.Generator) -> HostileClient:
    b = number(4, 16, g)
    x, y = images(b, g)
    share, order = torch.rand(b, 1, generator=g), torch.randperm(b, generator=g)
    soft = share * functional.one_hot(y, 10) + (1 - share) * functional.one_hot(y[order], 10)
    mixed = share * x + (1 - share) * x[order]
    return one_step(mlp(768, [200, 100], 10, generator=g), mixed, entropy(soft))


@family("class weights and imbalance")
def imbalanced(g: torch.Generator) -> HostileClient:
    b = number(6, 16, g)
    x, y = images(b, g)
    y = torch.where(torch.rand(b, generator=g) < 0.8, 0, y)
    weight = torch.logspace(-2, 0, 10)
    return one_step(mlp(768, [200, 100], 10, generator=g), x, entropy(y, weight=weight))


class TwoHeads(nn.Module):
    def __init__(self, g: torch.Generator) -> None:
        super().__init__()
        self.body, self.first = mlp(768, [200], 100, generator=g), mlp(100, [50], 10, generator=g)
        self.second = mlp(100, [50], 1, generator=g)

    def forward(self, x: Tensor) -> Tensor:
        features = functional.relu(self.body(x))
        return torch.cat([self.first(features), self.second(features)], 1)


@family("two tasks at once")
def multi_task(g: torch.Generator) -> HostileClient:
    x, y = images(number(4, 14, g), g)
    x, y = with_copies(x, y, number(0, 3, g), 1.1)
    target = torch.randn(len(x), generator=g)

    def loss(out: Tensor) -> Tensor:
        return functional.cross_entropy(out[:, :10], y) + functional.mse_loss(out[:, 10], target)

    return one_step(TwoHeads(g), x, loss)


@family("regression")
def regression(g: torch.Generator) -> HostileClient:
    b = number(3, 12, g)
    x, y = draw("diabetes", b, g)
    x = standard(x, "diabetes") if pick([True, False], g) else x
    target = ((y - 150) / 80).float()[:, None]
    return one_step(mlp(10, [100, pick([50, 100], g)], 1, generator=g), x, lambda out: functional.mse_loss(out, target))


class TiedAutoencoder(nn.Module):
    def __init__(self, g: torch.Generator) -> None:
        super().__init__()
        self.encoder = first_linear(mlp(64, [100], 2, generator=g))[1]
        self.bias = nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(functional.relu(self.encoder(x)), self.encoder.weight.T, self.bias)


@family("tied weights")
def tied(g: torch.Generator) -> HostileClient:
    x, _ = draw("digits", number(2, 10, g), g)
    x = x / 16
    return one_step(TiedAutoencoder(g), x, lambda out: functional.mse_loss(out, x))


class SharedTwice(nn.Module):
    def __init__(self, g: torch.Generator) -> None:
        super().__init__()
        self.shared, self.head = mlp(64, [100], 2, generator=g)[0], mlp(200, [40], 10, generator=g)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x[:, :64], x[:, 64:]
        return self.head(torch.cat([functional.relu(self.shared(left)), functional.relu(self.shared(right))], 1))


@family("layer used twice")
def shared(g: torch.Generator) -> HostileClient:
    b = number(2, 8, g)
    first, y = draw("digits", b, g)
    second, _ = draw("digits", b, g)
    return one_step(SharedTwice(g), torch.cat([first, second], 1) / 16, entropy(y))


@family("overlapping windows of a series")
def windows(g: torch.Generator) -> HostileClient:
    b, n = number(4, 12, g), 32
    series = torch.randn(200, generator=g).cumsum(0) * pick([0.1, 1.0], g)
    start = number(0, 120, g)
    x = torch.stack([series[start + i : start + i + n] for i in range(b)])
    return one_step(mlp(n, [128, 64], 3, generator=g), x, entropy(torch.randint(3, (b,), generator=g)))


@family("bags of words")
def bags(g: torch.Generator) -> HostileClient:
    b = number(4, 12, g)
    x = torch.poisson(torch.rand(b, 200, generator=g) ** 8 * 4, generator=g)
    return one_step(mlp(200, [128, 64], 5, generator=g), x, entropy(torch.randint(5, (b,), generator=g)))


@family("exact repetitions")
def repeated(g: torch.Generator) -> HostileClient:
    x, y = images(number(4, 12, g), g)
    x, y = with_copies(x, y, number(1, 4, g))
    return one_step(mlp(768, [200, 100], 10, generator=g), x, entropy(y, reduction=pick(["mean", "sum"], g)))


@family("one image under two labels")
def two_labels(g: torch.Generator) -> HostileClient:
    x, y = images(number(4, 10, g), g)
    x, y = torch.cat([x, x[:2]]), torch.cat([y, (y[:2] + 1) % 10])
    return one_step(mlp(768, [200, 100], 10, generator=g), x, entropy(y))


@family("triplets 0.1 % apart")
def triplets(g: torch.Generator) -> HostileClient:
    x, y = images(6, g)
    noise = 10 ** uniform(-4, -2, g)
    more = torch.cat([x[:2] * (1 + noise * torch.randn(2, 768, generator=g)) for _ in range(2)])
    return one_step(mlp(768, [200, 100], 10, generator=g), torch.cat([x, more]), entropy(torch.cat([y, y[:2], y[:2]])))


@family("clipped sample by sample")
def clipped(g: torch.Generator) -> HostileClient:
    x, y = images(number(4, 12, g), g)
    weights = 0.2 + 0.8 * torch.rand(len(x), generator=g)
    return one_step(mlp(768, [200, 100], 10, generator=g), x, weighted(weights, y))


@family("sent as float16 or bfloat16, with contrast copies")
def half(g: torch.Generator) -> HostileClient:
    return sent_as(contrast_deep(g), pick([torch.float16, torch.bfloat16], g))


@family("noise, with near pairs")
def noisy(g: torch.Generator) -> HostileClient:
    x, y = images(8, g)
    x, y = with_rows(x, y, x[:2] * (1 + 0.02 * torch.randn(2, 768, generator=g)))
    client = one_step(mlp(768, [200, 100], 10, generator=g), x, entropy(y))
    return with_noise(client, 10 ** uniform(-7, -4, g), g)


class Residual(nn.Module):
    def __init__(self, g: torch.Generator) -> None:
        super().__init__()
        self.first, self.second, self.head = (mlp(n, [m], 1, generator=g)[0] for n, m in ((64, 64), (64, 64), (64, 10)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + functional.relu(self.first(x))
        return self.head(x + functional.relu(self.second(x)))


@family("residual blocks")
def residual(g: torch.Generator) -> HostileClient:
    x, y = draw("digits", number(3, 10, g), g)
    return one_step(Residual(g), x / 16, entropy(y))


@family("LayerNorm behind the ReLU")
def layer_norm(g: torch.Generator) -> HostileClient:
    x, y = images(number(4, 12, g), g)
    x, y = with_copies(x, y, number(0, 3, g), 1.2)
    model = mlp(768, [200, 100], 10, generator=g)
    return one_step(nn.Sequential(model[0], nn.ReLU(), nn.LayerNorm(200), model[2], nn.ReLU(), model[4]), x, entropy(y))


@family("multi-label, binary cross-entropy")
def multi_label(g: torch.Generator) -> HostileClient:
    b = number(4, 12, g)
    x, _ = images(b, g)
    target = (torch.rand(b, 10, generator=g) < 0.3).float()
    model = mlp(768, [200, 100], 10, generator=g)
    return one_step(model, x, lambda out: functional.binary_cross_entropy_with_logits(out, target))


@family("hinge loss")
def hinge(g: torch.Generator) -> HostileClient:
    b = number(4, 12, g)
    x, y = (images(b, g)) if pick([True, False], g) else draw("iris", b, g)
    classes = 10 if x.shape[1] == 768 else 3
    return one_step(mlp(x.shape[1], [128], classes, generator=g), x, lambda out: functional.multi_margin_loss(out, y))


class TokenBlock(nn.Module):
    def __init__(self, g: torch.Generator) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.embedding.weight.data = torch.randn(50, 32, generator=g)
        self.block, self.head = mlp(32, [128], 32, generator=g), mlp(32, [16], 4, generator=g)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head((x + self.block(x)).mean(1))


@family("tokens, with padding")
def tokens(g: torch.Generator) -> HostileClient:
    sentences = torch.randint(1, 50, (number(1, 4, g), 8), generator=g)
    sentences[:, -number(1, 4, g) :] = 0
    return one_step(TokenBlock(g), sentences, entropy(torch.randint(4, (len(sentences),), generator=g)))


@family("two classes, trained until sure")
def sure(g: torch.Generator) -> HostileClient:
    model = trained(mlp(30, [100, 50], 2, generator=g), "cancer", g, steps=400)
    x, y = draw("cancer", number(4, 14, g), g)
    return one_step(model, standard(x, "cancer"), entropy(y))


@family("two classes, fresh network")
def two_classes(g: torch.Generator) -> HostileClient:
    x, y = draw("cancer", number(4, 16, g), g)
    return one_step(mlp(30, [pick([100, 200], g)], 2, generator=g), standard(x, "cancer"), entropy(y))


@family("black and white pictures")
def binary(g: torch.Generator) -> HostileClient:
    x, y = draw("digits", number(4, 14, g), g)
    return one_step(mlp(64, [128, 64], 10, generator=g), (x > 8).float(), entropy(y))


@family("time stamps of 1.7e9")
def stamps(g: torch.Generator) -> HostileClient:
    b = number(3, 8, g)
    x = torch.cat([torch.randn(b, 10, generator=g), 1.7e9 + 1e5 * torch.rand(b, 1, generator=g)], 1)
    return one_step(mlp(11, [100, 50], 4, generator=g), x, entropy(torch.randint(4, (b,), generator=g)))


@family("layers without bias, contrast copies")
def no_bias(g: torch.Generator) -> HostileClient:
    x, y = images(8, g)
    x, y = with_copies(x, y, number(0, 3, g), 1.3)
    return one_step(mlp(768, [200, 100], 10, bias=False, generator=g), x, entropy(y))


@family("weights of another round")
def another_round(g: torch.Generator) -> HostileClient:
    client = plain_images(g)
    model = moved(client.model, lambda: 10 ** uniform(-4, -1, g), g)
    return replace(client, model=model, update=ClientUpdate.from_gradients(model, client.update.gradients))


@family("momentum, weight decay, small steps")
def momentum(g: torch.Generator) -> HostileClient:
    x, y = images(number(4, 10, g), g)

    def optimiser(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=pick([0.0, 1e-4], g))

    steps = [(x, entropy(y))] * number(1, 4, g)
    return local_steps(
        mlp(768, [200, 100], 10, generator=g), steps, 0.01, say_rate=False, optimiser=optimiser, samples=len(x)
    )


@family("mini-batches over an epoch, near pairs")
def mini_batches(g: torch.Generator) -> HostileClient:
    x, y = images(8, g)
    x, y = with_rows(x, y, x[:4] * (1 + 0.02 * torch.randn(4, 768, generator=g)))
    order = torch.randperm(12, generator=g)
    steps = [(x[rows], entropy(y[rows])) for rows in order.split(4)]
    return local_steps(mlp(768, [200, 100], 10, generator=g), steps, 0.01, samples=12)


@family("very small layers, m from 8")
def very_small(g: torch.Generator) -> HostileClient:
    m, b = number(8, 20, g), number(1, 4, g)
    x = torch.rand(b, 6, generator=g) if pick([True, False], g) else torch.randn(b, 6, generator=g)
    return one_step(mlp(6, [m, m], 3, generator=g), x, entropy(torch.randint(3, (b,), generator=g)))


@family("half of 0.5 m, one hidden layer")
def dense_batch(g: torch.Generator) -> HostileClient:
    m = pick([40, 80, 120], g)
    x, y = images(int(m * uniform(0.15, 0.5, g)), g)
    return one_step(mlp(768, [m], 10, generator=g), x, entropy(y))


@family("faint samples, losses 1e-6 to 1")
def faint(g: torch.Generator) -> HostileClient:
    b = number(6, 14, g)
    x, y = images(b, g)
    strength = 10 ** (-6 * torch.rand(b, generator=g))
    return one_step(mlp(768, [200, 100], 10, generator=g), x, weighted(strength, y))


@family("faint near copies")
def faint_copies(g: torch.Generator) -> HostileClient:
    x, y = images(8, g)
    near = x[:3] * (1 + 0.1 * torch.randn(3, 768, generator=g))
    strength = torch.cat([torch.ones(8), torch.full((3,), 10 ** uniform(-5, -1, g))])
    x, y = with_rows(x, y, near)
    return one_step(mlp(768, [200, 100], 10, generator=g), x, weighted(strength, y))


@family("opposite labels, one pattern")
def opposite(g: torch.Generator) -> HostileClient:
    b = number(2, 6, g)
    centre = torch.randn(40, generator=g)
    x = centre + 10 ** uniform(-4, -1, g) * torch.randn(b, 40, generator=g)
    return one_step(mlp(40, [100], 2, generator=g), x, entropy(torch.arange(b) % 2))


@family("temperatures in Celsius, local steps")
def temperatures_locally(g: torch.Generator) -> HostileClient:
    x, y = temperatures(16, g), torch.randint(2, (16,), generator=g)
    model = mlp(24, [pick([64, 128], g)], pick([2, 5], g), generator=g)
    return local_steps(model, [(x, entropy(y))] * number(2, 5, g), 0.003, samples=16)


@family("temperatures in Celsius, noise")
def temperatures_with_noise(g: torch.Generator) -> HostileClient:
    x, y = temperatures(number(3, 12, g), g), torch.randint(2, (12,), generator=g)
    client = one_step(mlp(24, [pick([64, 128], g)], pick([2, 5], g), generator=g), x, entropy(y[: len(x)]))
    size = float(client.update.gradients[client.layer + ".weight"].square().mean().sqrt())
    return with_noise(client, size * 10 ** uniform(-6, -1, g), g)


# --- Activations other than ReLU, which are inverted by the equations of the network ---------------------------------

ACTIVATIONS = (nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.Softplus, nn.LeakyReLU, nn.Mish)
"""Activations of the families whose name begins with "equations"."""


def seeded(g: torch.Generator) -> None:
    """Seed PyTorch's own generator, from which modules take their weights."""
    torch.manual_seed(number(0, 2**30, g))


def smooth(
    n: int, hidden: list[int], c: int, g: torch.Generator, *, act: Any = None, bias: bool = True
) -> nn.Sequential:
    """Return a fully connected network with one activation, or with a random one."""
    seeded(g)
    act = pick(list(ACTIVATIONS), g) if act is None else act
    layers: list[nn.Module] = []
    for before, after in zip([n, *hidden], hidden, strict=False):
        layers += [nn.Linear(before, after, bias=bias), act()]
    return nn.Sequential(*layers, nn.Linear([n, *hidden][-1], c, bias=bias))


def solved(client: HostileClient) -> HostileClient:
    """Mark a client whose layer is inverted by the equations of the network."""
    return replace(client, equations=True)


def samples(b: int, n: int, g: torch.Generator, c: int = 10) -> tuple[Tensor, Tensor]:
    """Sample b inputs from a normal distribution, and labels."""
    return torch.randn(b, n, generator=g), torch.randint(c, (b,), generator=g)


def shape(g: torch.Generator) -> tuple[int, list[int]]:
    """Sample a number of features and the widths of the hidden layers."""
    width = pick([30, 50, 80], g)
    return number(20, 60, g), [width] * number(1, 3, g)


def equations(name: str) -> Callable[[Callable[[torch.Generator, int, list[int]], HostileClient]], Family]:
    """Decorator: add a family whose layer is inverted by the equations of the network.

    The function also gets a random number of features and random widths of the hidden layers.
    """

    def enter(function: Callable[[torch.Generator, int, list[int]], HostileClient]) -> Family:
        return family(f"equations: {name}")(lambda g: solved(function(g, *shape(g))))

    return enter


@equations("random samples")
def eq_plain(g: torch.Generator, n: int, hidden: list[int]) -> HostileClient:
    x, y = samples(number(3, 20, g), n, g)
    return one_step(smooth(n, hidden, 10, g), x, entropy(y))


@equations("near copies")
def eq_near(g: torch.Generator, n: int, hidden: list[int]) -> HostileClient:
    x, y = samples(number(3, 8, g), n, g)
    copies = number(1, 3, g)
    x, y = with_rows(x, y, x[:copies] + 10 ** uniform(-5, -1, g) * torch.randn(copies, n, generator=g))
    return one_step(smooth(n, hidden, 10, g), x, entropy(y))


@equations("every sample with a near copy")
def eq_near_all(g: torch.Generator, n: int, hidden: list[int]) -> HostileClient:
    c = pick([2, 10], g)
    x, y = samples(number(2, 6, g), n, g, c)
    x, y = with_rows(x, y, x + 10 ** uniform(-5, -1, g) * torch.randn(x.shape, generator=g))
    return one_step(smooth(n, hidden, c, g), x, entropy(y))


@equations("contrast copies")
def eq_contrast(g: torch.Generator, n: int, hidden: list[int]) -> HostileClient:
    x, y = samples(number(3, 8, g), n, g)
    copies, factor = number(1, 3, g), pick([1.001, 1.01, 1.1, 2.0, -1.0], g)
    other = y[:copies] if pick([True, False], g) else (y[:copies] + 1) % 10
    x, y = torch.cat([x, factor * x[:copies]]), torch.cat([y, other])
    return one_step(smooth(n, hidden, 10, g), x, entropy(y))


@equations("every sample with a contrast copy")
def eq_contrast_all(g: torch.Generator, n: int, hidden: list[int]) -> HostileClient:
    x, y = samples(number(2, 6, g), n, g)
    x, y = with_copies(x, y, len(x), pick([1.01, 1.05, 1.1, -1.0], g))
    return one_step(smooth(n, hidden, 10, g), x, entropy(y))


@equations("repeated samples")
def eq_repeated(g: torch.Generator, n: int, hidden: list[int]) -> HostileClient:
    x, y = samples(number(2, 8, g), n, g)
    copies = number(1, len(x), g)
    other = y[:copies] if pick([True, False], g) else (y[:copies] + 1) % 10
    x, y = torch.cat([x, x[:copies]]), torch.cat([y, other])
    return one_step(smooth(n, hidden, 10, g), x, entropy(y, reduction=pick(["mean", "sum"], g)))


@equations("samples on a line or plane")
def eq_plane(g: torch.Generator, n: int, hidden: list[int]) -> HostileClient:
    b, dimensions = number(3, 10, g), number(1, 3, g)
    _, y = samples(b, n, g)
    x = torch.randn(n, generator=g) + torch.randn(b, dimensions, generator=g) @ torch.randn(dimensions, n, generator=g)
    return one_step(smooth(n, hidden, 10, g), pick([1.0, 0.1, 0.01], g) * x, entropy(y))


@equations("tiny inputs")
def eq_tiny(g: torch.Generator, n: int, hidden: list[int]) -> HostileClient:
    c = pick([2, 3, 10, 30], g)
    x, y = samples(number(2, 12, g), n, g, c)
    return one_step(smooth(n, hidden, c, g), 10 ** uniform(-5, -0.5, g) * x, entropy(y))


@equations("huge inputs")
def eq_huge(g: torch.Generator, n: int, hidden: list[int]) -> HostileClient:
    x, y = samples(number(2, 12, g), n, g)
    return one_step(smooth(n, hidden, 10, g), 10 ** uniform(0.5, 4, g) * x, entropy(y))


@family("equations: Kelvin")
def eq_kelvin(g: torch.Generator) -> HostileClient:
    b = number(3, 12, g)
    x = 285 + 8 * torch.randn(b, 1, generator=g) + 3 * torch.randn(b, 24, generator=g)
    x = x * pick([1.0, 0.01, 0.1], g)
    y = torch.randint(5, (b,), generator=g)
    return solved(one_step(smooth(24, [60, 60], 5, g), x, entropy(y)))


@family("equations: tables with few columns")
def eq_table(g: torch.Generator) -> HostileClient:
    name = pick(["iris", "wine", "cancer"], g)
    x, y = draw(name, number(2, 20, g), g)
    scaled = pick([standard, minmax], g)(x, name)
    return solved(one_step(smooth(x.shape[1], [pick([30, 60], g)] * number(1, 2, g), 3, g), scaled, entropy(y)))


@family("equations: one-hot and constant columns")
def eq_one_hot(g: torch.Generator) -> HostileClient:
    b = number(3, 14, g)
    parts = [functional.one_hot(torch.randint(k, (b,), generator=g), k).float() for k in (2, 3, 5, 8)]
    x = torch.cat([*parts, torch.ones(b, 3), torch.zeros(b, 2)], 1)
    y = torch.randint(4, (b,), generator=g)
    return solved(one_step(smooth(x.shape[1], [60] * number(1, 3, g), 4, g), x, entropy(y)))


@family("equations: trained network")
def eq_trained(g: torch.Generator) -> HostileClient:
    name = pick(["wine", "cancer", "digits"], g)
    whole, _ = table(name)
    fresh = smooth(whole.shape[1], [60] * number(1, 2, g), 10, g)
    model = trained(fresh, name, g, steps=pick([50, 400], g))
    x, y = draw(name, number(3, 14, g), g)
    return solved(one_step(model, standard(x, name), entropy(y)))


@equations("large weights")
def eq_saturated(g: torch.Generator, n: int, hidden: list[int]) -> HostileClient:
    model = smooth(n, hidden, 10, g)
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(pick([2.0, 5.0, 10.0], g))
    x, y = samples(number(3, 10, g), n, g)
    return one_step(model, x, entropy(y))


@equations("weights of samples and classes")
def eq_weighted(g: torch.Generator, n: int, hidden: list[int]) -> HostileClient:
    c = pick([2, 10], g)
    x, y = samples(number(3, 12, g), n, g, c)
    x, y = with_copies(x, y, number(0, 3, g), 1.02)
    weights = pick([torch.rand(len(x), generator=g) + 0.1, 10 ** (-5 * torch.rand(len(x), generator=g))], g)
    classes = pick([None, torch.logspace(-2, 0, c)], g)
    return one_step(smooth(n, hidden, c, g), x, weighted(weights, y, weight=classes))


@equations("label smoothing or soft labels")
def eq_soft(g: torch.Generator, n: int, hidden: list[int]) -> HostileClient:
    c = pick([2, 3, 10], g)
    x, y = samples(number(2, 12, g), n, g, c)
    loss = entropy(torch.softmax(3 * torch.randn(len(x), c, generator=g), 1))
    if pick([True, False], g):
        loss = entropy(y, label_smoothing=pick([1e-4, 0.01, 0.1], g))
    return one_step(smooth(n, hidden, c, g), x, loss)


@equations("squared error or binary cross-entropy")
def eq_other_loss(g: torch.Generator, n: int, hidden: list[int]) -> HostileClient:
    c = pick([2, 3, 10], g)
    x, y = samples(number(2, 10, g), n, g, c)
    target = functional.one_hot(y, c).float() if pick([True, False], g) else torch.rand(len(x), c, generator=g)
    function = pick([functional.mse_loss, functional.binary_cross_entropy_with_logits, functional.l1_loss], g)
    return one_step(smooth(n, hidden, c, g), x, lambda out: function(out, target))


@equations("one output")
def eq_one_output(g: torch.Generator, n: int, hidden: list[int]) -> HostileClient:
    hidden = hidden if len(hidden) > 1 else hidden * 2
    b = number(2, 14, g)
    x = pick([1.0, 1.0, 0.1, 0.01], g) * torch.randn(b, n, generator=g)
    copies = number(0, 3, g)
    x = torch.cat([x, x[:copies] * pick([1.02, 1.5, -1.0], g)])
    target = (torch.rand(len(x), 1, generator=g) > 0.5).float()
    function = pick([functional.mse_loss, functional.binary_cross_entropy_with_logits], g)
    return one_step(smooth(n, hidden, 1, g), x, lambda out: function(out, target))


def with_activation(model: nn.Sequential, act: Callable[[], nn.Module]) -> nn.Sequential:
    """Return the same network with another activation."""
    return nn.Sequential(*[each if isinstance(each, nn.Linear) else act() for each in copy.deepcopy(model)])


@equations("another activation in the model")
def eq_wrong_activation(g: torch.Generator, n: int, hidden: list[int]) -> HostileClient:
    x, y = samples(number(2, 10, g), n, g)
    pairs = [(nn.GELU, nn.SiLU), (nn.SiLU, nn.Mish), (nn.Tanh, nn.Softsign), (nn.LeakyReLU, nn.ELU), (nn.ReLU, nn.GELU)]
    mine, theirs = pick(pairs, g)
    model = smooth(n, hidden, 10, g, act=mine)
    x = pick([1.0, 0.1, 0.01], g) * x
    return replace(one_step(model, x, entropy(y)), model=with_activation(model, theirs))


@equations("GELU by tanh, audited as GELU by erf")
def eq_gelu_tanh(g: torch.Generator, n: int, hidden: list[int]) -> HostileClient:
    x, y = samples(number(2, 10, g), n, g)
    model = smooth(n, hidden, 10, g, act=lambda: nn.GELU(approximate="tanh"))
    client = one_step(model, pick([1.0, 0.1], g) * x, entropy(y))
    client = replace(client, model=with_activation(model, nn.GELU))
    return sent_as(client, pick([torch.float32, torch.float16], g))


@equations("slightly other slope or weights")
def eq_other_weights(g: torch.Generator, n: int, hidden: list[int]) -> HostileClient:
    x, y = samples(number(2, 10, g), n, g)
    model = smooth(n, hidden, 10, g)
    client = one_step(model, x, entropy(y))
    level = 10 ** uniform(-7, -1, g)
    other = moved(model, lambda: level, g)
    client = replace(client, model=other, update=ClientUpdate.from_gradients(other, client.update.gradients))
    return sent_as(client, pick([torch.float32, torch.bfloat16], g))


@equations("Adam")
def eq_adam(g: torch.Generator, n: int, hidden: list[int]) -> HostileClient:
    b = number(1, 10, g)
    x, y = samples(b, n, g)
    steps = [(x, entropy(y))] * number(1, 4, g)
    made = pick([torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop], g)
    return local_steps(smooth(n, hidden, 10, g), steps, 1e-3, optimiser=made, samples=b)


@equations("FedAvg")
def eq_fedavg(g: torch.Generator, n: int, hidden: list[int]) -> HostileClient:
    b = number(2, 12, g)
    x, y = samples(b, n, g)
    steps = [(x, entropy(y))] * number(1, 5, g)
    rate = 10 ** uniform(-4, 0, g)
    return local_steps(smooth(n, hidden, 10, g), steps, rate, say_rate=pick([True, False], g), samples=b)


@equations("FedAvg, mini-batches, near pairs")
def eq_mini_batches(g: torch.Generator, n: int, hidden: list[int]) -> HostileClient:
    x, y = samples(6, n, g)
    x, y = with_rows(x, y, x[:3] * (1 + pick([0.02, 0.2], g) * torch.randn(3, n, generator=g)))
    order = torch.randperm(9, generator=g)
    steps = [(x[rows], entropy(y[rows])) for rows in order.split(3)] * number(1, 2, g)
    return local_steps(smooth(n, hidden, 10, g), steps, 10 ** uniform(-4, -0.5, g), samples=9)


@equations("momentum and weight decay")
def eq_momentum(g: torch.Generator, n: int, hidden: list[int]) -> HostileClient:
    b = number(2, 10, g)
    x, y = samples(b, n, g)

    def optimiser(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=pick([0.0, 1e-4, 1e-2], g))

    steps = [(x, entropy(y))] * number(1, 4, g)
    model = smooth(n, hidden, 10, g)
    return local_steps(model, steps, 10 ** uniform(-3, -1, g), optimiser=optimiser, samples=b)


def relative_noise(client: HostileClient, level: float, g: torch.Generator) -> HostileClient:
    """Return the client with noise of ``level`` times the root mean square of the whole gradient."""
    whole = torch.cat([each.flatten() for each in client.update.gradients.values()])
    return with_noise(client, level * float(whole.square().mean().sqrt()), g)


@equations("noise")
def eq_noise(g: torch.Generator, n: int, hidden: list[int]) -> HostileClient:
    x, y = samples(number(1, 10, g), n, g)
    client = one_step(smooth(n, hidden, 10, g), x, entropy(y))
    return relative_noise(client, 10 ** uniform(-6, 0, g), g)


@family("equations: noise, near pairs and contrast copies")
def eq_noise_near(g: torch.Generator) -> HostileClient:
    client = pick([eq_near, eq_contrast, eq_near_all, eq_contrast_all, eq_tiny], g)(g)
    return relative_noise(client, 10 ** uniform(-6, -1, g), g)


@family("equations: noise, one output")
def eq_noise_one_output(g: torch.Generator) -> HostileClient:
    return relative_noise(eq_one_output(g), 10 ** uniform(-6, -0.5, g), g)


@family("equations: float16, bfloat16")
def eq_half(g: torch.Generator) -> HostileClient:
    client = pick([eq_plain, eq_near, eq_contrast, eq_near_all, eq_tiny, eq_weighted], g)(g)
    return sent_as(client, pick([torch.float16, torch.bfloat16], g))


@family("equations: pruned or quantised")
def eq_compressed(g: torch.Generator) -> HostileClient:
    client = pick([eq_plain, eq_near, eq_contrast], g)(g)
    kept, levels = pick([0.5, 0.9, 0.99], g), pick([16, 256, 4096], g)
    prune = pick([True, False], g)
    sent = {}
    for name, each in client.update.gradients.items():
        if prune:
            sent[name] = torch.where(each.abs() >= each.abs().flatten().quantile(1 - kept), each, 0.0)
        else:
            step = (each.max() - each.min()).clamp_min(1e-30) / levels
            sent[name] = torch.round(each / step) * step
    return replace(client, update=ClientUpdate.from_gradients(client.model, sent))


@equations("several clients in one")
def eq_summed(g: torch.Generator, n: int, hidden: list[int]) -> HostileClient:
    model = smooth(n, hidden, 10, g)
    clients = [one_step(model, *parts) for parts in ((x, entropy(y)) for x, y in (samples(4, n, g), samples(7, n, g)))]
    first, other = clients
    sent = {name: each + other.update.gradients[name] for name, each in first.update.gradients.items()}
    joined: dict[str, Any] = {
        k: torch.cat([getattr(first, k), getattr(other, k)]) for k in ("inputs", "signals", "fires")
    }
    return replace(first, update=ClientUpdate.from_gradients(model, sent), said=pick([4, 11], g), **joined)


@family("equations: BatchNorm that trains, Dropout")
def eq_batch_norm(g: torch.Generator) -> HostileClient:
    n, _ = shape(g)
    x, y = samples(number(3, 10, g), n, g)
    act = pick(list(ACTIVATIONS), g)
    seeded(g)
    between: list[nn.Module] = [pick([nn.BatchNorm1d(60), nn.Dropout(0.1), nn.Dropout(0.0)], g)]
    front = [nn.Linear(n, 60), act(), *between] if pick([True, False], g) else [nn.Linear(n, 60), *between, act()]
    model = nn.Sequential(*front, nn.Linear(60, 60), act(), nn.Linear(60, 10))
    return solved(one_step(model, x, entropy(y)))


@equations("random gradients of low rank")
def eq_random(g: torch.Generator, n: int, hidden: list[int]) -> HostileClient:
    b = number(1, 9, g)
    x, y = samples(b, n, g)
    client = one_step(smooth(n, hidden, 10, g), x, entropy(y))
    linear = [(name, each) for name, each in client.model.named_modules() if isinstance(each, nn.Linear)]
    sent = {}
    for name, each in linear:
        m, k = each.weight.shape
        gradient = torch.randn(m, b, generator=g) @ torch.randn(b, k + 1, generator=g)
        sent[f"{name}.weight"], sent[f"{name}.bias"] = gradient[:, :-1].contiguous(), gradient[:, -1].contiguous()
    return replace(client, update=ClientUpdate.from_gradients(client.model, sent))


@family("equations: wrong number of samples given")
def eq_said(g: torch.Generator) -> HostileClient:
    client = pick([eq_plain, eq_near_all, eq_repeated, eq_contrast_all, eq_tiny], g)(g)
    return replace(client, said=max(1, pick([client.samples // 2, client.samples - 1, 2 * client.samples, 1], g)))


@family("equations: no model")
def eq_no_model(g: torch.Generator) -> HostileClient:
    client = pick([eq_plain, eq_near_all, eq_other_loss, eq_contrast, eq_one_output], g)(g)
    return replace(client, pass_model=False)


@equations("layers without bias")
def eq_no_bias(g: torch.Generator, n: int, hidden: list[int]) -> HostileClient:
    c = pick([2, 3, 10], g)
    x, y = samples(number(1, 10, g), n, g, c)
    x, y = with_copies(x, y, number(0, 2, g), 1.3)
    return one_step(smooth(n, hidden, c, g, bias=False), x, entropy(y))


@family("equations: tanh without bias, two classes or one output")
def eq_odd(g: torch.Generator) -> HostileClient:
    n = number(20, 60, g)
    x, y = samples(number(1, 8, g), n, g, 2)
    model = smooth(n, [60] * number(1, 3, g), pick([1, 2], g), g, act=nn.Tanh, bias=False)
    if model[-1].out_features == 2:
        return solved(one_step(model, x, entropy(y)))
    return solved(one_step(model, x, lambda out: functional.mse_loss(out[:, 0], y.float())))


@family("equations: LayerNorm, bias of zero")
def eq_layer_norm(g: torch.Generator) -> HostileClient:
    n = number(20, 60, g)
    x, y = samples(number(2, 6, g), n, g)
    copies, factor = number(0, 2, g), pick([1.1, 2.0, -1.0], g)
    x, y = torch.cat([x, factor * x[:copies]]), torch.cat([y, (y[:copies] + number(0, 1, g)) % 10])
    act = pick(list(ACTIVATIONS), g)
    seeded(g)
    model = nn.Sequential(
        nn.Linear(n, 60), nn.LayerNorm(60), act(), nn.Linear(60, 60), nn.LayerNorm(60), act(), nn.Linear(60, 10)
    )
    if pick([True, False], g):
        nn.init.zeros_(model.get_parameter("0.bias"))
    return solved(one_step(model, x, entropy(y)))


class SmoothResidual(nn.Module):
    def __init__(self, n: int, c: int, act: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(n, 50), nn.Linear(50, 50)
        self.other, self.last, self.act = nn.Linear(50, 50), nn.Linear(50, c), act

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.first(x))
        hidden = hidden + self.act(self.inner(hidden))
        return self.last(hidden + self.act(self.other(hidden)))


@family("equations: residual")
def eq_residual(g: torch.Generator) -> HostileClient:
    n, c = number(20, 60, g), pick([2, 10], g)
    x, y = samples(number(2, 14, g), n, g, c)
    x, y = with_copies(x, y, number(0, 2, g), 1.02)
    seeded(g)
    return solved(one_step(SmoothResidual(n, c, pick(list(ACTIVATIONS), g)()), x, entropy(y)))


@family("equations: as many samples as the equations allow")
def eq_limit(g: torch.Generator) -> HostileClient:
    m = number(12, 30, g)
    depth = number(1, 3, g)
    c = pick([2, 5, 10, 40], g)
    limit = m * (2 * depth - 1) / (2 * depth)
    b = max(2, min(m + 3, round(limit * uniform(0.7, 1.2, g))))
    x, y = samples(b, 60, g, c)
    return solved(one_step(smooth(60, [m] * depth, c, g), x, entropy(y)))


@family("equations: deep networks")
def eq_deep(g: torch.Generator) -> HostileClient:
    n = number(20, 60, g)
    x, y = samples(number(2, 12, g), n, g)
    return solved(one_step(smooth(n, [pick([30, 50], g)] * number(5, 8, g), 10, g), x, entropy(y)))


@family("equations: narrow second layer")
def eq_narrow(g: torch.Generator) -> HostileClient:
    n, b = number(20, 60, g), number(2, 10, g)
    c = pick([2, 5, 30], g)
    x, y = samples(b, n, g, c)
    hidden = [60, max(2, b + number(-3, 3, g)), *([40] * number(0, 1, g))]
    return solved(one_step(smooth(n, hidden, c, g), x, entropy(y)))


@equations("two classes")
def eq_two_classes(g: torch.Generator, n: int, hidden: list[int]) -> HostileClient:
    x, y = samples(number(2, 14, g), n, g, 2)
    x, y = with_copies(x, y, number(0, 3, g), pick([1.1, 0.5, -1.0], g))
    return one_step(smooth(n, hidden, 2, g), pick([1.0, 0.1, 0.01], g) * x, entropy(y))


@family("equations: nearly linear activations")
def eq_linear(g: torch.Generator) -> HostileClient:
    slope = pick([0.5, 0.9, 0.99, 0.999, 1.0], g)
    n, hidden = shape(g)
    c = pick([2, 5, 10, 20, 40], g)
    x, y = samples(number(2, 12, g), n, g, c)
    x = pick([1.0, 0.1], g) * x
    return solved(one_step(smooth(n, hidden, c, g, act=lambda: nn.LeakyReLU(slope)), x, entropy(y)))


class Nearly(nn.Module):
    def __init__(self, kind: str, strength: float) -> None:
        super().__init__()
        self.kind, self.strength = kind, strength

    def forward(self, z: Tensor) -> Tensor:
        return z + self.strength * getattr(torch, self.kind)(z)


@equations("linear plus a small curve")
def eq_curve(g: torch.Generator, n: int, hidden: list[int]) -> HostileClient:
    c = pick([2, 5, 10, 20, 40], g)
    x, y = samples(number(2, 12, g), n, g, c)
    kind, strength = pick(["tanh", "square", "abs", "sin"], g), 10 ** uniform(-6, -0.5, g)
    return one_step(smooth(n, hidden, c, g, act=lambda: Nearly(kind, strength)), x, entropy(y))


@equations("sine, square, absolute value")
def eq_strange(g: torch.Generator, n: int, hidden: list[int]) -> HostileClient:
    c = pick([2, 10], g)
    x, y = samples(number(2, 10, g), n, g, c)
    act = pick([lambda: Nearly("sin", 3.0), nn.Hardtanh, nn.ReLU6, nn.Softsign, nn.Tanhshrink, nn.Hardshrink], g)
    return one_step(smooth(n, hidden, c, g, act=act), pick([1.0, 5.0], g) * x, entropy(y))


@equations("an offset of the inputs that the bias removes, with noise")
def eq_offset_in_bias(g: torch.Generator, n: int, hidden: list[int]) -> HostileClient:
    offset = pick([1.0, 3.0, 10.0, 30.0], g)
    model = smooth(n, hidden, 10, g, act=pick([nn.ReLU, nn.ReLU, nn.LeakyReLU, nn.ELU], g))
    x, y = samples(number(4, hidden[0] // 3, g), n, g)
    first = first_linear(model)[1]
    with torch.no_grad():
        first.bias.sub_(offset * first.weight.sum(1))
    client = one_step(model, x + offset, entropy(y))
    size = torch.cat([each.flatten() for each in client.update.gradients.values()]).square().mean().sqrt()
    return with_noise(client, float(size) * 10 ** uniform(-7, -4, g), g)


@family("equations: a network with few neurons that are not pruned")
def eq_pruned_neurons(g: torch.Generator) -> HostileClient:
    kept, width = number(20, 40, g), pick([80, 300, 1000], g)
    model = smooth(40, [width] * number(2, 3, g), 10, g)
    layers = [each for each in model if isinstance(each, nn.Linear)]
    with torch.no_grad():
        for before, after in itertools.pairwise(layers):
            before.weight[kept:] = 0
            before.bias[kept:] = 0
            after.weight[:, kept:] = 0
            after.weight.mul_((width / kept) ** 0.5)
    x, y = samples(number(4, 3 * kept // 4, g), 40, g)
    client = one_step(model, x, entropy(y))
    level = pick([0.0, 1e-6, 1e-5], g) * float(client.update.gradients["0.weight"].abs().max())
    sent = {
        name: each + level * torch.randn(each.shape, generator=g) * (each != 0)
        for name, each in client.update.gradients.items()
    }
    return solved(replace(client, update=ClientUpdate.from_gradients(model, sent)))


@family("tensors that the optimiser scales separately")
def scaled_tensors(g: torch.Generator) -> HostileClient:
    n, hidden = shape(g)
    act = pick([nn.ReLU, nn.GELU], g)
    model = smooth(n, hidden, 10, g, act=act)
    if pick([True, False], g):
        for parameter in model.parameters():
            nn.init.zeros_(parameter) if parameter.ndim == 1 else None
    x, y = samples(pick([1, 4], g), n, g)
    client = one_step(model, x + pick([0.0, 0.5], g), entropy(y))
    kind, rate = pick(["norm", "bias", "centred"], g), 2 ** uniform(0.5, 2, g)
    sent = {}
    for name, each in client.update.gradients.items():
        change = {"norm": each / torch.linalg.vector_norm(each), "bias": each if each.ndim > 1 else rate * each}
        change["centred"] = each - each.mean(1, keepdim=True) if each.ndim > 1 else each
        sent[name] = change[kind]
    update = ClientUpdate.from_gradients(model, sent)
    return replace(client, update=update, pass_model=pick([True, False], g), equations=act is nn.GELU)


@equations("records of one person, weighted by their number")
def eq_records(g: torch.Generator, n: int, hidden: list[int]) -> HostileClient:
    people, records = number(2, 5, g), number(2, 3, g)
    x, y = samples(people, n, g)
    x = x.repeat(records, 1) + 10 ** uniform(-5, -2, g) * torch.randn(people * records, n, generator=g)
    labels = y.repeat(records)
    model = smooth(n, hidden, 10, g)
    return one_step(model, x, lambda out: functional.cross_entropy(out, labels, reduction="none").mean() / records)
