"""One simulated attack on several rounds of a client, which are inverted together."""

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from spearpp.auditing.plan import make_plan
from spearpp.auditing.rounds import first_layer
from spearpp.auditing.rounds.joined import join_rounds
from spearpp.auditing.task import Task
from spearpp.errors import OptionError
from spearpp.experiments.attack import Measurement, measurement
from spearpp.experiments.cell import register
from spearpp.experiments.source import Source
from spearpp.metrics import PAPER_PSNR, score
from spearpp.search import Gated, Search
from spearpp.simulate import Client, FedSGD, mlp, play_rounds


@register
@dataclass(frozen=True)
class RoundsAttack:
    """A setting of one attack on several rounds: the client has the same samples in every round.

    The network has one hidden layer of m neurons. Fields with the names of those of ``Attack`` have the same meaning.

    >>> attack = RoundsAttack(b=6, m=24, rounds=3, data=Source("digits"), server_rate=0.5)
    >>> done = attack.measure(1000, torch.device("cpu"))
    >>> done["certified"], done["wrongly_certified"]
    (6, 0)
    """

    b: int
    m: int
    rounds: int
    search: Search = Gated()
    client: Client = FedSGD()
    data: Source = Source()
    server_rate: float = 0.1
    """Learning rate of the server, which subtracts this multiple of the client's gradient after every round."""
    threshold: float = PAPER_PSNR

    def __post_init__(self) -> None:
        if min(self.b, self.m, self.rounds) < 1:
            raise OptionError(f"b={self.b}, m={self.m}, rounds={self.rounds}: each must be at least 1")

    def measure(self, seed: int, device: torch.device) -> dict[str, Any]:
        """Simulate the rounds, invert them together, and return the fields of ``Measurement``."""
        generator = torch.Generator().manual_seed(seed)
        batch = self.data.draw(self.b, generator)
        model = mlp(batch.inputs.shape[1], [self.m], self.data.classes, generator=generator).to(device)
        updates = play_rounds(model, self.client, [batch] * self.rounds, rate=self.server_rate, generator=generator)
        task = Task(model, memory=None, search=self.search, generator=torch.Generator().manual_seed(seed))
        layer = first_layer([make_plan(each, task) for each in updates])
        if layer is None:
            raise OptionError("the network has no layer that can be inverted")
        began = time.perf_counter()
        joined = join_rounds(layer, dict(enumerate(updates)), task)
        seconds = time.perf_counter() - began
        found = None if joined.audited is None else joined.audited.inversion
        if joined.audited is None or found is None:
            return asdict(Measurement(b=self.b, seconds=seconds, decompose=0.0, stopped=joined.outcome))
        compared = score(found.inputs, batch.inputs, normalisation=batch.normalisation, threshold=self.threshold)
        certified = torch.tensor([each.certified for each in joined.audited.claims])
        return asdict(measurement(self.b, found, compared, certified, seconds, joined.outcome))
