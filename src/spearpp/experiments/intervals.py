"""Shares and means with 95 % confidence intervals."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Z = 1.959963984540054
"""97.5 % quantile of the standard normal distribution, for two-sided 95 % intervals."""


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

    With p = hits/trials and z the 97.5 % quantile: (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n).

    >>> share = wilson(10, 10)
    >>> share.value, round(share.low, 3), share.high
    (1.0, 0.722, 1.0)
    """
    if trials < 1 or not 0 <= hits <= trials:
        raise ValueError(f"{hits} of {trials}: expected at least one trial, and at most as many hits as trials")
    share = hits / trials
    centre = share + Z * Z / (2 * trials)
    half = Z * math.sqrt(share * (1 - share) / trials + Z * Z / (4 * trials**2))
    scale = 1 + Z * Z / trials
    low = 0.0 if hits == 0 else max(0.0, (centre - half) / scale)
    return Interval(share, low, 1.0 if hits == trials else min(1.0, (centre + half) / scale))


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
