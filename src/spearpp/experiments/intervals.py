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


def wilson(hits: int, trials: int) -> Interval:
    """Return the share of hits with the Wilson score interval, which is also valid for shares of 0 and 1.

    >>> share = wilson(10, 10)
    >>> share.value, round(share.low, 3), share.high
    (1.0, 0.722, 1.0)
    """
    from scipy.stats import binomtest

    low, high = binomtest(hits, trials).proportion_ci(0.95, "wilson")
    return Interval(hits / trials, float(low), float(high))


def mean(values: Sequence[float], least: float = -math.inf, most: float = math.inf) -> Interval:
    """Return the mean with the interval of Student's t distribution; the ends are nan for a single value.

    All values are within ``least`` and ``most``, so the interval is too.

    >>> mean([0.0, 0.5], least=0.0)
    Interval(value=0.25, low=0.0, high=3.426551184...)
    """
    from scipy.special import stdtrit

    centre, count = statistics.fmean(values), len(values)
    if count < 2:
        return Interval(centre, math.nan, math.nan)
    half = float(stdtrit(count - 1, 0.975)) * statistics.stdev(values) / math.sqrt(count)
    return Interval(centre, max(centre - half, least), min(centre + half, most))
