"""How a client trained, as far as a configuration says so."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

RATE = ("lr", "learningrate", "clientlr", "locallr")
STEPS = ("localsteps", "localepochs", "epochs", "numepochs", "numlocalepochs")
MOMENTUM = ("momentum", "clientmomentum", "sgdmomentum")
"""Names, without dashes, dots and underscores, under which they are looked for. The first that is there counts."""


@dataclass(frozen=True)
class Training:
    """Rate, passes over the data and momentum; None for what is not known.

    An inversion does not need them. What the update itself tells of them is in the audit's ``estimated``.

    >>> Training.of({"learning-rate": 0.1, "local_epochs": 3})
    Training(lr=0.1, steps=3, momentum=None)
    """

    lr: float | None = None
    steps: int | None = None
    momentum: float | None = None

    @classmethod
    def of(cls, *configs: Mapping[str, Any]) -> "Training":
        """Read from configurations, earlier ones first; what makes no sense is taken for not known."""
        named: dict[str, Any] = {}
        for config in configs:
            for name, value in config.items():
                named.setdefault("".join(c for c in str(name).lower() if c.isalnum()), value)
        lr, steps, momentum = (_number(named, names) for names in (RATE, STEPS, MOMENTUM))
        return cls(
            lr if lr is not None and 0 < lr < float("inf") else None,
            int(steps) if steps is not None and 1 <= steps < float("inf") and steps == int(steps) else None,
            momentum if momentum is not None and 0 <= momentum < 1 else None,
        )

    @property
    def rate(self) -> float | None:
        """The rate that one pass over the data amounts to.

        Momentum μ counts the gradient of step t of s again in every later one: with Σ_t (1 - μᵗ) / (1 - μ) over s steps
        as a factor, the mean gradient is (before - after) / (rate · s). The first step is one of plain SGD. Without s,
        momentum leaves the scale unknown.

        >>> Training(lr=0.1, steps=1, momentum=0.9).rate, round(Training(lr=0.1, steps=2, momentum=0.5).rate, 3)
        (0.1, 0.125)
        """
        if self.lr is None or not self.momentum:
            return self.lr
        if self.steps is None:
            return None
        factor = sum((1 - self.momentum**t) / (1 - self.momentum) for t in range(1, self.steps + 1))
        return self.lr * factor / self.steps


def _number(named: Mapping[str, Any], names: tuple[str, ...]) -> float | None:
    for name in names:
        value = named.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value == value:
            return value
    return None
