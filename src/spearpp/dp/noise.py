"""How much Gaussian noise an update can contain, and how long clipping and noise let it be."""

import math

import torch

from spearpp.types import Tensor
from spearpp.update import ClientUpdate
from spearpp.update.lazy import blocks, nonzero, tensor_specs

STANDARD_DEVIATIONS = 5.0
"""How many standard deviations of chance are allowed before the update contradicts a statement.

Design choice: a false alarm then has a probability of 3e-7 for each matrix.
"""
MAX_SIDE = 512
"""Rows and columns of a matrix in which the noise is measured. Design choice: 262,144 entries give it within 1 %."""
MAX_ZEROS = 0.01
"""Share of zeros above which the noise is not measured: Gaussian noise leaves no zeros. Design choice."""


def possible_noise(update: ClientUpdate) -> float | None:
    """Return the largest standard deviation of independent Gaussian noise that the entries of an update can have.

    Let a matrix with m rows and n columns be a signal of rank r plus noise of standard deviation s. Without its r
    largest singular values, the matrix has at least the squared norm that the noise has without its 2 r largest ones,
    which is at least s² (mn - 2 r (√m + √n)²) up to chance. Solving for s bounds the noise. The rank is not known, so
    the smallest of the values for all r is returned: a signal of larger rank only adds to what is left.

    Returns:
        The smallest of these values over all matrices of the update, or None if no matrix is large enough.
    """
    found = [_possible_noise(each) for each in _matrices(update)]
    return min((each for each in found if each is not None), default=None)


def _possible_noise(matrix: Tensor) -> float | None:
    m, n = matrix.shape
    values = torch.linalg.svdvals(matrix.double()).square()
    rank = torch.arange(len(values), dtype=torch.float64, device=values.device)
    left = values.flip(0).cumsum(0).flip(0)
    chance = STANDARD_DEVIATIONS * math.sqrt(2 * m * n)
    free = m * n - chance - 2 * rank * (math.sqrt(m) + math.sqrt(n)) ** 2
    usable = free > 0
    return float((left[usable] / free[usable]).min().sqrt()) if bool(usable.any()) else None


def _matrices(update: ClientUpdate) -> list[Tensor]:
    """Return the first rows and columns of every matrix of the update that is not zero."""
    parts = []
    for name, spec in tensor_specs(update.gradients).items():
        if spec.ndim < 2 or not nonzero(update.gradients, name):
            continue
        rows: list[Tensor] = []
        for block in blocks(update.gradients, name):
            rows.append(block.flatten(1)[:MAX_SIDE, :MAX_SIDE])
            if sum(len(each) for each in rows) >= MAX_SIDE:
                break
        parts.append(torch.cat(rows)[:MAX_SIDE])
    return parts


def norm_of(update: ClientUpdate) -> float:
    """Return the norm of the whole update."""
    parts = (part for name in update.gradients for part in blocks(update.gradients, name))
    return math.sqrt(sum(float(part.double().square().sum()) for part in parts))


def largest_norm(update: ClientUpdate, clip: float, noise: float) -> float:
    """Return the largest norm of a clipped mean plus noise that chance allows."""
    count = sum(spec.numel() for spec in tensor_specs(update.gradients).values())
    chance = 2 * clip * noise + noise**2 * math.sqrt(2 * count)
    return math.sqrt(clip**2 + noise**2 * count + STANDARD_DEVIATIONS * chance)


def share_of_zeros(update: ClientUpdate) -> float:
    """Return the share of exact zeros in the tensors of the update that are not zero throughout."""
    total = zeros = 0
    for name in update.gradients:
        if nonzero(update.gradients, name):
            for block in blocks(update.gradients, name):
                total, zeros = total + block.numel(), zeros + int((block == 0).sum())
    return zeros / max(1, total)
