"""Simulated clients of federated learning.

A client is called with a model and a batch, and returns the ``ClientUpdate`` that the server sees. The operator ``|``
adds a change to the update, for example compression: ``FedSGD() | TopK(0.1) | Quantise(8)``.
"""

import copy
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from spearpp.errors import OptionError, needs
from spearpp.simulate.batch import Batch
from spearpp.types import Tensor
from spearpp.update import ClientUpdate


class Client(ABC):
    """Base class of clients, which train on a batch and send an update."""

    def __call__(self, model: nn.Module, batch: Batch, generator: torch.Generator | None = None) -> ClientUpdate:
        """Train on a batch and return the update that the server sees.

        Args:
            model: the network with the weights that the server sent. Its parameters are not changed.
            batch: the client's data.
            generator: random generator of the client. None means a generator with seed 0.

        Raises:
            SpearError: if the batch does not fit the model.
        """
        return self.train(model, batch, torch.Generator().manual_seed(0) if generator is None else generator)

    @abstractmethod
    def train(self, model: nn.Module, batch: Batch, generator: torch.Generator) -> ClientUpdate:
        """Train on the batch and return what the server sees. A new kind of client overrides this method."""

    def __or__(self, change: "Change") -> "Client":
        """Return a client whose update is changed before the server sees it."""
        return Changed(self, change)


Change = Callable[[ClientUpdate], ClientUpdate]
"""A function from update to update, such as compression or a defence."""


@dataclass(frozen=True)
class Changed(Client):
    """A client whose update is changed before the server sees it."""

    client: Client
    change: Change

    def train(self, model: nn.Module, batch: Batch, generator: torch.Generator) -> ClientUpdate:
        """See ``Client.train``."""
        return self.change(self.client(model, batch, generator))


@dataclass(frozen=True)
class FedSGD(Client):
    """Send the gradient of the mean cross-entropy over the batch.

    >>> from spearpp.simulate import mlp, random_batch
    >>> FedSGD()(mlp(8, [5], 10), random_batch(4, features=8))
    ClientUpdate(4 of 4 parameters, 105 numbers, from gradients)
    """

    def train(self, model: nn.Module, batch: Batch, generator: torch.Generator) -> ClientUpdate:
        """See ``Client.train``."""
        del generator  # this client is deterministic
        named = _trainable(model)
        gradients = torch.autograd.grad(_loss(model, batch), list(named.values()), allow_unused=True)
        used = {name: each for name, each in zip(named, gradients, strict=True) if each is not None}
        return ClientUpdate.from_gradients(model, used)


@dataclass(frozen=True)
class FedAvg(Client):
    """Train with SGD on shuffled mini-batches, and send the weights after training.

    The update states the learning rate and the number of epochs. The quotient (before - after) / (rate · epochs) is
    close to the gradient of the summed mini-batch losses at the weights before training. The difference grows while the
    weights change. With momentum, the quotient is a weighted sum of the gradients.

    Args:
        epochs: number of passes over the batch.
        mini_batch: number of samples per step.
        rate: learning rate.
        momentum: momentum of SGD, within [0, 1).
        weight_decay: weight decay of SGD, at least 0.

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
            raise OptionError(f"{given}: all three must be positive")
        if not 0 <= self.momentum < 1 or self.weight_decay < 0:
            given = f"momentum={self.momentum}, weight_decay={self.weight_decay}"
            raise OptionError(f"{given}: momentum must be within [0, 1), and weight_decay at least 0")

    def train(self, model: nn.Module, batch: Batch, generator: torch.Generator) -> ClientUpdate:
        """See ``Client.train``."""
        local = copy.deepcopy(model)
        optimiser = torch.optim.SGD(
            local.parameters(), lr=self.rate, momentum=self.momentum, weight_decay=self.weight_decay
        )
        for _ in range(self.epochs):
            order = torch.randperm(len(batch.inputs), generator=generator, device=generator.device).cpu()
            for rows in order.split(self.mini_batch):
                optimiser.zero_grad()
                _loss(local, batch.pick(rows)).backward()
                optimiser.step()
        return ClientUpdate.from_weights(model, local, lr=self.rate, steps=self.epochs)


@dataclass(frozen=True)
class DPSGD(Client):
    """Send the mean of clipped per-sample gradients plus Gaussian noise: DP-SGD as in the SPEAR++ paper.

    Args:
        clip: clipping norm C. The norm of a sample is the norm of its gradient over all parameters.
        noise: standard deviation σ of the noise, which is added to every entry of the mean.

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
            raise OptionError(f"clip={self.clip}, noise={self.noise}: clip must be positive, and noise at least 0")

    def train(self, model: nn.Module, batch: Batch, generator: torch.Generator) -> ClientUpdate:
        """See ``Client.train``."""
        named = _trainable(model)
        total = [torch.zeros_like(parameter) for parameter in named.values()]
        for row in range(len(batch.inputs)):
            gradients = torch.autograd.grad(_loss(model, batch.pick(slice(row, row + 1))), list(named.values()))
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part) for part in gradients]))
            factor = (self.clip / norm.clamp_min(1e-30)).clamp_max(1.0) / len(batch.inputs)
            for part, gradient in zip(total, gradients, strict=True):
                part += factor * gradient
        drawn = [torch.randn(part.shape, generator=generator, device=generator.device).to(part) for part in total]
        noisy = [part + self.noise * extra for part, extra in zip(total, drawn, strict=True)]
        return ClientUpdate.from_gradients(model, dict(zip(named, noisy, strict=True)))


@dataclass(frozen=True)
class OpacusDPSGD(Client):
    """Send one step of DP-SGD that Opacus computes: Poisson sampling, per-sample clipping and Gaussian noise.

    The server sees (sum of clipped gradients + noise) / (expected batch size). The noise has variance (σC)². The server
    does not know how many samples were drawn.

    Args:
        clip: clipping norm C of a sample's gradient.
        noise_multiplier: σ, the standard deviation of the noise divided by C.
        sample_rate: probability with which each sample is drawn, within (0, 1].

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
            raise OptionError(f"{given}: must be positive, at least 0, and within (0, 1]")

    def train(self, model: nn.Module, batch: Batch, generator: torch.Generator) -> ClientUpdate:
        """See ``Client.train``."""
        with needs("opacus", "dp"):
            from opacus import GradSampleModule
            from opacus.optimizers import DPOptimizer
        drawn = torch.rand(len(batch.inputs), generator=generator, device=generator.device).cpu() < self.sample_rate
        local = GradSampleModule(copy.deepcopy(model).train())
        optimiser = DPOptimizer(
            torch.optim.SGD(local.parameters(), lr=1.0),
            noise_multiplier=self.noise_multiplier,
            max_grad_norm=self.clip,
            expected_batch_size=max(1, round(self.sample_rate * len(batch.inputs))),
            generator=_on_device_of(next(local.parameters()), generator),
        )
        if not bool(drawn.any()):
            raise OptionError("Poisson sampling drew no sample: use another seed, or a larger sample_rate")
        with warnings.catch_warnings():  # the hooks of Opacus warn because the inputs need no gradient
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            _loss(local, batch.pick(drawn)).backward()
        optimiser.pre_step()
        return ClientUpdate.from_gradients(
            model, {n: p.grad for n, p in local.named_parameters() if p.grad is not None}
        )

    def epsilon(self, *, steps: int, delta: float) -> float:
        """Return ε of (ε, δ)-differential privacy, computed by the RDP accountant of Opacus.

        Args:
            steps: number of steps that the client took.
            delta: δ.
        """
        with needs("opacus", "dp"):
            from opacus.accountants import RDPAccountant
        if self.noise_multiplier == 0:
            return math.inf
        accountant = RDPAccountant()
        accountant.history = [(self.noise_multiplier, self.sample_rate, steps)]
        return float(accountant.get_epsilon(delta))


@dataclass(frozen=True)
class SumOfClients(Client):
    """Secure aggregation: split the batch among clients, and send only the sum of their updates.

    Args:
        client: what each client does.
        clients: number of clients.
    """

    client: Client
    clients: int

    def train(self, model: nn.Module, batch: Batch, generator: torch.Generator) -> ClientUpdate:
        """See ``Client.train``."""
        if not 1 <= self.clients <= len(batch.inputs):
            raise OptionError(f"clients={self.clients} for {len(batch.inputs)} samples: each client needs a sample")
        parts = torch.arange(len(batch.inputs)).tensor_split(self.clients)
        return ClientUpdate.sum([self.client(model, batch.pick(part), generator) for part in parts])


def _on_device_of(tensor: Tensor, generator: torch.Generator) -> torch.Generator:
    """Return the generator, or a generator on the tensor's device with a seed that the given generator draws."""
    if generator.device.type == tensor.device.type:
        return generator
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    return torch.Generator(tensor.device).manual_seed(seed)


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    if not 0 < len(batch.inputs) == len(batch.labels):
        raise OptionError(
            f"the batch has {len(batch.inputs)} inputs and {len(batch.labels)} labels: expected one label per input"
        )
    inputs = batch.inputs.to(next(model.parameters()))
    try:
        outputs = model(inputs)
    except RuntimeError as error:
        raise OptionError(f"the model does not accept inputs of shape {tuple(inputs.shape)}: {error}") from error
    if not 0 <= int(batch.labels.min()) <= int(batch.labels.max()) < outputs.shape[1]:
        labels = f"{int(batch.labels.min())} to {int(batch.labels.max())}"
        raise OptionError(f"the batch has labels {labels}, the model {outputs.shape[1]} outputs")
    return nn.functional.cross_entropy(outputs, batch.labels.to(inputs.device))
