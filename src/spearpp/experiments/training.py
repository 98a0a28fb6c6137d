"""Cost of a defence: the accuracy of a short federated training run with it."""

import time
from dataclasses import dataclass
from typing import Any

import torch

from spearpp.errors import NonFiniteError, OptionError
from spearpp.experiments.cell import register
from spearpp.experiments.source import Source
from spearpp.simulate import Client, FedSGD, mlp
from spearpp.simulate.federation import server_step


@register
@dataclass(frozen=True)
class Training:
    """A setting of one training run. In every round, one client sends an update for b samples.

    The server takes a step at learning rate ``rate`` along the update. The update is a gradient, or
    (before - after) / (lr · steps) if clients train locally, so runs differ by the defence, not by the step length.

    >>> done = Training(b=32, m=64, depth=1, data=Source("digits")).measure(0, torch.device("cpu"))
    >>> done["accuracy"] > 0.5
    True
    """

    b: int
    m: int
    client: Client = FedSGD()
    data: Source = Source()
    depth: int = 3
    """Number of hidden layers, with m neurons each."""
    rounds: int = 100
    rate: float = 0.1
    """Learning rate of the server."""
    train: int = 1000
    """Number of training samples. Each round samples b of them."""
    test: int = 500
    """Number of samples on which the accuracy is measured."""

    def __post_init__(self) -> None:
        if min(self.b, self.m, self.rounds, self.train, self.test) < 1 or not self.rate > 0:
            raise OptionError(f"{self}: sizes must be at least 1 and the rate must be positive")

    def measure(self, seed: int, device: torch.device) -> dict[str, Any]:
        """Train a fresh network.

        Returns:
            ``accuracy`` on samples that were not used for training, ``diverged`` (whether an update was not finite,
            which ends the run early) and ``seconds``.
        """
        began = time.perf_counter()
        generator = torch.Generator().manual_seed(seed)
        drawn = self.data.draw(self.train + self.test, generator)
        model = mlp(drawn.inputs.shape[1], [self.m] * self.depth, self.data.classes, generator=generator).to(device)
        diverged = False
        for _ in range(self.rounds):
            rows = torch.randint(self.train, (self.b,), generator=generator)
            try:
                update = self.client(model, drawn.pick(rows), generator)
            except NonFiniteError:  # the noise or the learning rate is too large
                diverged = True
                break
            server_step(model, update.gradients, self.rate / update.clients)
        with torch.no_grad():
            outputs = model(drawn.inputs[self.train :].to(device))
        correct = (outputs.argmax(1).cpu() == drawn.labels[self.train :]).float()
        return {"accuracy": float(correct.mean()), "diverged": diverged, "seconds": time.perf_counter() - began}
