"""Evidence, without ground truth, that a recovered input is a sample of the batch.

This file has the type of all evidence, the rule that turns evidence into certificates, and probabilities of agreement
by chance. ``one_layer`` uses the gradient of one layer and needs all b directions. ``two_layers`` also uses the next
layer, and ``network`` uses all later layers; both judge each input on its own. ``joint`` adds equations that certified
inputs give for the other inputs. If the model is known, replaying an input alone gives further evidence
(``spearpp.auditing.signals``).
"""

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum

import torch

from spearpp.types import Bool, Float, Int, Tensor

EXACT = 1e-3
"""The definition of an exact input: the largest stated error, relative to the norm of the input. A design choice: an
error of a thousandth of the norm cannot be seen in an ordinary picture. (Half a grey level is 2e-3 of the range of a
picture, but the norm of a dark picture is smaller.) All other modules import this value."""
MIN_VIOLATION = 10.0
"""Equations determine an input only if they leave a residual of at least this many times the noise for every vector
that is not its direction (one layer) or its point (several layers). A design choice: ten times the bound that noise
exceeds with probability 1e-3."""
CHANCE_OF_LOST_CERTIFICATE = 1e-6
"""Accepted probability that a sample of the batch loses its certificate, because noise hides the gradients of more of
its active neurons than allowed. Design choice: no certificate becomes wrong, so this probability may be larger than
``tolerance.RARE``."""


class Scope(StrEnum):
    """Which gradients the equations of an input come from."""

    ONE_LAYER = "one layer"
    """The gradient of the layer. No input is exact unless the equations hold for every input of the batch, because each
    input is computed from all directions."""
    TWO_LAYERS = "two layers"
    """The gradients of the layer and of the next layer, which determine each input on its own."""
    NETWORK = "the whole network"
    """The gradients of the layer and of all later layers, which determine each input on its own."""


COLUMNS = ("holds", "determined", "error", "share")
"""The tensors that every kind of evidence has."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """What the gradient says about recovered inputs, one row for each of the k inputs."""

    holds: Bool[Tensor, "k"]
    """Whether the input satisfies the equations of its layers up to noise, and chance does not explain this."""
    determined: Bool[Tensor, "k"]
    """Whether no other input satisfies the same equations."""
    error: Float[Tensor, "k"]
    """The stated error: an estimate of ‖x - true x‖ / ‖x‖ from the noise of the gradient, if the input is a sample of
    the batch. It is not a bound. In tests with hostile clients the true error was at most three times as large
    (``docs/limits.md``, "What a certificate says")."""
    share: Float[Tensor, "k"]
    """How much of the gradient this input explains: ‖d_i‖ ‖x̂_i‖ over the sum of these products for one layer, and over
    the norm of the gradient for several layers."""
    scope: Scope
    """Which gradients the equations come from."""
    details: dict[str, Tensor] = field(default_factory=dict)
    """The numbers behind ``holds`` and ``determined``, by name, one row for each input."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Numbers about the whole batch, by name: ``residual``, and for one layer ``noise``, ``heavier``, ``drift``."""

    @property
    def consistent(self) -> Bool[Tensor, "k"]:
        """Which inputs are proved up to their stated error: they satisfy the equations, and no other input does."""
        return self.holds & self.determined

    @property
    def exact(self) -> Bool[Tensor, "k"]:
        """Which inputs are exact (``Inversion.certified``): consistent, with a stated error of at most ``EXACT``."""
        together = self.holds.all()[None] if self.scope is Scope.ONE_LAYER else torch.ones_like(self.holds[:1])
        return self.consistent & (self.error <= EXACT) & together

    @property
    def columns(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return {**{name: getattr(self, name) for name in COLUMNS}, **self.details}

    def with_unproved(self, count: int) -> "Evidence":
        """Return this evidence with rows for further inputs, about which it says nothing."""

        def extended(column: Tensor, filler: float) -> Tensor:
            return torch.nn.functional.pad(column, (0, count), value=filler)

        details = {
            name: extended(each, math.nan if each.is_floating_point() else 0) for name, each in self.details.items()
        }
        return replace(
            self,
            holds=extended(self.holds, False),
            determined=extended(self.determined, False),
            error=extended(self.error, math.inf),
            share=extended(self.share, math.nan),
            details=details,
        )


def pattern_distances(patterns: Bool[Tensor, "k m"]) -> Float[Tensor, "k k"]:
    """Return in how many neurons the activation patterns of each pair of inputs differ."""
    masks = patterns.double()
    return masks @ (1 - masks).T + (1 - masks) @ masks.T


def most_by_chance(mean: Float[Tensor, "b"]) -> Int[Tensor, "b"]:
    """Return the smallest count that a Poisson variable exceeds with at most ``CHANCE_OF_LOST_CERTIFICATE``."""
    counts = torch.arange(int(mean.max() + 6 * mean.max().sqrt()) + 8, device=mean.device)
    exceeds = torch.special.gammainc((counts + 1).to(mean), mean[:, None])  # P(N > count)
    return (exceeds > CHANCE_OF_LOST_CERTIFICATE).sum(1)


def chance_in_bits(
    neurons: Int[Tensor, ""], zeros: Int[Tensor, "*k"], inactive: Int[Tensor, "*k"], free: int
) -> Float[Tensor, "*k"]:
    """Return -log₂ of the probability that all inactive neurons lie among the zeros of a column by chance.

    ``free`` zeros exist by construction. Let n, k and s be the numbers of neurons, zeros and inactive neurons without
    these. The probability is that of drawing s zeros in a row without replacement: C(n - s, k - s) / C(n, k).

    >>> import torch
    >>> round(float(chance_in_bits(torch.tensor(4), torch.tensor(2), torch.tensor(2), 0)), 3)  # 1 of 6
    2.585
    """
    n, k, s = (each.double() - free for each in (neurons, zeros, inactive))
    s = torch.minimum(s.clamp_min(0), k.clamp_min(0))

    def log_choose(of: Tensor, some: Tensor) -> Tensor:
        return torch.lgamma(of + 1) - torch.lgamma(some + 1) - torch.lgamma(of - some + 1)

    chance = log_choose(n - s, k - s) - log_choose(n, k)
    return torch.where((k > 0) & (k <= n), -chance / math.log(2), 0.0)


def chance_of_zeros(
    zeros: Int[Tensor, "b"], relative: Float[Tensor, "b m"], live: Bool[Tensor, "m"], batch_size: int
) -> Float[Tensor, "b"]:
    """Return a bound on the probability that a wrong direction has as many zeros by chance.

    It is Chernoff's bound exp(-n KL(x ‖ π)) on the probability that n x or more of n entries fall below the noise.

    Every vertex, a vector q for which b-1 independent rows of L give zero, has b-1 zeros by construction. Its n = m -
    (b-1) other entries are modelled as Gaussian with the root mean square of L q. Each is below its bound, ``relative``
    to the root mean square, with probability π = erf(relative/√2) on average.
    """
    free = batch_size - 1
    if free == 0:  # the only direction cannot be found by chance
        return torch.zeros_like(zeros, dtype=torch.float64)
    neurons = live.sum().double()
    others = (neurons - free).clamp_min(1)
    share = ((zeros - free) / others).clamp(0, 1)
    under = (torch.special.erf(relative / 2**0.5) * live).sum(1) / neurons.clamp_min(1)
    under = under.clamp(1e-12, 1 - 1e-12)
    divergence = torch.special.xlogy(share, share / under) + torch.special.xlogy(1 - share, (1 - share) / (1 - under))
    return torch.where(share > under, torch.exp(-others * divergence), 1.0)
