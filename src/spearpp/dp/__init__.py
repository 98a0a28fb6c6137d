"""Differential privacy as a client states it: the bound on reconstruction, and what the update shows against it.

>>> from spearpp.dp import StatedDP
>>> StatedDP(noise_multiplier=2.0, kappa=0.01).bound
0.033898...
"""

from spearpp.dp.bound import DELTA, KAPPA, StatedDP, probability
from spearpp.dp.comparison import Comparison, compare, possible_noise

__all__ = ["DELTA", "KAPPA", "Comparison", "StatedDP", "compare", "possible_noise", "probability"]
