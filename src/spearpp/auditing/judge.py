"""Judge recovered inputs: replay each input alone and the whole update, and say what this proves."""

from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import nn

from spearpp.auditing.claims import MAX_UNREPLAYED_ERROR, Claim, ClaimKind, Known, claims_of, patterns_of
from spearpp.auditing.estimate import Estimate, estimate_training
from spearpp.auditing.labels import find_labels
from spearpp.auditing.pixels import recover_inputs
from spearpp.auditing.plan import Plan
from spearpp.auditing.refine import refine
from spearpp.auditing.replay import Replay, replay_all
from spearpp.auditing.result import LayerAudit, whole_batches
from spearpp.auditing.signals import WRONG_MISMATCH, Signals, replay_alone
from spearpp.auditing.task import Task
from spearpp.errors import OptionError
from spearpp.inversion.evidence import EXACT, Scope
from spearpp.inversion.result import Inversion
from spearpp.linalg.time_limit import OutOfTimeError, time_is_up, time_limit
from spearpp.model import Layer, Sees, assumed_networks
from spearpp.model.loss import Loss
from spearpp.update import ClientUpdate
from spearpp.update.lazy import pick

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
same number as ``signals.WRONG_MISMATCH``. Inputs without a relation to the update have 1."""


@dataclass
class Judged:
    """What judging gave. Ctrl-C or the end of the budget may end it early."""

    audits: list[LayerAudit]
    network: nn.Module | None
    """The network that inputs are replayed through: the given model, or one that was assumed and proved."""
    replay: Replay | None = None
    estimate: Estimate | None = None
    interrupted: bool = False
    """Whether Ctrl-C ended the judging. Labels and the replay may be missing then."""


def judge_all(audits: list[LayerAudit], plan: Plan, task: Task, deadline: float) -> Judged:
    """Say what is known about every recovered input, first by its layer alone and then by replays.

    Args:
        audits: the layers after their inversion.
        plan: the plan that they follow.
        task: what the caller asks for.
        deadline: end of the time for replays, on the clock ``time.monotonic``.
    """
    judged = Judged([_with_claims(each, plan.update, None, task) for each in audits], task.model)
    try:
        with time_limit(deadline):
            _judge_by_replays(judged, plan, task)
    except KeyboardInterrupt:
        judged.interrupted = True
    return judged


def _judge_by_replays(judged: Judged, plan: Plan, task: Task) -> None:
    """Replay what was recovered, and write every result into ``judged`` as soon as it is there."""
    update, model = plan.update, task.model if plan.replay_skipped is None else None
    judged.audits, judged.network, signals = _judge_alone(judged.audits, update, model, task)
    if model is not None:
        judged.audits, through_front_end = recover_inputs(judged.audits, update, model, task)
        judged.network = through_front_end or judged.network
    if task.loss is Loss.CROSS_ENTROPY:
        judged.audits = refine(judged.audits, update, judged.network)
    batches = whole_batches(judged.audits)
    judged.replay = replay_all(judged.network, update, batches, task.loss)
    if judged.replay is not None:
        proved = [_with_proof(each, judged.replay, signals.get(each.layer.name), update) for each in judged.audits]
        judged.audits = [_without_contradicted(each, judged.replay, update) for each in proved]
    if task.loss is Loss.CROSS_ENTROPY:
        judged.estimate = estimate_training(judged.network, update, batches, judged.replay)


def _judge_alone(
    audits: list[LayerAudit], update: ClientUpdate, model: nn.Module | None, task: Task
) -> tuple[list[LayerAudit], nn.Module | None, dict[str, Signals]]:
    """Replace the claims of inputs that can be replayed, and add labels where the gradient determines them.

    Without a model, the function tries several common networks. The first network through which the replay of an input
    reproduces the input's part of the update is used for all layers. The results are the layers, the given or the
    proved network, and the replay of each input alone by name of the layer.
    """
    guesses = assumed_networks(update) if model is None and update.clients == 1 else []
    network = model
    judged, replayed = [], {}
    for each in audits:
        found = each.inversion
        if found is None or found.factors is None or not len(found.inputs):
            judged.append(each)
            continue
        signals, claimed = None, each
        for candidate in (guesses if task.loss is not None else []) if network is None else [network]:
            signals = _signals(candidate, update, each.layer, found, task.loss)
            if network is None and signals is not None and bool(signals.matched.any()):
                network = candidate
                break
        if signals is not None:
            claimed = _with_claims(each, update, None if network is None else signals, task, refuted=network is None)
        if network is not None and signals is not None:
            replayed[each.layer.name] = signals
        labels = None if network is None else find_labels(network, update, claimed, signals, task.loss)
        judged.append(replace(claimed, labels=labels))
    return judged, network, replayed


def judge_in_round(audited: LayerAudit, update: ClientUpdate, task: Task) -> LayerAudit:
    """Add claims and labels to inputs that several rounds gave together, from what one of the rounds says about them.

    Args:
        audited: the layer. Its inversion contains the inputs of this round, and its factors the rows of this round.
        update: what the client sent in this round.
        task: what the caller asks for.
    """
    found = audited.inversion
    if found is None or found.factors is None or not len(found.inputs):
        return audited
    signals = None if task.model is None else _signals(task.model, update, audited.layer, found, task.loss)
    labels = None
    if signals is not None and len(signals.labels) == len(found.inputs):
        labels = torch.where(signals.matched, signals.labels, -1)
    return replace(_with_claims(audited, update, signals, task), labels=labels)


def _with_claims(
    audited: LayerAudit, update: ClientUpdate, signals: Signals | None, task: Task, *, refuted: bool = False
) -> LayerAudit:
    """Return the layer with a claim for each of its inputs. ``refuted`` is the field of ``Known``.

    Approximate claims about inputs of an output layer are withdrawn. A softmax that is sure of a class gives nearly the
    same signal for different inputs, so the stated error of an input that is not exact is not reliable. Measured: one
    of 42 such inputs was off by more than half of its norm.
    """
    found, layer = audited.inversion, audited.layer
    if found is None:
        return audited
    known = replace(Known.about(layer, update, task), refuted=refuted)
    claims = claims_of(found, patterns_of(layer, found.inputs, update), signals, known)
    if layer.output:
        weak = Claim.fitting("the output layer determines this input only approximately")
        claims = tuple(weak if each.kind is ClaimKind.APPROXIMATE else each for each in claims)
    return replace(audited, claims=claims)


def _signals(
    model: nn.Module, update: ClientUpdate, layer: Layer, inversion: Inversion, loss: Loss | None
) -> Signals | None:
    """Replay each input of a layer alone, or return None if this is not possible."""
    if time_is_up():
        return None
    if layer.output and layer.sees != "inputs":
        model, update, layer = _output_alone(update, layer)
    elif layer.sees != "inputs":
        return None
    with suppress(OptionError, OutOfTimeError):
        return replay_alone(model, update, layer, inversion, loss)
    return None


def _output_alone(update: ClientUpdate, layer: Layer) -> tuple[nn.Module, ClientUpdate, Layer]:
    """Return the output layer as a model of its own, whose inputs are the features, with its part of the update."""
    names = {"weight": layer.weight} | ({} if layer.bias is None else {"bias": layer.bias})
    alone = replace(update, weights=pick(update.weights, names), gradients=pick(update.gradients, names))
    model = nn.Linear(layer.features, layer.neurons, bias=layer.bias is not None)
    bias = None if layer.bias is None else "bias"
    return model, alone, replace(layer, name="(the model itself)", weight="weight", bias=bias, sees=Sees.INPUTS)


def _with_proof(audited: LayerAudit, replayed: Replay, signals: Signals | None, update: ClientUpdate) -> LayerAudit:
    """Add claims for inputs that only the replay of the whole batch proves.

    Averaging an input with another one moves it by half of their distance, and such a batch leaves the difference
    ``replayed.baseline``. Errors and differences are taken as proportional: the average error of the recovered inputs
    is ``difference / baseline`` times half of the distance to another input. An input is excluded if the replay of this
    input alone has a large mismatch. For a single gradient, an input is also excluded if noise does not explain its
    mismatch, because only noise makes such inputs approximate.
    """
    found, labels = audited.inversion, audited.labels
    if not replayed.proves or found is None or labels is None or signals is None or audited.layer.output:
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
    proved &= error <= MAX_UNREPLAYED_ERROR
    if found.evidence is not None and found.evidence.scope is Scope.NETWORK:
        proved &= found.evidence.consistent  # the replay repeats the equations, so it proves nothing more
    if update.one_gradient:
        proved &= signals.mismatch.clamp_min(replayed.difference) <= NOISE_FACTOR * signals.noise
    why = f"the gradient of all recovered inputs together differs from the update by {replayed.difference:.1%}, "
    why += f"and by {replayed.mixed:.0%} if each input is averaged with another one"
    claims = list(audited.claims)
    for row in torch.nonzero(proved)[:, 0].tolist():
        if not claims[row].recovered and claims[row].kind is not ClaimKind.SEVERAL:
            kind = ClaimKind.ONE_OR_MEAN if error[row] <= EXACT else ClaimKind.APPROXIMATE
            claims[row] = Claim(kind, float(error[row]), float("nan"), why)
    return replace(audited, claims=tuple(claims))


def _without_contradicted(audited: LayerAudit, replayed: Replay, update: ClientUpdate) -> LayerAudit:
    """Withdraw the claims about inputs from features if the replay of a whole gradient contradicts them."""
    if audited.layer.sees != Sees.INPUTS_FROM_FEATURES or not update.one_gradient or replayed.difference < CONTRADICTS:
        return audited
    why = f"the replay of all recovered inputs differs from the update by {replayed.difference:.0%}"
    claims = (Claim.fitting(why, claim.samples) if claim.recovered else claim for claim in audited.claims)
    return replace(audited, claims=tuple(claims))
