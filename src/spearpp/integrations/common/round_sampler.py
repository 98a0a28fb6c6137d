"""Choose which updates of a round are audited."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from spearpp.errors import OptionError


@dataclass(frozen=True)
class RoundSampler:
    """Choose ``count`` random updates in every ``every``-th round.

    The choice depends only on the seed and the round. It does not change the global random state.

    >>> RoundSampler(count=2).among(1, ["a", "b", "c"]) == RoundSampler(count=2).among(1, ["a", "b", "c"])
    True
    >>> RoundSampler(every=2).among(1, ["a"]), RoundSampler(every=2).among(2, ["a"])
    ([], [0])
    """

    count: int | None = 1
    """Number of updates per round. None chooses all."""
    every: int = 1
    """Audit only rounds whose number, counted from 1, is a multiple of this."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.every < 1 or (self.count is not None and self.count < 0):
            raise OptionError(f"sample={self.count}, every={self.every}: expected sample >= 0 and every >= 1")

    def due(self, number: int) -> bool:
        """Return whether this round is audited."""
        return number % self.every == 0

    def among(self, number: int, updates: Sequence[object]) -> list[int]:
        """Return the indices of the chosen updates of a round, in ascending order."""
        if not self.due(number):
            return []
        if self.count is None or self.count >= len(updates):
            return list(range(len(updates)))
        generator = random.Random(f"{self.seed}/{number}")  # noqa: S311  # The choice needs no cryptographic quality.
        return sorted(generator.sample(range(len(updates)), self.count))
