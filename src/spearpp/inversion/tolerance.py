"""How "zero" is decided. Every comparison of this package with zero is one of the six below.

All of them follow from the noise that the spectrum shows (see ``lowrank``); with float32
gradients that is rounding, with DP noise or FedAvg it is what those add. For a unit vector q,

- **an entry of D is zero** when |ℓ_k·q| ≤ c σ_k ‖Σ⁻¹q‖. σ_k ‖Σ⁻¹q‖ is the standard deviation of
  the noise in that entry, and c is the Gaussian quantile that all m·b entries of D stay under
  together with probability 0.999 (c = 5.2 at m=200, b=20). Rounding errors have heavier tails (up
  to 11 standard deviations were seen), so the bound widens to 3 c where that is still under a
  hundredth of the root mean square of L q, that is where it costs nothing;
- **an entry looks zero to a search** when it is below that, or below a thousandth of the root mean
  square of L q. Searches run in single precision and stop early; what passes is solved again for
  its zeros in float64 and must then pass the first test (``candidates``);
- **rows have a common kernel** when the least singular value of the r rows is at most √r times what
  one entry may have, and the kernel is a line when the second is larger;
- **two directions are the same** when the sine of their angle is at most 1e-6, or at most what the
  noise can turn a direction by: 4 σ ‖Σ⁻¹q‖ √(b/τ), where τ is the least share of zeros;
- **directions are independent** when each is at least 1e-7 away from the span of the others;
- **a pre-activation has no sign** when |z_k| ≤ c (σ ‖p‖ + ε ‖x̂‖) ‖ŵ_k‖: noise in x̂ = Rᵀp, and
  the rounding ε of the client's own arithmetic, could turn it. Certificates leave it out.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch

from spearpp.inversion.factors import Factors
from spearpp.inversion.observation import Observation
from spearpp.types import Bool, Float, Tensor

HEAVY_TAILS = 3.0
NEGLIGIBLE = 1e-2
SEARCH_RESOLUTION = 1e-3
SAME_DIRECTION = 1e-6
INDEPENDENT = 1e-7
RARE = 1e-9
"""The probability of an error that is accepted, as in SPEAR."""


@dataclass(frozen=True)
class Tolerance:
    """The noise of one layer, ready for the six decisions; or of several alike, along leading dimensions ``*u``."""

    sigmas: float
    """c, how many standard deviations noise may reach."""
    row_noise: Float[Tensor, "*u m"]
    """σ_k."""
    noise: Float[Tensor, "*u"]
    """σ, the root mean square of σ_k over the live neurons."""
    inverse_singular_values: Float[Tensor, "*u b"]
    weight_norms: Float[Tensor, "*u m"]
    """‖ŵ_k‖."""
    preactivation: Float[Tensor, "*u b"]
    """t with tolerance of z_k = ‖t ∘ p‖ ‖ŵ_k‖."""
    least_sparsity: float
    """τ, the least share of zeros among the live neurons."""
    least_zeros: int
    """The number of zeros a direction needs to be a candidate."""

    def amplification(self, directions: Float[Tensor, "*u k b"]) -> Float[Tensor, "*u k"]:
        """‖Σ⁻¹q‖: standard deviation of an entry of L q for unit noise in Ĝ."""
        return torch.linalg.vector_norm(directions * self.inverse_singular_values[..., None, :], dim=-1)

    def entry(self, directions: Float[Tensor, "*u k b"]) -> Float[Tensor, "*u k m"]:
        """The largest entry of L q that noise allows where the true one is zero.

        c σ_k ‖Σ⁻¹q‖, and up to HEAVY_TAILS times that while it is negligible. L has orthonormal
        columns, so the entries of L q have root mean square 1/√m.
        """
        gaussian = self.sigmas * self.amplification(directions)[..., None] * self.row_noise[..., None, :]
        negligible = NEGLIGIBLE / max(1, self.row_noise.shape[-1]) ** 0.5
        return torch.maximum(gaussian, (HEAVY_TAILS * gaussian).clamp_max(negligible))

    def zeros(self, values: Float[Tensor, "*u k m"], directions: Float[Tensor, "*u k b"]) -> Bool[Tensor, "*u k m"]:
        """Which entries of L q (one direction a row) are zero up to noise."""
        return values.abs() <= self.entry(directions)

    def look_zero(self, values: Float[Tensor, "*u k m"], directions: Float[Tensor, "*u k b"]) -> Bool[Tensor, "*u k m"]:
        """Which entries of L q may be zero, given the precision of a search."""
        return values.abs() <= self.at_search_precision(self.entry(directions))

    def at_search_precision(self, bound: Float[Tensor, "*u k m"]) -> Float[Tensor, "*u k m"]:
        """A bound of ``entry``, or what a search can tell from zero if that is more."""
        return bound.clamp_min(SEARCH_RESOLUTION / max(1, bound.shape[-1]) ** 0.5)

    def kernel(self, rows: int, directions: Float[Tensor, "*u k b"]) -> Float[Tensor, "*u k"]:
        """Up to which norm the images of r rows are zero together."""
        entry = self.noise[..., None] * self.amplification(directions)
        return (self.sigmas * rows**0.5 * entry).clamp_min(1e-12)

    def angle(self, directions: Float[Tensor, "*u k b"]) -> Float[Tensor, "*u k"]:
        """The sine up to which another direction is the same as this one."""
        entry = self.noise[..., None] * self.amplification(directions)
        return (4 * entry * (directions.shape[-1] / self.least_sparsity) ** 0.5).clamp(SAME_DIRECTION, 0.5)


def tolerance(seen: Observation, factors: Factors, sparsity: float | None = None) -> Tolerance:
    """Collect what the decisions need.

    Args:
        seen: the layer.
        factors: its gradient, factored.
        sparsity: τ; None takes the share that a column with half of its entries zero falls below
            with probability 1e-9 (``default_sparsity``).
    """
    m, b = factors.left.shape[-2:]
    neurons = factors.live.sum(-1)
    live = int(neurons.max())
    share = default_sparsity(live) if sparsity is None else sparsity
    sigmas = NormalDist().inv_cdf(1 - 0.5e-3 / max(1, m * b))
    noise = torch.linalg.vector_norm(factors.row_noise, dim=-1) / neurons.clamp_min(1).sqrt()
    return Tolerance(
        sigmas=sigmas,
        row_noise=factors.row_noise,
        noise=noise,
        inverse_singular_values=1 / factors.singular_values,
        weight_norms=torch.linalg.vector_norm(seen.weight, dim=-1),
        preactivation=sigmas * (noise[..., None] + seen.weight_epsilon * factors.singular_values),
        least_sparsity=max(share, b / max(1, live)),
        least_zeros=max(math.ceil(share * live), b),
    )


def default_sparsity(neurons: int) -> float:
    """τ: the 1e-9 quantile of Bin(m, ½), as a share of m.

    SPEAR rejects a true column with this probability when each entry is zero with probability ½.

    >>> [round(default_sparsity(m) * m) for m in (200, 1000, 2000, 4000)]
    [58, 405, 866, 1810]
    """
    if neurons == 0:
        return 0.0
    log_half = neurons * math.log(0.5)
    total = 0.0
    for zeros in range(neurons + 1):
        log_choose = math.lgamma(neurons + 1) - math.lgamma(zeros + 1) - math.lgamma(neurons - zeros + 1)
        total += math.exp(log_choose + log_half)
        if total >= RARE:
            return zeros / neurons
    return 1.0
