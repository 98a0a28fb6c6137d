"""Probability that an input agrees with a gradient by chance."""

import math

import torch

from spearpp.types import Bool, Float, Int, Tensor

UNLUCKY = 1e-6
"""Accepted probability that a sample of the batch has more active neurons without a gradient than allowed.

A design choice: a batch of a thousand samples is rejected by this rule once in a thousand times.
"""


def most_by_chance(mean: Float[Tensor, "*u b"]) -> Int[Tensor, "*u b"]:
    """The smallest count that a Poisson variable of this mean exceeds with probability ``UNLUCKY`` at most."""
    counts = torch.arange(int(mean.max() + 6 * mean.max().sqrt()) + 8, device=mean.device)
    exceeds = torch.special.gammainc((counts + 1).to(mean), mean[..., None])  # P(N > count)
    return (exceeds > UNLUCKY).sum(-1)


def coins(
    neurons: Int[Tensor, "*n"], zeros: Int[Tensor, "*k"], inactive: Int[Tensor, "*k"], free: int
) -> Float[Tensor, "*k"]:
    """Number of fair coins that agree by chance as rarely as all inactive neurons lie among the zeros of a column.

    ``free`` zeros exist by construction. Let n, k and s be the numbers of neurons, zeros and inactive neurons beyond
    those. The probability is that of drawing s zeros in a row without replacement: C(n - s, k - s) / C(n, k).

    >>> import torch
    >>> round(float(coins(torch.tensor(4), torch.tensor(2), torch.tensor(2), 0)), 3)  # 1 of 6
    2.585
    """
    n, k, s = (each.double() - free for each in (neurons, zeros, inactive))
    s = torch.minimum(s.clamp_min(0), k.clamp_min(0))

    def log_choose(of: Tensor, some: Tensor) -> Tensor:
        return torch.lgamma(of + 1) - torch.lgamma(some + 1) - torch.lgamma(of - some + 1)

    chance = log_choose(n - s, k - s) - log_choose(n, k)
    return torch.where((k > 0) & (k <= n), -chance / math.log(2), 0.0)


def chance_of_zeros(
    zeros: Int[Tensor, "*u b"], relative: Float[Tensor, "*u b m"], live: Bool[Tensor, "*u 1 m"], batch_size: int
) -> Float[Tensor, "*u b"]:
    """Chernoff's bound exp(-n KL(x ‖ π)) on the probability that n x or more of n entries fall below the noise.

    A wrong vertex has b-1 zeros by construction. Its n = m - (b-1) other entries are modelled as Gaussian with the root
    mean square of L q. Each is below its bound, ``relative`` to the root mean square, with probability
    π = erf(relative/√2) on average.
    """
    free = batch_size - 1
    if free == 0:  # the only direction cannot be found by chance
        return torch.zeros_like(zeros, dtype=torch.float64)
    neurons = live.sum(-1).double()
    others = (neurons - free).clamp_min(1)
    share = ((zeros - free) / others).clamp(0, 1)
    under = (torch.special.erf(relative / 2**0.5) * live).sum(-1) / neurons.clamp_min(1)
    under = under.clamp(1e-12, 1 - 1e-12)
    divergence = torch.special.xlogy(share, share / under) + torch.special.xlogy(1 - share, (1 - share) / (1 - under))
    return torch.where(share > under, torch.exp(-others * divergence), 1.0)
