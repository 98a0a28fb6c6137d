"""Clients of a federation, and what becomes of their updates on the way to the server.

A client takes a model and its data and returns the ``ClientUpdate`` that the server sees. What happens to
it on the way is written behind a bar: ``FedSGD() | TopK(0.1) | Quantise(8)``.
"""

import copy
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from spearpp.errors import MissingExtraError, OptionError
from spearpp.simulate.batch import Batch
from spearpp.types import Tensor
from spearpp.update import ClientUpdate


class Client(ABC):
    """Something that trains on a batch and sends an update."""

    def __call__(self, model: nn.Module, batch: Batch, generator: torch.Generator | None = None) -> ClientUpdate:
        """What the server sees; ``generator`` is the source of the client's randomness, seed 0 if None."""
        return self._train(model, batch, torch.Generator().manual_seed(0) if generator is None else generator)

    @abstractmethod
    def _train(self, model: nn.Module, batch: Batch, generator: torch.Generator) -> ClientUpdate: ...

    def __or__(self, change: "Change") -> "Client":
        """The same client with its update changed on the way."""
        return _Changed(self, change)


Change = Callable[[ClientUpdate], ClientUpdate]
"""What the wire or a defence does to an update."""


@dataclass(frozen=True)
class _Changed(Client):
    client: Client
    change: Change

    def _train(self, model: nn.Module, batch: Batch, generator: torch.Generator) -> ClientUpdate:
        return self.change(self.client(model, batch, generator))


@dataclass(frozen=True)
class FedSGD(Client):
    """One gradient of the mean cross-entropy over the batch. The server sees it as it is.

    >>> from spearpp.simulate import mlp, random_batch
    >>> FedSGD()(mlp(8, [5], 10), random_batch(4, features=8))
    ClientUpdate(4 of 4 parameters, 105 numbers, from gradients)
    """

    def _train(self, model: nn.Module, batch: Batch, generator: torch.Generator) -> ClientUpdate:
        del generator  # nothing is random
        named = _trainable(model)
        gradients = torch.autograd.grad(_loss(model, batch), list(named.values()), allow_unused=True)
        used = {name: each for name, each in zip(named, gradients, strict=True) if each is not None}
        return ClientUpdate.from_gradients(model, used)


@dataclass(frozen=True)
class FedAvg(Client):
    """SGD over shuffled mini-batches. The server sees the weights afterwards, and knows rate and epochs.

    (before - after) / (rate · epochs) is close to the gradient of the summed mini-batch losses at the weights
    sent, and drifts from it as the weights move. Momentum makes it a weighted sum of the same gradients.

    >>> from spearpp.simulate import mlp, random_batch
    >>> FedAvg(epochs=2, mini_batch=2, rate=0.1)(mlp(8, [5], 10), random_batch(4, features=8))
    ClientUpdate(4 of 4 parameters, 105 numbers, from weights, lr=0.1, steps=2)
    """

    epochs: int
    mini_batch: int
    rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.mini_batch < 1 or not self.rate > 0:
            given = f"epochs={self.epochs}, mini_batch={self.mini_batch}, rate={self.rate}"
            raise OptionError(f"{given}: each must be positive")
        if not 0 <= self.momentum < 1 or self.weight_decay < 0:
            raise OptionError(
                f"momentum={self.momentum}, weight_decay={self.weight_decay}: within [0, 1), and not negative"
            )

    def _train(self, model: nn.Module, batch: Batch, generator: torch.Generator) -> ClientUpdate:
        local = copy.deepcopy(model)
        optimiser = torch.optim.SGD(
            local.parameters(), lr=self.rate, momentum=self.momentum, weight_decay=self.weight_decay
        )
        for _ in range(self.epochs):
            for rows in _shuffled(len(batch.inputs), generator).split(self.mini_batch):
                optimiser.zero_grad()
                _loss(local, replace(batch, inputs=batch.inputs[rows], labels=batch.labels[rows])).backward()
                optimiser.step()
        return ClientUpdate.from_weights(model, local, lr=self.rate, steps=self.epochs)


@dataclass(frozen=True)
class DPSGD(Client):
    """Per-sample gradients clipped to norm C and averaged, plus N(0, σ²): DP-SGD as the paper's table has it.

    The norm is of a sample's whole gradient. σ is added to each entry of the mean.

    >>> from spearpp.simulate import mlp, random_batch
    >>> model, batch = mlp(8, [5], 10), random_batch(4, features=8)
    >>> free, plain = DPSGD(clip=1e9, noise=0.0)(model, batch), FedSGD()(model, batch)
    >>> bool(all((free.gradients[n] - plain.gradients[n]).abs().max() < 1e-6 for n in plain.gradients))
    True
    """

    clip: float
    noise: float

    def __post_init__(self) -> None:
        if not self.clip > 0 or self.noise < 0:
            raise OptionError(
                f"clip={self.clip}, noise={self.noise}: a positive clipping norm, a noise that is not negative"
            )

    def _train(self, model: nn.Module, batch: Batch, generator: torch.Generator) -> ClientUpdate:
        named = _trainable(model)
        total = [torch.zeros_like(parameter) for parameter in named.values()]
        for row in range(len(batch.inputs)):
            one = replace(batch, inputs=batch.inputs[row : row + 1], labels=batch.labels[row : row + 1])
            gradients = torch.autograd.grad(_loss(model, one), list(named.values()))
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part) for part in gradients]))
            share = (self.clip / norm.clamp_min(1e-30)).clamp_max(1.0) / len(batch.inputs)
            for part, gradient in zip(total, gradients, strict=True):
                part += share * gradient
        drawn = [torch.randn(part.shape, generator=generator, device=generator.device).to(part) for part in total]
        noisy = [part + self.noise * extra for part, extra in zip(total, drawn, strict=True)]
        return ClientUpdate.from_gradients(model, dict(zip(named, noisy, strict=True)))


@dataclass(frozen=True)
class OpacusDPSGD(Client):
    """One step of DP-SGD by Opacus itself: Poisson sampling, per-sample clipping, noise (σC)² on the sum.

    The server sees (Σ clipped + noise) / expected batch size; how many samples were drawn, it is not told.

    >>> client = OpacusDPSGD(clip=1.0, noise_multiplier=1.0, sample_rate=0.1)
    >>> round(client.epsilon(steps=10, delta=1e-5), 1)
    3.4
    """

    clip: float
    noise_multiplier: float
    sample_rate: float = 1.0

    def __post_init__(self) -> None:
        if not self.clip > 0 or self.noise_multiplier < 0 or not 0 < self.sample_rate <= 1:
            given = f"clip={self.clip}, noise_multiplier={self.noise_multiplier}, sample_rate={self.sample_rate}"
            raise OptionError(f"{given}: positive, not negative, and within (0, 1]")

    def _train(self, model: nn.Module, batch: Batch, generator: torch.Generator) -> ClientUpdate:
        try:
            from opacus import GradSampleModule
            from opacus.optimizers import DPOptimizer
        except ImportError as error:
            raise MissingExtraError("opacus", "dp") from error
        drawn = torch.rand(len(batch.inputs), generator=generator, device=generator.device).cpu() < self.sample_rate
        local = GradSampleModule(copy.deepcopy(model).train())
        optimiser = DPOptimizer(
            torch.optim.SGD(local.parameters(), lr=1.0),
            noise_multiplier=self.noise_multiplier,
            max_grad_norm=self.clip,
            expected_batch_size=max(1, round(self.sample_rate * len(batch.inputs))),
            generator=_beside(next(local.parameters()), generator),
        )
        if not bool(drawn.any()):
            raise OptionError("Poisson sampling drew no sample: an empty round")
        with warnings.catch_warnings():  # inputs need no gradient, which is what its hooks warn of
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            _loss(local, replace(batch, inputs=batch.inputs[drawn], labels=batch.labels[drawn])).backward()
        optimiser.pre_step()
        return ClientUpdate.from_gradients(
            model, {n: p.grad for n, p in local.named_parameters() if p.grad is not None}
        )

    def epsilon(self, *, steps: int, delta: float) -> float:
        """ε after so many steps, by Opacus' RDP accountant."""
        try:
            from opacus.accountants import RDPAccountant
        except ImportError as error:
            raise MissingExtraError("opacus", "dp") from error
        if self.noise_multiplier == 0:
            return math.inf
        accountant = RDPAccountant()
        accountant.history = [(self.noise_multiplier, self.sample_rate, steps)]
        return float(accountant.get_epsilon(delta))


@dataclass(frozen=True)
class SumOfClients(Client):
    """Secure aggregation: the batch is dealt out to so many clients, and the server sees only the sum."""

    client: Client
    clients: int

    def _train(self, model: nn.Module, batch: Batch, generator: torch.Generator) -> ClientUpdate:
        if not 1 <= self.clients <= len(batch.inputs):
            raise OptionError(f"clients={self.clients} for {len(batch.inputs)} samples: each client has one at least")
        parts = torch.arange(len(batch.inputs)).tensor_split(self.clients)
        own = [replace(batch, inputs=batch.inputs[part], labels=batch.labels[part]) for part in parts]
        return ClientUpdate.sum([self.client(model, each, generator) for each in own])


def _shuffled(count: int, generator: torch.Generator) -> Tensor:
    return torch.randperm(count, generator=generator, device=generator.device).cpu()


def _beside(tensor: Tensor, generator: torch.Generator) -> torch.Generator:
    """A generator on the tensor's device: the same, or one whose seed is drawn from it."""
    if generator.device.type == tensor.device.type:
        return generator
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    return torch.Generator(tensor.device).manual_seed(seed)


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    if not 0 < len(batch.inputs) == len(batch.labels):
        raise OptionError(f"a batch of {len(batch.inputs)} inputs and {len(batch.labels)} labels")
    inputs = batch.inputs.to(next(model.parameters()))
    try:
        outputs = model(inputs)
    except RuntimeError as error:
        raise OptionError(f"the model does not take inputs of shape {tuple(inputs.shape)}: {error}") from error
    if not 0 <= int(batch.labels.min()) <= int(batch.labels.max()) < outputs.shape[1]:
        seen = f"{int(batch.labels.min())} to {int(batch.labels.max())}"
        raise OptionError(f"the batch has labels {seen}, the model {outputs.shape[1]} outputs")
    return nn.functional.cross_entropy(outputs, batch.labels.to(inputs.device))
