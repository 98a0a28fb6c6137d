"""Replay the whole update: what it proves beyond the replay of single inputs, and how the client trained."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import torch
from torch import nn

from spearpp.auditing.claim import Claim, Kind
from spearpp.auditing.estimate import MAX_PARAMETERS, Estimate, estimate
from spearpp.auditing.numbers import Finding
from spearpp.auditing.replay import Replay, replay
from spearpp.auditing.result import LayerAudit
from spearpp.auditing.signals import Signals
from spearpp.errors import OptionError
from spearpp.inversion.evidence import EXACT, WHOLE_NETWORK
from spearpp.linalg.time_limit import OutOfTimeError
from spearpp.model.loss import Loss
from spearpp.types import Tensor
from spearpp.update import ClientUpdate
from spearpp.update.lazy import tensor_specs

WRONG_MISMATCH = 0.5
"""Mismatch from which a replay of the whole batch does not prove an input.

Measured: wrong inputs have a mismatch of 0.5 or more.
"""
DIFFERENCE_FACTOR = 2.0
"""Largest ratio of an input's mismatch to the difference of the whole replay, if the whole replay proves the input.

A design choice: the difference is an average over the batch, and single inputs may be worse than the average.
"""
ERROR_FACTOR = 2.0
"""The stated error of an input that only the whole batch proves is this many times the average error of the batch.

A design choice: single inputs may be worse than the average.
"""
NOISE_FACTOR = 50.0
"""Largest ratio of an input's mismatch, and of the difference of the whole replay, to the noise of the input's signal.

Measured: 7 to 16 times where noise has changed the sign of some neurons (noise of a tenth of the gradient's root mean
square, 8 inputs). 50 leaves a margin of three.
"""
MAX_BATCH_ERROR = 0.5
"""Largest stated error of an input that only the whole batch proves.

A design choice: if noise dominates, 0.5 is four standard deviations, and the expected error is an eighth of the norm.
"""


def replay_all(
    audits: list[LayerAudit], update: ClientUpdate, model: nn.Module | None, loss: Loss | None = Loss.CROSS_ENTROPY
) -> Replay | None:
    """Replay the whole update with the first layer that recovered all samples and labels, or return None."""
    for inputs, labels in whole_batches(audits):
        if model is not None and loss is not None:
            with suppress(OptionError, OutOfTimeError):
                return replay(model, update, inputs, labels, loss)
    return None


def add_proof(
    audits: list[LayerAudit], replayed: Replay | None, signals: dict[str, Signals], *, one_step: bool
) -> list[LayerAudit]:
    """Add claims for inputs that only the replay of the whole batch proves.

    Averaging an input with another one moves it by half of their distance, and such a batch leaves the difference
    ``replayed.baseline``. Errors and differences are taken as proportional: the average error of the recovered inputs
    is ``difference / baseline`` times half of the distance to another input. An input is excluded if the replay of this
    input alone has a large mismatch. For ``one_step``, an input is also excluded if noise does not explain its
    mismatch, because only noise makes the inputs of a single gradient approximate.

    Args:
        audits: the layers with their claims and labels.
        replayed: the replay of the whole update, or None.
        signals: the replay of each input alone, by name of the layer.
        one_step: whether the update is a single gradient.
    """
    if replayed is None or not replayed.proves:
        return audits
    return [_with_proof(each, replayed, signals.get(each.layer.name), one_step) for each in audits]


def _with_proof(audited: LayerAudit, replayed: Replay, signals: Signals | None, one_step: bool) -> LayerAudit:
    """Add the claims of ``add_proof`` to one layer."""
    found, labels = audited.inversion, audited.labels
    if found is None or labels is None or signals is None or audited.layer.output:
        return audited
    if not bool((labels >= 0).all()) or len(signals.mismatch) != len(found.inputs):
        return audited
    inputs = found.inputs.double()
    half_distance = torch.linalg.vector_norm(inputs - inputs.roll(1, 0), dim=1) / 2
    norm = torch.linalg.vector_norm(inputs, dim=1).clamp_min(1e-300)
    average_error = replayed.difference / replayed.baseline * half_distance / norm
    noise = torch.zeros_like(average_error) if found.evidence is None else found.evidence.error.double()
    error = torch.maximum(ERROR_FACTOR * average_error, noise)
    proved = signals.mismatch <= min(WRONG_MISMATCH, DIFFERENCE_FACTOR * replayed.difference)
    proved &= error <= MAX_BATCH_ERROR
    if found.evidence is not None and found.evidence.layers == WHOLE_NETWORK:
        proved &= found.evidence.consistent  # the replay repeats the equations, so it proves nothing more
    if one_step:
        proved &= signals.mismatch.clamp_min(replayed.difference) <= NOISE_FACTOR * signals.noise
    why = f"the gradient of all recovered inputs together differs from the update by {replayed.difference:.1%}, "
    why += f"and by {replayed.mixed:.0%} if each input is averaged with another one"
    claims = list(audited.claims)
    for row in torch.nonzero(proved)[:, 0].tolist():
        if not claims[row].recovered and claims[row].kind is not Kind.SEVERAL:
            kind = Kind.ONE_OR_MEAN if error[row] <= EXACT else Kind.APPROXIMATE
            claims[row] = Claim(kind, float(error[row]), float("nan"), why)
    return replace(audited, claims=tuple(claims))


def estimate_training(
    audits: list[LayerAudit], update: ClientUpdate, model: nn.Module | None, replayed: Replay | None
) -> Estimate | None:
    """Estimate how the client trained.

    Returns:
        The estimate, or None if no replay proves the recovered batch, if the client sent gradients instead of weights,
        if the update is a sum of several clients, or if the update is too large.
    """
    if replayed is None or not replayed.proves or replayed.scale <= 0:
        return None
    if update.kind == "gradients" or update.clients > 1:
        return None
    if sum(each.numel() for each in tensor_specs(update.gradients).values()) > MAX_PARAMETERS:
        return None
    for inputs, labels in whole_batches(audits):
        if model is not None:
            with suppress(OptionError, OutOfTimeError):
                return estimate(model, update, inputs, labels)
    return None


def whole_batches(audits: list[LayerAudit]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and labels of every layer that recovered all samples and all labels."""
    for each in audits:
        if each.inversion is None or each.labels is None or each.layer.sees == "features":
            continue
        if len(each.inversion.inputs) == each.inversion.batch_size and bool((each.labels >= 0).all()):
            yield each.inversion.inputs, each.labels


def training_findings(trained: Estimate | None, update: ClientUpdate) -> Iterator[Finding]:
    """Yield a finding about how the client trained: a warning if the caller gave another lr, else a note."""
    if trained is None:
        return
    if trained.differs_from(update):
        given = f"lr={update.lr:.3g}" + ("" if update.steps is None else f", steps={update.steps}")
        yield Finding("warning", "update", f"{given} was given, but the update fits {trained}")
    elif trained.lr is not None or update.lr is None:
        yield Finding("note", "update", f"the update fits {trained}")
