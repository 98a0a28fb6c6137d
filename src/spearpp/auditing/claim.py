"""A claim about one recovered input, and what it rests on: what else is known, and the weight of one sample."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from spearpp.types import Float, Tensor

SAME_WEIGHT = 0.05
"""Largest relative difference between two weights that count as equal. A design choice: 5 % is far below the factor of
2 between the weights of one sample and of two merged samples."""
WHOLE_NUMBER = 0.1
"""Largest distance from a whole number at which a weight still counts samples. A design choice: 0.1 is far below 0.5,
the largest possible distance from a whole number."""


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


@dataclass(frozen=True)
class Known:
    """What the audit knows in addition to the recovered inputs."""

    batch_size: int | None
    """N, the number of samples that the client trained on. None if unknown."""
    absolute: bool = True
    """Whether the update has the scale of a mean loss: a gradient, or weights with a known learning rate."""
    one_step: bool = True
    """Whether the update is a single gradient and not the result of several local steps. An audit always says which;
    ``invert``, which knows less, allows for local steps unless it is told that there were none."""
    one_row_each: bool = True
    """Whether the layer sees the inputs of the model, with one row for each sample."""
    dropout: bool = False
    """Whether Dropout follows the layer. A replay cannot be exact then."""
    outputs: int = 0
    """Number of outputs of the network. 0 if unknown."""


@dataclass(frozen=True)
class Weights:
    """The weight of one sample in the update."""

    one: float | None
    """κ of one sample. None if the weights of the inputs do not determine it."""
    implied: float
    """The number of samples in the batch that κ implies. nan if κ implies no number."""
    why: str
    """The reason for ``one`` and ``implied``. A clause without a full stop."""
    counted: bool = False
    """Whether the caller gave the number of samples. Only then can an input be proved to be one sample."""
    merged: bool = False
    """Whether most inputs must represent several samples."""


def weigh(weights: Float[Tensor, "k"], rank: int, known: Known) -> Weights:
    """Return the weight of one sample, given the weights of all inputs that their replay explains.

    Args:
        weights: κ of each input that its replay explains.
        rank: the rank of the gradient, a lower bound on the number of samples.
        known: what else the audit knows.

    >>> import torch
    >>> weigh(torch.tensor([0.1, 0.1, 0.1, 0.2]), rank=4, known=Known(batch_size=None)).implied
    10.0
    """
    if not len(weights):
        return Weights(None, float("nan"), "the replay of no input matches its part of the update")
    given = known.batch_size
    if given is not None and known.absolute:
        each = round(float(weights.median()) * given)  # 1 if most inputs are single samples, k if most represent k
        alike = (weights * given / max(each, 1) - 1).abs() <= WHOLE_NUMBER
        if each >= 1 and 2 * int(alike.sum()) >= len(weights) and each * len(weights) <= (1 + WHOLE_NUMBER) * given:
            return Weights(1 / given, float(given), f"the client trained on {_samples(given)}", True)
    alike = (weights[:, None] / weights[None] - 1).abs() <= SAME_WEIGHT
    counts = alike.sum(1)
    most = int(counts.max())
    if 2 * most < len(weights) or (most == 1 and len(weights) > 1):
        why = "the samples have different weights in the update, for example because of clipping or class weights"
        return Weights(None, float("nan"), why)
    one = float(weights[counts == most].min())
    one = float(weights[(weights / one - 1).abs() <= SAME_WEIGHT].median())
    if not known.absolute or given is not None:
        return Weights(one, float("nan"), "the scale of the update is unknown")
    implied = round(1 / one)
    if known.one_step and 1 / one < rank - WHOLE_NUMBER and abs(1 / one - 1) > WHOLE_NUMBER:  # 1: a sum of losses
        why = f"the size of the contributions implies {1 / one:.3g} samples, but the gradient has rank {rank}"
        return Weights(None, float("nan"), why, merged=True)
    if abs(1 / one - implied) > WHOLE_NUMBER or implied < rank:
        return Weights(one, float("nan"), "the update does not have the scale of a mean loss")
    return Weights(
        1 / implied, float(implied), f"the size of the contributions to the gradient implies {_samples(implied)}"
    )


def _samples(count: int) -> str:
    return "one sample" if count == 1 else f"{count} samples"
