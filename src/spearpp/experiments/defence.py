"""Defences and the axes along which they are turned up."""

import math
import warnings
from dataclasses import dataclass, fields, replace
from typing import Any

from spearpp.errors import OptionError
from spearpp.experiments.attack import Attack
from spearpp.experiments.source import Source
from spearpp.experiments.training import Training
from spearpp.search import Gated, Search
from spearpp.simulate import DPSGD, Client, FedAvg, FedSGD, OpacusDPSGD, Quantise, SumOfClients, TopK

FULL_BITS = 32
CLIP = 2.0
"""C where there is noise and none was given, as in the paper."""
RATE = 1e-2
"""Of local steps where none was given, as in the paper."""


@dataclass(frozen=True)
class Defence:
    """How a client trains and what it sends; the defaults defend nothing.

    >>> Defence(batch=20, noise=1e-4).client
    DPSGD(clip=2.0, noise=0.0001)
    """

    batch: int = 32
    """b, samples of a client."""
    width: int = 512
    """m, neurons of a hidden layer."""
    noise: float = 0.0
    """σ of the noise on each entry of the mean gradient, as in the paper's Table 3."""
    clip: float | None = None
    """C, the norm that a sample's gradient is clipped to."""
    steps: int = 1
    """Local steps, each with the whole batch unless ``mini_batch`` says otherwise."""
    rate: float | None = None
    """Learning rate of local steps; None: a gradient is sent, or 0.01 where there are several."""
    keep: float = 1.0
    """Share of the entries that pruning leaves."""
    bits: int = FULL_BITS
    """On the wire, for each entry."""
    clients: int = 1
    """Whose updates are summed before the server sees them, b samples each."""
    mini_batch: int | None = None
    """Samples of a local step; ``steps`` are then epochs."""

    def __post_init__(self) -> None:
        if min(self.batch, self.width, self.steps, self.clients, self.mini_batch or 1) < 1:
            raise OptionError("batch, width, steps, clients and mini-batch: at least 1 each")
        if not 0 <= self.noise < math.inf or not 0 < self.keep <= 1:
            raise OptionError(f"noise={self.noise:g}, keep={self.keep:g}: not negative, and within (0, 1]")
        if self.local and (self.noise or self.clip):
            raise OptionError("noise and clipping act on the gradients of one step: they go with steps=1 and no rate")
        if self.bits != FULL_BITS and not 2 <= self.bits <= 16:
            raise OptionError(f"bits={self.bits}: 2 to 16, or {FULL_BITS} for all")

    @property
    def local(self) -> bool:
        """Whether clients train and send weights, rather than a gradient."""
        return self.steps > 1 or self.rate is not None

    @property
    def client(self) -> Client:
        """A client that trains so; several of them where their updates are summed."""
        one: Client = FedSGD()
        if self.local:
            one = FedAvg(self.steps, self.mini_batch or self.batch, self.rate or RATE)
        elif self.noise or self.clip:
            one = DPSGD(self.clip or CLIP, self.noise)
        return SumOfClients(one, self.clients) if self.clients > 1 else one

    @property
    def changes(self) -> tuple[TopK | Quantise, ...]:
        """What happens to the update on its way."""
        pruned: tuple[TopK | Quantise, ...] = (TopK(self.keep),) if self.keep < 1 else ()
        return pruned + ((Quantise(self.bits),) if self.bits < FULL_BITS else ())

    def attack(
        self, *, data: Source, search: Search | None = None, witnesses: int = 2, threshold: float = 90.0
    ) -> Attack:
        """The setting that measures what comes back."""
        return Attack(
            b=self.batch * self.clients,
            m=self.width,
            search=search or Gated(),
            client=self.client,
            changes=self.changes,
            data=data,
            witnesses=witnesses,
            threshold=threshold,
        )

    def training(self, *, data: Source, rounds: int, train: int, test: int) -> Training:
        """The setting that measures what is left of the accuracy."""
        return Training(
            b=self.batch * self.clients,
            m=self.width,
            client=self.client,
            changes=self.changes,
            data=data,
            rounds=rounds,
            train=train,
            test=test,
        )

    def epsilon(self, *, rounds: int, train: int) -> float | None:
        """ε of a training run at δ = 1/train, by Opacus' accountant; None without noise.

        σ on the mean of b samples is a noise multiplier of σ b / C; each of the rounds draws b of ``train`` samples.
        """
        if not self.noise:
            return None
        multiplier = self.noise * self.batch / (self.clip or CLIP)
        client = OpacusDPSGD(self.clip or CLIP, multiplier, min(1.0, self.batch / train))
        with warnings.catch_warnings():  # it says so if ε is so large that its orders do not bracket it
            warnings.simplefilter("ignore")
            return client.epsilon(steps=rounds, delta=1 / train)


@dataclass(frozen=True)
class Axis:
    """One dial of a defence, from where it defends least to where it defends most."""

    name: str
    symbol: str
    """For sentences and plots."""
    weak: float
    strong: float
    whole: bool = False
    """Whether only whole numbers make sense."""
    threshold: float = 25.0
    """dB that count as recovered: 90 where nothing but the search decides, 25 (the paper's) where noise does."""

    @property
    def rising(self) -> bool:
        """Whether larger values defend more."""
        return self.strong > self.weak

    @property
    def sign(self) -> str:
        """How a sentence says "from here on"."""
        return "≥" if self.rising else "≤"

    def at(self, share: float) -> float:
        """The value at a share of the way from weak to strong, on a logarithmic scale.

        >>> AXES["noise"].at(0.5)
        0.0001
        """
        value = self.weak * (self.strong / self.weak) ** share
        return float(round(value)) if self.whole else float(f"{value:.3g}")

    def between(self, weak: float, strong: float, count: int) -> list[float]:
        """So many values between two, without them; fewer where whole numbers run out."""
        inner = replace(self, weak=weak, strong=strong)
        values = [inner.at((index + 1) / (count + 1)) for index in range(count)]
        return [value for value in dict.fromkeys(values) if value not in (weak, strong)]

    def on(self, defence: Defence, value: float) -> Defence:
        """The same defence with this dial at a value."""
        kinds = {each.name: str(each.type) for each in fields(Defence)}
        turned: Any = int(value) if "int" in kinds[self.name] else float(value)
        return replace(defence, **{self.name: turned})

    def of(self, defence: Defence) -> float:
        """Where the dial stands."""
        return float(getattr(defence, self.name) or 0.0)


AXES = {
    axis.name: axis
    for axis in (
        Axis("batch", "b", 4, 512, whole=True, threshold=90.0),
        Axis("width", "m", 1024, 16, whole=True, threshold=90.0),
        Axis("noise", "σ", 1e-6, 1e-2),
        Axis("clip", "C", 16.0, 1e-3),
        Axis("steps", "local steps", 1, 128, whole=True),
        Axis("rate", "learning rate", 1e-4, 1.0),
        Axis("keep", "share kept", 1.0, 1e-3),
        Axis("bits", "bits", 16, 2, whole=True),
        Axis("clients", "clients", 1, 64, whole=True, threshold=90.0),
    )
}
