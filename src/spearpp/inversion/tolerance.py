"""Which numbers count as zero. Every comparison with zero in this package is one of the six below.

All six follow from the noise that the singular values show (``factors``). For a float32 gradient this noise is
rounding. Differential privacy and local training add noise of their own. For a unit vector q:

- **an entry of D is zero** if |ℓ_k·q| ≤ c σ_k ‖Σ⁻¹q‖, where σ_k ‖Σ⁻¹q‖ is the standard deviation of the noise in this
  entry, and c is a Gaussian quantile. The bound is wider where it is negligible (``Tolerance.zeros``, ``entry``);
- **an entry looks zero to a search** if it is below that bound, or below a thousandth of the root mean square of L q
  (``Tolerance.look_zero``);
- **rows have a common kernel** if the smallest singular value of the r rows is at most √r times the bound of one entry
  (``Tolerance.kernel``). The kernel has one dimension if the second smallest singular value is larger than that;
- **two directions are the same** if the sine of their angle is at most 1e-6, or at most the angle by which noise can
  turn a direction: 4 σ ‖Σ⁻¹q‖ √(b/τ), where τ is the smallest share of zeros in L q (``Tolerance.angle``);
- **directions are independent** if each has a distance of at least ``MIN_INDEPENDENT_DISTANCE`` from the span of the
  others;
- **a pre-activation has no clear sign** if |z_k| ≤ c (σ ‖p‖ + ε ‖x̂‖) ‖ŵ_k‖: noise in x̂ = Rᵀp, and the rounding ε of
  the client's own arithmetic, could change the sign (``Tolerance.preactivation``).
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch

from spearpp.inversion.factors import Factors
from spearpp.inversion.observation import Observation
from spearpp.types import Bool, Float, Tensor

BOUND_EXCEEDED = 1e-3
"""Probability that Gaussian noise exceeds its bound in any of the m·b entries of D. Design choice: one batch in a
thousand has such an entry, and a batch is recovered despite one missed zero."""
MAX_WIDENING = 3.0
"""Factor by which the bound for zero is widened where it is negligible. Measured: rounding noise reached 10.9 standard
deviations and the smallest gradient of an active neuron was 404, so 3 c = 15 lies between the two
(``docs/lab/notebook.md``, "What counts as zero")."""
MAX_WIDENED_BOUND = 1e-2
"""Largest widened bound, relative to the root mean square of L q. Design choice: if the entries of
active neurons are Gaussian, less than one percent of them lie below this bound."""
SEARCH_RESOLUTION = 1e-3
"""Largest entry that looks zero to a search, relative to the root mean square of L q. Design choice: searches run in
float32 and stop early. Measured: about one direction in ten has an active neuron below this limit, and the weights of
``pool.refit`` correct these directions (``docs/lab/notebook.md``, "What counts as zero")."""
SAME_DIRECTION = 1e-6
"""Sine of the angle below which two directions are the same without noise. Design choice: well above 1.5e-8, the
error of a sine that is computed from a float64 product, and far below the angle between different samples."""
MIN_INDEPENDENT_DISTANCE = 1e-7
"""Smallest distance of a unit direction from the span of others. Design choice: a few times 1.5e-8, the
square root of the float64 precision, which is the error of a direction that is solved from a Gram matrix."""
STATED_SIGMAS = 4.0
"""Number of standard deviations of the stated error of an input (``evidence.one_layer``), and of the angle between two
estimates of one direction. Design choice. Rounding is not Gaussian: in 3,000 hostile updates the true error of an input
reached eight standard deviations, twice the stated error (``docs/results/hostile.md``)."""
MIN_KERNEL_BOUND = 1e-12
"""Smallest bound for a singular value of a kernel. Design choice for gradients without noise:
some thousand times the float64 precision of rows with norm 1."""
RARE = 1e-9
"""Accepted probability of an error. Design choice of the SPEAR paper, which we keep."""


@dataclass(frozen=True)
class Tolerance:
    """The noise of one layer, in the form that the six decisions need."""

    sigmas: float
    """c, the number of standard deviations that noise may reach."""
    row_noise: Float[Tensor, "m"]
    """σ_k, the standard deviation of the noise in row k of Ĝ."""
    noise: Float[Tensor, ""]
    """σ, the root mean square of σ_k over the neurons with a gradient."""
    bias_noise: Float[Tensor, ""]
    """σ_b, the standard deviation of the noise in an entry of the bias gradient; 0 for a layer without bias."""
    inverse_singular_values: Float[Tensor, "b"]
    """The diagonal of Σ⁻¹."""
    weight_norms: Float[Tensor, "m"]
    """‖ŵ_k‖, the norm of the weights of neuron k, including its bias."""
    preactivation: Float[Tensor, "b"]
    """t = c (σ + ε Σ): the pre-activation z_k of the input x̂ = Rᵀp has a clear sign if |z_k| > ‖t ∘ p‖ ‖ŵ_k‖."""
    least_sparsity: float
    """τ, the smallest share of zeros in L q, among the neurons with a gradient."""
    least_zeros: int
    """The smallest number of zeros in L q for a candidate direction q."""

    def amplification(self, directions: Float[Tensor, "k b"]) -> Float[Tensor, "k"]:
        """Return ‖Σ⁻¹q‖, the standard deviation of an entry of L q if the noise in Ĝ has standard deviation 1."""
        return torch.linalg.vector_norm(directions * self.inverse_singular_values, dim=1)

    def entry(self, directions: Float[Tensor, "k b"]) -> Float[Tensor, "k m"]:
        """Return the largest |ℓ_k·q| that noise explains if the true entry is zero.

        The bound is c σ_k ‖Σ⁻¹q‖. It is widened by up to ``MAX_WIDENING`` as long as it stays below
        ``MAX_WIDENED_BOUND`` times the root mean square of L q. L has orthonormal columns, so the entries of L q have
        root mean square 1/√m.
        """
        gaussian = self.sigmas * self.amplification(directions)[:, None] * self.row_noise
        negligible = MAX_WIDENED_BOUND / max(1, len(self.row_noise)) ** 0.5
        return torch.maximum(gaussian, (MAX_WIDENING * gaussian).clamp_max(negligible))

    def zeros(self, values: Float[Tensor, "k m"], directions: Float[Tensor, "k b"]) -> Bool[Tensor, "k m"]:
        """Return which entries of L q are zero up to noise, one row for each direction."""
        return values.abs() <= self.entry(directions)

    def look_zero(self, values: Float[Tensor, "k m"], directions: Float[Tensor, "k b"]) -> Bool[Tensor, "k m"]:
        """Return which entries of L q may be zero, given the finite precision of a search."""
        return values.abs() <= self.at_search_precision(self.entry(directions))

    def at_search_precision(self, bound: Float[Tensor, "k m"]) -> Float[Tensor, "k m"]:
        """Return the bound of ``entry``, or the resolution of a search if that is larger."""
        return bound.clamp_min(SEARCH_RESOLUTION / max(1, bound.shape[1]) ** 0.5)

    def kernel(self, rows: int, directions: Float[Tensor, "k b"]) -> Float[Tensor, "k"]:
        """Return the largest norm of A q that noise explains if q is in the kernel of a matrix A of r rows of L."""
        entry = self.noise * self.amplification(directions)
        return (self.sigmas * rows**0.5 * entry).clamp_min(MIN_KERNEL_BOUND)

    def input_error(self, length: Float[Tensor, "k"], size: Float[Tensor, "k"], features: int) -> Float[Tensor, "k"]:
        """Return the standard deviation of x = x̂ / x̂_last that the noise of R causes, relative to the norm of x.

        Every entry of Rᵀp has noise of standard deviation σ ‖p‖, and the last one σ_b ‖p‖. Dividing by the last entry
        changes the length of x by the relative error of that entry, however small the entry is beside the others.

        Args:
            length: ‖p‖, with p scaled so that x̂ = Rᵀp ends in 1. For a layer without bias, any scale.
            size: ‖x‖ at this scale.
            features: number of entries of x.
        """
        smallest = torch.finfo(size.dtype).tiny ** 0.5  # keeps the error of an input of zeros finite
        per_entry = features**0.5 * self.noise / size.clamp_min(smallest)
        return length * torch.hypot(per_entry, self.bias_noise)

    def angle(self, directions: Float[Tensor, "k b"]) -> Float[Tensor, "k"]:
        """Return the largest sine of the angle between this direction and another that counts as the same."""
        entry = self.noise * self.amplification(directions)
        turned = STATED_SIGMAS * entry * (directions.shape[1] / self.least_sparsity) ** 0.5
        return turned.clamp(SAME_DIRECTION, 0.5)  # never more than 30°, however strong the noise is


def tolerance(seen: Observation, factors: Factors, sparsity: float | None = None) -> Tolerance:
    """Compute the tolerance of a layer from the noise of its gradient.

    Args:
        seen: the gradient and the weights of the layer.
        factors: the factors of the gradient.
        sparsity: τ, the smallest share of zeros; None for ``default_sparsity``, which rejects a true column with
            probability 1e-9 if each of its entries is zero with probability ½.
    """
    m, b = factors.left.shape
    live = factors.live_neurons
    share = default_sparsity(live) if sparsity is None else sparsity
    # The two tails of all m·b entries share this probability equally.
    sigmas = NormalDist().inv_cdf(1 - 0.5 * BOUND_EXCEEDED / max(1, m * b))
    noise = torch.linalg.vector_norm(factors.row_noise) / factors.live.sum().clamp_min(1).sqrt()
    return Tolerance(
        sigmas=sigmas,
        row_noise=factors.row_noise,
        noise=noise,
        bias_noise=_bias_noise(seen, factors),
        inverse_singular_values=1 / factors.singular_values,
        weight_norms=torch.linalg.vector_norm(seen.weight, dim=1),
        preactivation=sigmas * (noise + seen.weight_epsilon * factors.singular_values),
        least_sparsity=max(share, b / max(1, live)),
        least_zeros=max(math.ceil(share * live), b),
    )


def _bias_noise(seen: Observation, factors: Factors) -> Float[Tensor, ""]:
    """Return the standard deviation of the noise in an entry of the bias gradient.

    Rounding is relative to the entry. Where inputs are large, as in tables of raw units, the bias gradient is much
    smaller than the other columns of Ĝ, and so is its noise. The residual of the column, (I - L Lᵀ) g, shows the noise
    outside of the row space of R. The column is inside of this space with a share h, where the noise counts as average.
    The result is never below the rounding of the dtype (``factors.row_noise``).
    """
    if not seen.has_bias:
        return torch.zeros_like(factors.outside)
    live, column, last = factors.live.sum(), seen.gradient[:, -1], factors.right[:, -1]
    residual = column - (factors.left @ last[:, None])[:, 0]
    outside = residual.square().sum() / (live - factors.batch_size).clamp_min(1)
    inside = (last / factors.singular_values).square().sum()
    average = factors.row_noise.square().sum() / live.clamp_min(1)
    rounding = seen.gradient_epsilon / 12**0.5 * torch.linalg.vector_norm(column) / live.clamp_min(1).sqrt()
    return torch.maximum((outside + inside * average).sqrt(), rounding)


def default_sparsity(neurons: int) -> float:
    """Return τ, the 1e-9 quantile of the binomial distribution Bin(m, ½), as a share of m.

    A true column of D has fewer than τ m zeros with probability 1e-9, if each entry is zero with probability ½. The
    SPEAR paper uses the same threshold.

    >>> [round(default_sparsity(m) * m) for m in (200, 1000, 2000, 4000)]
    [58, 405, 866, 1810]
    """
    if neurons == 0:
        return 0.0
    zeros = torch.arange(neurons + 1, dtype=torch.float64)
    probability = torch.distributions.Binomial(neurons, torch.full_like(zeros, 0.5)).log_prob(zeros).exp()
    return int((probability.cumsum(0) < RARE).sum()) / neurons
