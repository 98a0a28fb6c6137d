"""Defences, and the parameters that make them stronger."""

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any

from spearpp.errors import OptionError
from spearpp.experiments.attack import Attack
from spearpp.experiments.rounds import RoundsAttack
from spearpp.metrics import PAPER_NOISY_PSNR, PAPER_PSNR
from spearpp.simulate import DPSGD, Client, FedAvg, FedSGD, OpacusDPSGD, Quantise, SumOfClients, TopK

LAYERS_USED = 2
"""Number of layers whose gradients the attack on one update uses."""
FULL_BITS = 32
"""Bits of a float32 entry, which is sent without quantisation."""
CLIP = 2.0
"""Default clipping norm C if there is noise, as in the paper's Table 3."""
RATE = 1e-2
"""Default learning rate of local steps, as in the paper's Table 4."""


@dataclass(frozen=True)
class Defence:
    """How a client trains and what it sends. The defaults are an undefended client.

    >>> Defence(batch=20, noise=1e-4).client
    DPSGD(clip=2.0, noise=0.0001)
    """

    batch: int = 32
    """b, number of samples of a client."""
    width: int = 512
    """m, number of neurons of a hidden layer."""
    noise: float = 0.0
    """σ of the noise on each entry of the mean gradient, as in the paper's Table 3."""
    clip: float | None = None
    """C, the norm to which each sample's gradient is clipped; None clips to 2 if there is noise, else not at all."""
    steps: int = 1
    """Number of local steps on the whole batch, or of epochs if ``mini_batch`` is given."""
    lr: float | None = None
    """Learning rate of local steps; None takes 0.01, or sends the gradient itself if there is only one step."""
    keep: float = 1.0
    """Share of entries that remain after pruning to the largest ones."""
    bits: int = FULL_BITS
    """Number of bits in which each entry is sent."""
    clients: int = 1
    """Number of clients, with b samples each, whose updates are summed before the server receives them."""
    mini_batch: int | None = None
    """Number of samples of a local step; None takes the whole batch."""
    rounds: int | None = None
    """Number of rounds of the same client, with the same samples, that are inverted together; None for one update."""

    def __post_init__(self) -> None:
        if min(self.batch, self.width, self.steps, self.clients, self.mini_batch or 1, self.rounds or 1) < 1:
            raise OptionError("batch, width, steps, clients, mini-batch and rounds must each be at least 1")
        if self.rounds is not None and self.clients > 1:
            raise OptionError("the rounds of one client are joined, not those of a sum: leave out clients or rounds")
        if not 0 <= self.noise < math.inf or not 0 < self.keep <= 1:
            raise OptionError(
                f"noise={self.noise:g}, keep={self.keep:g}: noise must be at least 0, and keep within (0, 1]"
            )
        if self.local and (self.noise or self.clip):
            raise OptionError("noise and clipping apply to the gradient of one step: they go with steps=1 and no rate")
        if self.bits != FULL_BITS and not 2 <= self.bits <= 16:
            raise OptionError(f"bits={self.bits}: expected 2 to 16, or {FULL_BITS} for no quantisation")

    @property
    def local(self) -> bool:
        """Whether clients train locally and send weights. Otherwise they send a gradient."""
        return self.steps > 1 or self.lr is not None

    @property
    def client(self) -> Client:
        """The simulated client, or the sum of several clients, with the changes to the update that is sent."""
        one: Client = FedSGD()
        if self.local:
            one = FedAvg(self.steps, self.mini_batch or self.batch, self.lr or RATE)
        elif self.noise or self.clip:
            one = DPSGD(self.clip or CLIP, self.noise)
        sent = SumOfClients(one, self.clients) if self.clients > 1 else one
        if self.keep < 1:
            sent = sent | TopK(self.keep)
        return sent | Quantise(self.bits) if self.bits < FULL_BITS else sent

    def attack(self, **options: Any) -> Attack | RoundsAttack:
        """Return the setting that measures how many inputs are recovered. The options are those of both attacks."""
        options |= {"m": self.width, "client": self.client}
        if self.rounds is not None:
            return RoundsAttack(b=self.batch, rounds=self.rounds, **options)
        return Attack(b=self.batch * self.clients, layers_used=LAYERS_USED, **options)

    def epsilon(self, *, rounds: int, train: int) -> float | None:
        """Return ε of a training run at δ = 1/train from Opacus' privacy accountant; None without noise.

        Noise σ on the mean of b samples is a noise multiplier of σ b / C. Each round samples b of ``train`` samples. If
        the rounds of one client are inverted together, ε is composed over them, and every sample takes part in each.
        """
        if not self.noise:
            return None
        multiplier = self.noise * self.batch / (self.clip or CLIP)
        rate = min(1.0, self.batch / train) if self.rounds is None else 1.0
        rounds = rounds if self.rounds is None else self.rounds
        client = OpacusDPSGD(self.clip or CLIP, multiplier, rate)
        with warnings.catch_warnings():  # Opacus warns if ε is so large that its orders do not bracket it
            warnings.simplefilter("ignore")
            return client.epsilon(steps=rounds, delta=1 / train)


@dataclass(frozen=True)
class Axis:
    """One parameter of a defence, with its range from the weakest defence to the strongest."""

    name: str
    """Field of ``Defence``."""
    symbol: str
    """Name in sentences and plots."""
    weak: float
    """Value of the weakest defence."""
    strong: float
    """Value of the strongest defence."""
    whole: bool = False
    """Whether the parameter takes only whole numbers."""
    threshold: float = PAPER_NOISY_PSNR
    """PSNR in dB above which an input counts as recovered. ``PAPER_PSNR`` if the defence does not change the gradient
    of a sample, so that recovery is either exact or fails. ``PAPER_NOISY_PSNR`` if it adds an error to the update."""

    @property
    def rising(self) -> bool:
        """Whether larger values are a stronger defence."""
        return self.strong > self.weak

    def at(self, share: float) -> float:
        """Return the value at a share of the way from weak to strong, on a logarithmic scale.

        >>> AXES["noise"].at(0.5)
        0.0001
        """
        value = self.weak * (self.strong / self.weak) ** share
        return float(round(value)) if self.whole else float(f"{value:.3g}")

    def between(self, weak: float, strong: float, count: int) -> list[float]:
        """Return up to ``count`` values between two values, without the two.

        >>> AXES["bits"].between(8, 4, 3)
        [7.0, 6.0, 5.0]
        """
        inner = replace(self, weak=weak, strong=strong)
        values = [inner.at((index + 1) / (count + 1)) for index in range(count)]
        return [value for value in dict.fromkeys(values) if value not in (weak, strong)]

    def on(self, defence: Defence, value: float) -> Defence:
        """Return the defence with this parameter set to a value."""
        changed: Any = int(value) if self.whole else float(value)
        return replace(defence, **{self.name: changed})

    def of(self, defence: Defence) -> float:
        """Return the value of this parameter; 0 if it is None."""
        return float(getattr(defence, self.name) or 0.0)

    @classmethod
    def parse(cls, text: str) -> "tuple[Axis, list[float] | None]":
        """Parse a command-line argument: a parameter, and its values if they are given.

        >>> Axis.parse("bits=4,8")[1]
        [4.0, 8.0]
        """
        name, equals, numbers = text.partition("=")
        if name not in AXES:
            names = ", ".join(AXES)
            raise OptionError(f"--axis {text}: expected one of {names}, optionally with values as in bits=4,8")
        if not equals:
            return AXES[name], None
        try:
            values = [float(each) for each in numbers.split(",")]
        except ValueError as error:
            raise OptionError(f"--axis {text}: expected comma-separated numbers, as in bits=4,8") from error
        whole = AXES[name].whole
        if not all(0 < value < float("inf") for value in values) or (whole and any(value % 1 for value in values)):
            raise OptionError(f"--axis {text}: expected positive{' whole' if whole else ''} numbers")
        return AXES[name], values


AXES = {
    axis.name: axis
    for axis in (
        Axis("batch", "b", 4, 512, whole=True, threshold=PAPER_PSNR),
        Axis("width", "m", 1024, 16, whole=True, threshold=PAPER_PSNR),
        Axis("noise", "σ", 1e-6, 1e-2),
        Axis("clip", "C", 16.0, 1e-3),
        Axis("steps", "local steps", 1, 128, whole=True),
        Axis("lr", "learning rate", 1e-4, 1.0),
        Axis("keep", "share kept", 1.0, 1e-3),
        Axis("bits", "bits", 16, 2, whole=True),
        Axis("clients", "clients", 1, 64, whole=True, threshold=PAPER_PSNR),
        Axis("rounds", "rounds", 16, 1, whole=True, threshold=PAPER_PSNR),
    )
}
"""All parameters, by name. The ranges are design choices; docs/results/README.md shows where recovery stops in them."""
