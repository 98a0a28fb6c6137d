"""Shares and means with 95 % confidence intervals."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % confidence interval. The ends are nan if the interval is unknown."""

    value: float
    low: float
    high: float

    def within(self, least: float, most: float) -> "Interval":
        """Clip the ends to a range. A share, for example, cannot be negative.

        >>> Interval(0.2, -0.1, 0.5).within(0, 1)
        Interval(value=0.2, low=0, high=0.5)
        """
        if math.isnan(self.low):
            return self
        return Interval(self.value, max(self.low, least), min(self.high, most))


def wilson(hits: int, trials: int) -> Interval:
    """Return the share of hits with the Wilson score interval, which is also valid for shares of 0 and 1.

    >>> share = wilson(10, 10)
    >>> share.value, round(share.low, 3), share.high
    (1.0, 0.722, 1.0)
    """
    from scipy.stats import binomtest

    low, high = binomtest(hits, trials).proportion_ci(0.95, "wilson")
    return Interval(hits / trials, float(low), float(high))


def mean(values: Sequence[float]) -> Interval:
    """Return the mean with the interval of Student's t distribution; the ends are nan for a single value.

    >>> mean([1.0, 3.0]).value
    2.0
    """
    from scipy.special import stdtrit

    if not values:
        raise ValueError("the mean needs at least one value")
    centre, count = statistics.fmean(values), len(values)
    if count < 2:
        return Interval(centre, math.nan, math.nan)
    half = float(stdtrit(count - 1, 0.975)) * statistics.stdev(values) / math.sqrt(count)
    return Interval(centre, centre - half, centre + half)
