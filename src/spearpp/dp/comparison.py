"""A statement about DP-SGD beside what an audit recovered, and beside the noise that the update can contain."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from spearpp.auditing import AuditResult
from spearpp.dp.bound import StatedDP, probability, rounded_up
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


@dataclass(frozen=True)
class Comparison:
    """A statement about DP-SGD beside what the audit of the update shows."""

    stated: StatedDP
    bound: float
    """Largest probability γ with which any attacker recovers a sample, if the statement is true."""
    epsilon: float
    """The composed ε of all stated steps at the stated δ."""
    recovered: float | None
    """Share of the samples that the audit recovered. None if the number of samples is not known."""
    stated_noise: float | None = None
    """Standard deviation of the stated noise on each entry of the update. None if it is not known."""
    possible_noise: float | None = None
    """Largest standard deviation of noise that the update can contain. None if it was not measured."""
    not_checked: str | None = None
    """Why the noise of the update was not compared with the statement. None if it was compared."""
    warnings: tuple[str, ...] = ()
    """What speaks against the statement."""

    @property
    def sentence(self) -> str:
        """What the statement implies, in words."""
        stated = self.stated
        sampled = "" if stated.sample_rate == 1 else f", sample rate {stated.sample_rate:g}"
        steps = f"{stated.steps} step{'s' if stated.steps > 1 else ''}"
        return (
            f"With noise multiplier {stated.noise_multiplier:g}{sampled} and {steps} of DP-SGD, an attacker who would "
            f"guess a sample with probability κ = {stated.kappa:g} without the update succeeds with probability at "
            f"most {probability(self.bound)} with it. The composed ε is {rounded_up(self.epsilon)} at δ = "
            f"{stated.delta:g}."
        )

    @property
    def measured(self) -> str:
        """What the audit recovered, in words."""
        if self.recovered is None:
            return "The share of samples that the audit recovered is not known."
        return f"The audit recovered {self.recovered:.0%} of the samples."

    def to_dict(self) -> dict[str, Any]:
        """Return the content of the field ``dp`` of ``report.json``."""
        content = asdict(self)
        return {**content.pop("stated"), **content, "sentence": self.sentence, "measured": self.measured}


def compare(stated: StatedDP, update: ClientUpdate, result: AuditResult, batch_size: int | None = None) -> Comparison:
    """Compute the bound, and compare the statement with the update and with what was recovered.

    Args:
        stated: what the client states.
        update: the last update of the client.
        result: the audit of the update.
        batch_size: number of samples of a step, by which the client divides the sum of the gradients. None if it is
            not known. The noise is then not compared.
    """
    bound, epsilon, share = stated.bound, stated.epsilon, _recovered_share(result, batch_size)
    warnings = [] if share is None or share <= bound else [_too_many(share, bound)]
    not_checked = _why_not_checked(stated, update, batch_size)
    if not_checked is not None or stated.clip is None or batch_size is None:
        return Comparison(stated, bound, epsilon, share, not_checked=not_checked, warnings=tuple(warnings))
    steps = 1 if update.kind == "gradients" else update.steps or 1
    noise = stated.noise_multiplier * stated.clip / batch_size / math.sqrt(steps)
    possible = possible_noise(update)
    drawn = STANDARD_DEVIATIONS * math.sqrt((1 - stated.sample_rate) / batch_size)
    if possible is not None and possible < noise * (1 - drawn):
        warnings.append(
            f"The update contains noise with a standard deviation of at most {possible:.2g}, but the statement means "
            f"{noise:.2g} for {batch_size} samples. The noise is weaker than stated, so the bound does not hold."
        )
    if update.kind == "gradients":  # several steps may add up to any norm
        norm, largest = norm_of(update), largest_norm(update, stated.clip * (1 + drawn), max(noise, possible or 0.0))
        if norm > largest:
            warnings.append(
                f"The update has the norm {norm:.3g}, but clipping to {stated.clip:g} and the noise allow at most "
                f"{largest:.3g}. The gradients are not clipped as stated, so the bound does not hold."
            )
    return Comparison(stated, bound, epsilon, share, noise, possible, None, tuple(warnings))


def _too_many(share: float, bound: float) -> str:
    """Say that the audit recovered more than expected. The probability is Markov's inequality."""
    return (
        f"The audit recovered {share:.0%} of the samples, but under the statement the expected share is at most "
        f"{probability(bound)}. A result like this has a probability of at most {probability(bound / share)}. Check "
        "the noise, the clipping, the number of steps and κ."
    )


def _recovered_share(result: AuditResult, batch_size: int | None) -> float | None:
    """Return the share of the client's samples that the audit recovered; None if their number is not known."""
    if result.best is None:
        return 0.0
    total = batch_size or result.best.batch_size
    return None if not total or result.best.layer.tokens else min(1.0, len(result.inputs) / total)


def _why_not_checked(stated: StatedDP, update: ClientUpdate, batch_size: int | None) -> str | None:
    """Return why the noise of an update cannot be compared with a statement, or None if it can."""
    if stated.clip is None or batch_size is None:
        return "The clipping norm and the number of samples are needed to compare the noise of the update."
    if update.clients > 1:
        return "The update is a sum of several clients, so its noise is not that of one client."
    if update.kind != "gradients" and update.lr is None:
        return "The learning rate is needed to compare the noise of the update."
    zeros = share_of_zeros(update)
    if zeros > MAX_ZEROS:
        return (
            f"{zeros:.0%} of the entries are exactly zero, which Gaussian noise never gives. Either not every entry "
            "has noise, and the bound does not hold, or the update was pruned or rounded after the noise was added."
        )
    return None


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
