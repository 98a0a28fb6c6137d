"""What a defence costs: the accuracy of a short federated training run under it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from spearpp.errors import NonFiniteError, OptionError
from spearpp.experiments.codec import register
from spearpp.experiments.source import Source
from spearpp.simulate import Batch, Cast, Client, FedSGD, Quantise, TopK, mlp
from spearpp.types import Tensor


@register
@dataclass(frozen=True)
class Training:
    """So many rounds of one client with b fresh samples each; the server takes a step with what it gets.

    It follows what it gets at ``rate``: a gradient, or (before - after) / (lr · steps) where clients train themselves,
    so that runs differ by the defence alone and not by how far a round goes.

    >>> done = Training(b=32, m=64, depth=1, data=Source("digits")).measure(0, torch.device("cpu"))
    >>> done["accuracy"] > 0.5
    True
    """

    b: int
    m: int
    client: Client = FedSGD()
    changes: tuple[TopK | Quantise | Cast, ...] = ()
    data: Source = Source()
    depth: int = 3
    normalise: bool = True
    rounds: int = 100
    rate: float = 0.1
    """Of the server's steps."""
    train: int = 1000
    """Samples that the rounds draw from."""
    test: int = 500

    def __post_init__(self) -> None:
        if min(self.b, self.m, self.rounds, self.train, self.test) < 1 or not self.rate > 0:
            raise OptionError(f"{self}: sizes of at least 1 and a positive rate")

    def measure(self, seed: int, device: torch.device) -> dict[str, Any]:
        """Train from a fresh network; accuracy on samples that no round saw, and seconds."""
        began = time.perf_counter()
        generator = torch.Generator().manual_seed(seed)
        drawn = self.data.draw(self.train + self.test, generator, normalise=self.normalise)
        model = mlp(drawn.inputs.shape[1], [self.m] * self.depth, self.data.classes, generator=generator).to(device)
        client = self.client
        for change in self.changes:
            client = client | change
        diverged = False
        for _ in range(self.rounds):
            rows = torch.randint(self.train, (self.b,), generator=generator)
            batch = Batch(drawn.inputs[rows], drawn.labels[rows], drawn.normalisation)
            try:
                update = client(model, batch, generator)
            except NonFiniteError:  # under this much noise, or at this rate, the network is lost
                diverged = True
                break
            _step(model, update.gradients, self.rate / update.clients)
        with torch.no_grad():
            outputs = model(drawn.inputs[self.train :].to(device))
        right = (outputs.argmax(1).cpu() == drawn.labels[self.train :]).float()
        return {"accuracy": float(right.mean()), "diverged": diverged, "seconds": time.perf_counter() - began}


def _step(model: torch.nn.Module, gradients: Mapping[str, Tensor], rate: float) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in gradients:
                parameter.sub_(gradients[name].to(parameter), alpha=rate)
