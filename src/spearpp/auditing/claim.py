"""What an audit can claim about one recovered input."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What is known about a recovered input, strongest claim first."""

    ONE = "one sample"
    """The input is one training sample, exact up to the stated error."""
    ONE_OR_MEAN = "one sample or a mean"
    """The input is one training sample, or the weighted mean of several samples that this update cannot distinguish.
    The weights sum to 1. In a network with one or two outputs some of them can be negative."""
    APPROXIMATE = "approximate"
    """The input is one training sample or such a weighted mean, with a stated error above ``EXACT``: of at most 10 % if
    the replay of this input proves it, and of at most 50 % if other evidence does."""
    SEVERAL = "several samples"
    """The input has the weight of k samples: it is their weighted mean, or one sample that occurs k times."""
    FITS = "fits"
    """The input fits the gradient, but the evidence does not prove that the input is a sample."""
    NONE = "nothing"
    """Nothing is claimed about the input."""


@dataclass(frozen=True)
class Claim:
    """What is claimed about one recovered input."""

    kind: Kind
    error: float
    """The stated error: an estimate of the distance between the input and what the claim says it is, relative to the
    norm. inf if no error is stated. It is not a bound: in tests with hostile clients the true distance was at most
    three times as large (``docs/limits.md``)."""
    samples: float
    """How many samples of the batch the input represents. nan if this number is unknown."""
    why: str
    """The reason for the claim, or the reason why the claim is not stronger. A clause without a full stop."""
    apart: float = float("inf")
    """If the input is a mean: how far its samples can be from this mean, relative to its norm. 0 if the input is one
    sample, inf if the distance is unknown."""

    @property
    def certified(self) -> bool:
        """Whether the input is exact: one sample, or a mean of samples that cannot be distinguished."""
        return self.kind in (Kind.ONE, Kind.ONE_OR_MEAN)

    @property
    def recovered(self) -> bool:
        """Whether the input counts as recovered."""
        return self.certified or self.kind is Kind.APPROXIMATE


UNJUDGED = Claim(Kind.NONE, float("inf"), float("nan"), "the input was not judged, because the audit was interrupted")
"""The claim for an input if the audit stopped before it judged the input."""


def reasons(claims: Sequence[Claim], *kinds: Kind) -> str:
    """Return the most frequent reason of the claims of these kinds, or an empty string if there is no such claim."""
    found = Counter(each.why for each in claims if each.kind in kinds)
    return found.most_common(1)[0][0] if found else ""
