"""What the replay of the whole update says about claims: which it adds, and which it contradicts."""

from dataclasses import replace

import torch

from spearpp.auditing.claims import MAX_UNREPLAYED_ERROR, Claim, Kind
from spearpp.auditing.replay import Replay
from spearpp.auditing.result import LayerAudit
from spearpp.auditing.signals import WRONG, Signals
from spearpp.inversion.evidence import EXACT, WHOLE_NETWORK
from spearpp.model import Sees
from spearpp.update import ClientUpdate

DIFFERENCE_FACTOR = 2.0
"""Largest ratio of an input's mismatch to the difference of the whole replay, if the whole replay proves the input. A
design choice: the difference is an average over the batch, and single inputs may be worse than the average."""
ERROR_FACTOR = 2.0
"""The stated error of an input that only the whole batch proves is this many times the average error of the batch. A
design choice: single inputs may be worse than the average."""
NOISE_FACTOR = 50.0
"""Largest ratio of an input's mismatch, and of the difference of the whole replay, to the noise of the input's signal.
Measured: 7 to 16 times where noise has changed the sign of some neurons (noise of a tenth of the gradient's root mean
square, 8 inputs). 50 leaves a margin of three."""
CONTRADICTS = 0.5
"""Difference of the replay of a whole gradient from which the recovered inputs are not claimed. A design choice: the
same number as ``signals.WRONG``. Inputs without a relation to the update have 1."""


def add_proof(
    audits: list[LayerAudit], replayed: Replay | None, signals: dict[str, Signals], update: ClientUpdate
) -> list[LayerAudit]:
    """Add claims for inputs that only the replay of the whole batch proves.

    Averaging an input with another one moves it by half of their distance, and such a batch leaves the difference
    ``replayed.baseline``. Errors and differences are taken as proportional: the average error of the recovered inputs
    is ``difference / baseline`` times half of the distance to another input. An input is excluded if the replay of this
    input alone has a large mismatch. For a single gradient, an input is also excluded if noise does not explain its
    mismatch, because only noise makes such inputs approximate.

    Args:
        audits: the layers with their claims and labels.
        replayed: the replay of the whole update, or None.
        signals: the replay of each input alone, by name of the layer.
        update: what the client sent.
    """
    if replayed is None or not replayed.proves:
        return audits
    return [_with_proof(each, replayed, signals.get(each.layer.name), update.one_gradient) for each in audits]


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
    proved = signals.mismatch <= min(WRONG, DIFFERENCE_FACTOR * replayed.difference)
    proved &= error <= MAX_UNREPLAYED_ERROR
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


def check_replay(audits: list[LayerAudit], replayed: Replay | None, update: ClientUpdate) -> list[LayerAudit]:
    """Withdraw the claims about inputs from features if the replay of a whole gradient contradicts them."""
    if replayed is None or not update.one_gradient or replayed.difference < CONTRADICTS:
        return audits
    why = f"the replay of all recovered inputs differs from the update by {replayed.difference:.0%}"

    def withdrawn(claim: Claim) -> Claim:
        return Claim.fitting(why, claim.samples) if claim.recovered else claim

    return [
        replace(each, claims=tuple(map(withdrawn, each.claims))) if each.layer.sees == Sees.PIXELS else each
        for each in audits
    ]
