"""Which updates of a round are audited."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from spearpp.errors import OptionError


@dataclass(frozen=True)
class RoundSampler:
    """So many random updates in every so many rounds. One seed gives one choice, whatever else draws numbers.

    >>> RoundSampler(count=2).among(1, ["a", "b", "c"]) == RoundSampler(count=2).among(1, ["a", "b", "c"])
    True
    >>> RoundSampler(every=2).among(1, ["a"]), RoundSampler(every=2).among(2, ["a"])
    ([], [0])
    """

    count: int | None = 1
    """How many of a round; None takes all."""
    every: int = 1
    """Rounds 1, 2, … that this number divides."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.every < 1 or (self.count is not None and self.count < 0):
            raise OptionError(f"sample={self.count}, every={self.every}: not negative, and at least one")

    def due(self, number: int) -> bool:
        """Whether this round is audited."""
        return number % self.every == 0

    def among(self, number: int, updates: Sequence[object]) -> list[int]:
        """The indices of the chosen ones, in their order."""
        if not self.due(number):
            return []
        if self.count is None or self.count >= len(updates):
            return list(range(len(updates)))
        own = random.Random(f"{self.seed}/{number}")  # noqa: S311  # the platform draws from the global one
        return sorted(own.sample(range(len(updates)), self.count))
