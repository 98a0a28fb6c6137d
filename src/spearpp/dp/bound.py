"""What a client states about its DP-SGD: the bound that follows from it, and what the update shows against it.

Hayes, Mahloujifar and Balle ("Bounding Training Data Reconstruction in DP-SGD", 2023) bound every reconstruction
attack. An attacker who knows all other samples, and who would guess one sample with probability κ before seeing the
update, succeeds with at most the probability γ afterwards. For one step with noise multiplier σ and no subsampling,

    γ = Φ(Φ⁻¹(κ) + 1/σ),

and T such steps count as one step with σ/√T. For subsampled steps the bound is the smallest value of e^ε κ + δ(ε),
where the package ``dp-accounting`` computes δ(ε) of all steps together.

The composed ε of all steps at a given δ follows from the same two cases. Without subsampling, T steps are one Gaussian
mechanism with σ/√T, whose δ(ε) is known exactly (Balle and Wang, "Improving the Gaussian Mechanism for Differential
Privacy", 2018).
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr, ndtri

from spearpp.errors import OptionError, needs

KAPPA = 0.1
"""Default prior probability of success, as in the experiments of Hayes et al.: an attacker with ten candidates.

The bound grows with κ, so it also holds for every attacker who knows less.
"""
DELTA = 1e-5
"""Default δ of the composed ε, as in most work on DP-SGD. It should be well below 1 / (number of samples)."""
EPSILONS = np.linspace(-20.0, 20.0, 4001)
"""Values of ε of which the best is used. Each of them gives a valid bound; the steps of 0.01 cost at most 0.5 %."""
INTERVAL = 1e-3
"""Width of the grid of privacy losses, relative to the spread of the losses.

Measured: ten times finer grids change the bound by at most 0.0002, and take up to ten times as long.
"""
MIN_NOISE = 0.01
"""Smallest noise multiplier for which subsampling is taken into account. Below, ``dp-accounting`` overflows."""


@dataclass(frozen=True)
class StatedDP:
    """The parameters of DP-SGD that a client states.

    Args:
        noise_multiplier: σ, the standard deviation of the noise on the sum of the gradients, divided by the clip norm.
        clip: norm to which the gradient of each sample is clipped. None if it is not known.
        sample_rate: probability with which a step draws a sample, within (0, 1].
        steps: number of DP-SGD steps on the client's data that the server has seen, over all rounds.
        kappa: κ, the probability with which an attacker would guess a sample without the update, within (0, 1).
        delta: δ of the composed ε, within (0, 1).

    >>> StatedDP(noise_multiplier=1.0).bound
    0.3891436916453...
    >>> round(StatedDP(noise_multiplier=1.0, steps=8).epsilon, 2)
    15.46
    """

    noise_multiplier: float
    clip: float | None = None
    sample_rate: float = 1.0
    steps: int = 1
    kappa: float = KAPPA
    delta: float = DELTA

    def __post_init__(self) -> None:
        if not 0 < self.noise_multiplier < math.inf:
            raise OptionError(f"noise_multiplier={self.noise_multiplier:g}: expected a positive number")
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise OptionError(f"clip={self.clip:g}: expected a positive number, or None if it is not known")
        if not 0 < self.sample_rate <= 1 or not 0 < self.kappa < 1 or self.steps < 1:
            given = f"sample_rate={self.sample_rate:g}, steps={self.steps}, kappa={self.kappa:g}"
            raise OptionError(f"{given}: expected a rate within (0, 1], at least one step, and κ within (0, 1)")
        if not 0 < self.delta < 1:
            raise OptionError(f"delta={self.delta:g}: expected a number within (0, 1)")

    @property
    def bound(self) -> float:
        """Largest probability γ with which any attacker recovers a sample.

        Raises:
            MissingExtraError: If ``sample_rate`` is below 1 and ``dp-accounting`` is not installed.
        """
        every_step = float(ndtr(ndtri(self.kappa) + math.sqrt(self.steps) / self.noise_multiplier))
        if self.sample_rate == 1 or self.noise_multiplier < MIN_NOISE:
            return every_step
        subsampled = np.exp(EPSILONS) * self.kappa + self._losses().get_delta_for_epsilon(EPSILONS)
        return min(1.0, every_step, float(np.min(subsampled)))

    @property
    def epsilon(self) -> float:
        """The composed ε of all steps at ``delta``.

        Raises:
            MissingExtraError: If ``sample_rate`` is below 1 and ``dp-accounting`` is not installed.
        """
        every_step = _epsilon_of_gaussian(math.sqrt(self.steps) / self.noise_multiplier, self.delta)
        if self.sample_rate == 1 or self.noise_multiplier < MIN_NOISE:
            return every_step
        return min(every_step, float(self._losses().get_epsilon_for_delta(self.delta)))

    def check_packages(self) -> None:
        """Check that the bound and ε can be computed.

        Raises:
            MissingExtraError: If ``sample_rate`` is below 1 and ``dp-accounting`` is not installed.
        """
        if self.sample_rate < 1:
            _accounting()

    def _losses(self) -> Any:
        """The distribution of the privacy loss of all subsampled steps together."""
        spread = math.sqrt(self.steps) * self.sample_rate / self.noise_multiplier
        losses = _accounting().from_gaussian_mechanism(
            self.noise_multiplier,
            value_discretization_interval=INTERVAL * max(0.1, self.noise_multiplier**-2, spread),
            sampling_prob=self.sample_rate,
            use_connect_dots=True,
        )
        return losses.self_compose(self.steps) if self.steps > 1 else losses


def _accounting() -> Any:
    with needs("dp-accounting", "dp"):
        from dp_accounting.pld import privacy_loss_distribution
    return privacy_loss_distribution


def _epsilon_of_gaussian(mean: float, delta: float) -> float:
    """Return ε of a Gaussian mechanism at δ. ``mean`` is the largest change that a sample causes, divided by σ."""

    def excess(epsilon: float) -> float:
        above, below = mean / 2 - epsilon / mean, -mean / 2 - epsilon / mean
        return float(ndtr(above) - np.exp(epsilon + log_ndtr(below))) - delta

    if excess(0.0) <= 0:
        return 0.0
    return float(brentq(excess, 0.0, mean**2 / 2 - mean * float(ndtri(delta))))


def rounded_up(value: float) -> str:
    """Round a bound up to three digits, so that it stays a bound.

    >>> rounded_up(14.8718), rounded_up(0.0)
    ('14.9', '0')
    """
    digit = 10.0 ** (math.floor(math.log10(value)) - 2) if value > 0 else 1.0
    return f"{math.ceil(value / digit - 1e-9) * digit:.3g}"


def probability(value: float) -> str:
    """Round a bound on a probability up to three digits.

    >>> probability(0.38914), probability(0.9999), probability(2.3451e-5)
    ('0.39', '1', '2.35e-05')
    """
    return rounded_up(min(1.0, value))
