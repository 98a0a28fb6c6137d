"""Read from a configuration how a client trained."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

RATE = ("lr", "learningrate", "clientlr", "locallr")
STEPS = ("localsteps", "localepochs", "epochs", "numepochs", "numlocalepochs")
MOMENTUM = ("momentum", "clientmomentum", "sgdmomentum")
"""Names of the configuration values, without dashes, dots and underscores. The first one that is present is used."""


@dataclass(frozen=True)
class Training:
    """Learning rate, number of passes over the data and momentum of a client. None means unknown.

    An inversion does not need these values. The audit also estimates them from the update itself (``estimated``).

    >>> Training.of({"learning-rate": 0.1, "local_epochs": 3})
    Training(lr=0.1, steps=3, momentum=None)
    """

    lr: float | None = None
    steps: int | None = None
    momentum: float | None = None

    @classmethod
    def of(cls, *configs: Mapping[str, Any]) -> "Training":
        """Read the values from configurations. Earlier configurations take precedence. Invalid values are ignored."""
        values: dict[str, Any] = {}
        for config in configs:
            for name, value in config.items():
                values.setdefault("".join(c for c in str(name).lower() if c.isalnum()), value)
        lr, steps, momentum = (_first_number(values, names) for names in (RATE, STEPS, MOMENTUM))
        return cls(
            lr if lr is not None and 0 < lr < float("inf") else None,
            int(steps) if steps is not None and 1 <= steps < float("inf") and steps == int(steps) else None,
            momentum if momentum is not None and 0 <= momentum < 1 else None,
        )

    @property
    def rate(self) -> float | None:
        """The effective learning rate of one pass over the data. None if it is unknown.

        With momentum μ, the gradient of one step contributes to every later step. Over s steps the mean gradient is
        multiplied by lr · Σ_t (1 - μᵗ) / (1 - μ), t = 1 ... s. The rate is this factor divided by s, so the mean
        gradient is (before - after) / (rate · s). The first step equals a step of plain SGD. If s is unknown, momentum
        makes the rate unknown.

        >>> Training(lr=0.1, steps=1, momentum=0.9).rate, round(Training(lr=0.1, steps=2, momentum=0.5).rate, 3)
        (0.1, 0.125)
        """
        if self.lr is None or not self.momentum:
            return self.lr
        if self.steps is None:
            return None
        factor = sum((1 - self.momentum**t) / (1 - self.momentum) for t in range(1, self.steps + 1))
        return self.lr * factor / self.steps


def _first_number(values: Mapping[str, Any], names: tuple[str, ...]) -> float | None:
    """Return the first value under these names that is a number and not NaN."""
    for name in names:
        value = values.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value == value:
            return value
    return None
