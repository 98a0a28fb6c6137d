"""What several rounds of one client show together: the numbers that an audit of rounds adds to its result."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RoundSummary:
    """What one round gave on its own."""

    verdict: str | None
    """The verdict of the round alone. None if it was not audited alone."""
    batch_size: int | None
    """Number of samples that the gradient of the round shows. None if this could not be determined."""
    recovered: int
    """Number of inputs that were recovered from this round alone."""


@dataclass(frozen=True)
class History:
    """The rounds of an audit, and what they gave together. Rows belong to the recovered inputs of the best layer."""

    rounds: tuple[RoundSummary, ...]
    """The rounds, oldest first."""
    joined: tuple[int, ...]
    """Indices of the rounds whose gradients were joined. Empty if they were not joined."""
    samples: int | None
    """Number of different samples in the joined rounds. None if they were not joined or show no clear number."""
    outcome: str
    """What joining the rounds gave, or why they were not joined. A clause without a full stop."""
    present: tuple[tuple[int, ...], ...]
    """For each recovered input, the indices of the rounds to which it contributes."""
    known_from: tuple[int, ...]
    """For each recovered input, the index of the first round after which the rounds so far prove it."""

    @property
    def recovered_alone(self) -> int:
        """Number of inputs that were recovered from the best single round."""
        return max((each.recovered for each in self.rounds), default=0)

    def known_after(self, index: int) -> int:
        """Return how many of the recovered inputs were known after the round with this index."""
        return sum(first <= index for first in self.known_from)

    @property
    def sentence(self) -> str:
        """What the rounds add to the verdict, to follow its sentence."""
        if len(self.rounds) < 2:
            return ""
        count = len(self.rounds)
        if not self.known_from:
            return f"; {count} rounds were audited"
        alone = f"at most {self.recovered_alone} from a single round"
        return f"; {len(self.known_from)} from {count} rounds together, {alone}"
