"""Judge recovered inputs: replay each input alone, find its label, and replay the whole update."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import nn

from spearpp.auditing.claim import Claim, Kind
from spearpp.auditing.claims import judge
from spearpp.auditing.estimate import MAX_PARAMETERS, Estimate, estimate
from spearpp.auditing.network import labels_of
from spearpp.auditing.numbers import Finding
from spearpp.auditing.replay import Replay, replay
from spearpp.auditing.result import LayerAudit
from spearpp.auditing.signals import Signals, replay_alone
from spearpp.auditing.weights import Known
from spearpp.errors import DataError, NonFiniteError, OptionError, SpearError
from spearpp.inversion.evidence import EXACT
from spearpp.inversion.factors import Factors
from spearpp.inversion.result import Inversion
from spearpp.linalg.time_limit import OutOfTimeError, time_is_up
from spearpp.model import Layer, Sees, assumed_networks
from spearpp.types import Bool, Float, Tensor
from spearpp.update import ClientUpdate
from spearpp.update.lazy import pick, tensor_specs

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
PROVES_NETWORK = 1e-3
"""Largest mismatch of an input replayed alone that proves the assumed network.

A design choice: 1e-3 is far above the rounding of float32, and a wrong network leaves a far larger mismatch.
"""


@dataclass(frozen=True)
class Judged:
    """Layers with their claims and labels."""

    audits: list[LayerAudit]
    network: nn.Module | None
    """The given model, or the network that was assumed and that a replay proved. None if there is neither."""
    signals: dict[str, Signals]
    """The replay of each input alone, by name of the layer."""


def judge_all(
    audits: list[LayerAudit], update: ClientUpdate, model: nn.Module | None, batch_size: int | None
) -> Judged:
    """Add a claim and a label to every recovered input.

    Without a model, the function tries several common networks. The first network through which the replay of an input
    reproduces the input's part of the update is used for all layers.

    Args:
        audits: the layers after their inversion.
        update: what the client sent.
        model: the network, or None.
        batch_size: the number of samples that the client trained on, or None.
    """
    guesses = assumed_networks(update) if model is None and update.clients == 1 else []
    network = model
    judged, replayed = [], {}
    for each in audits:
        factors = None if each.inversion is None else each.inversion.factors
        if each.inversion is None or factors is None or not len(each.inversion.inputs):
            judged.append(each)
            continue
        signals = None
        for candidate in guesses if network is None else [network]:
            signals = _signals(candidate, update, each.layer, each.inversion, factors)
            if network is None and signals is not None and bool((signals.mismatch <= PROVES_NETWORK).any()):
                network = candidate
                break
        if network is not None and signals is not None:
            replayed[each.layer.name] = signals
            patterns = patterns_of(each.layer, each.inversion.inputs, update)
            claims = judge(each.inversion, patterns, signals, known_of(each.layer, update, batch_size))
            each = _exact_only(replace(each, claims=claims))
        labels = None if network is None else _labels(network, update, each, factors, signals)
        judged.append(replace(each, labels=labels))
    return Judged(judged, network, replayed)


def judge_in_round(
    audited: LayerAudit, update: ClientUpdate, model: nn.Module | None, batch_size: int | None
) -> LayerAudit:
    """Add claims and labels to inputs that several rounds gave together, from what one of the rounds says about them.

    Args:
        audited: the layer. Its inversion contains the inputs of this round, and its factors the rows of this round.
        update: what the client sent in this round.
        model: the network, or None.
        batch_size: the number of samples that the client trained on in this round, or None.
    """
    found = audited.inversion
    if found is None or found.factors is None or not len(found.inputs):
        return audited
    signals = None if model is None else _signals(model, update, audited.layer, found, found.factors)
    patterns = patterns_of(audited.layer, found.inputs, update)
    claims = judge(found, patterns, signals, known_of(audited.layer, update, batch_size))
    labels = None
    if signals is not None and len(signals.labels) == len(found.inputs):
        labels = torch.where(signals.mismatch <= PROVES_NETWORK, signals.labels, -1)
    return replace(audited, claims=claims, labels=labels)


def judge_by_layer(audited: LayerAudit, update: ClientUpdate, batch_size: int | None) -> LayerAudit:
    """Add the claims that the gradient of the layer alone supports, without any replay."""
    if audited.inversion is None:
        return audited
    patterns = patterns_of(audited.layer, audited.inversion.inputs, update)
    claims = judge(audited.inversion, patterns, None, known_of(audited.layer, update, batch_size))
    return _exact_only(replace(audited, claims=claims))


def _exact_only(audited: LayerAudit) -> LayerAudit:
    """Withdraw approximate claims about inputs of an output layer.

    A softmax that is sure of a class gives nearly the same signal for different inputs, so the stated error of an input
    that is not exact is not reliable. Measured: one of 42 such inputs was wrong by more than its norm times 0.5.
    """
    if not audited.layer.output:
        return audited
    weak = Claim(Kind.FITS, float("inf"), float("nan"), "the output layer determines this input only approximately")
    claims = tuple(weak if each.kind is Kind.APPROXIMATE else each for each in audited.claims)
    return replace(audited, claims=claims)


def known_of(layer: Layer, update: ClientUpdate, batch_size: int | None) -> Known:
    """Return what the audit knows about a layer in addition to its recovered inputs."""
    return Known(
        batch_size,
        absolute=_absolute(update),
        one_step=is_one_step(update),
        one_row_each=layer.sees == "inputs",
        dropout=layer.dropout,
        outputs=_outputs(update),
    )


def _outputs(update: ClientUpdate) -> int:
    """Return the number of outputs of the last matrix of the update, which counts as the output layer."""
    matrices = [spec.shape for spec in tensor_specs(update.weights).values() if spec.ndim == 2]
    return matrices[-1][0] if matrices else 0


def is_one_step(update: ClientUpdate) -> bool:
    """Return whether the update is a single gradient of one client."""
    return update.kind == "gradients" and update.clients == 1


def _absolute(update: ClientUpdate) -> bool:
    """Return whether the update has the scale of the loss: a gradient, or weights after one step with a known lr."""
    one_known_step = update.steps in (None, 1) and update.lr is not None
    return update.clients == 1 and (update.kind == "gradients" or one_known_step)


def _signals(
    model: nn.Module, update: ClientUpdate, layer: Layer, inversion: Inversion, factors: Factors
) -> Signals | None:
    """Replay each input of a layer alone, or return None if this is not possible."""
    if update.clients > 1 or time_is_up():
        return None
    if layer.output and layer.sees != "inputs":
        model, update, layer = _output_alone(update, layer)
    elif layer.sees != "inputs":
        return None
    with suppress(OptionError, OutOfTimeError):
        return replay_alone(model, update, layer, inversion, factors)
    return None


def _output_alone(update: ClientUpdate, layer: Layer) -> tuple[nn.Module, ClientUpdate, Layer]:
    """Return the output layer as a model of its own, whose inputs are the features, with its part of the update."""
    names = {"weight": layer.weight} | ({} if layer.bias is None else {"bias": layer.bias})
    alone = replace(update, weights=pick(update.weights, names), gradients=pick(update.gradients, names))
    model = nn.Linear(layer.features, layer.neurons, bias=layer.bias is not None)
    bias = None if layer.bias is None else "bias"
    return model, alone, replace(layer, name="(the model itself)", weight="weight", bias=bias, sees=Sees.INPUTS)


def patterns_of(layer: Layer, inputs: Float[Tensor, "k n"], update: ClientUpdate) -> Bool[Tensor, "k m"]:
    """Return which neurons of the layer each input activates."""
    weight = update.weights[layer.weight]
    z = inputs.to(weight.device).double() @ weight.double().T
    return z + (0.0 if layer.bias is None else update.weights[layer.bias].double()) > 0


def _labels(
    model: nn.Module, update: ClientUpdate, audited: LayerAudit, factors: Factors, signals: Signals | None
) -> Tensor | None:
    """Return the labels of the replays if all replays match, else the labels that fit the gradient of the layer."""
    found = audited.inversion
    if found is not None and audited.layer.output and audited.layer.sees == "features" and signals is not None:
        proved = (signals.mismatch <= PROVES_NETWORK).cpu()
        labels = torch.where(proved, signals.labels.cpu(), -1)
        return torch.cat([labels, labels.new_full((len(found.inputs) - len(labels),), -1)])
    if found is None or audited.layer.sees != "inputs":
        return None
    if (
        signals is not None
        and len(signals.labels) == len(found.inputs)
        and bool((signals.mismatch <= PROVES_NETWORK).all())
    ):
        return signals.labels
    if not bool(found.certified.any() or found.fits.any()) and found.stats.found < found.batch_size:
        return None
    try:
        labels = labels_of(model, update, audited.layer, found, factors)
        if update.kind != "gradients" and not bool((labels >= 0).any()):
            labels = labels_of(model, update, audited.layer, found, factors, uphill=True)
    except (DataError, NonFiniteError):
        raise
    except (SpearError, OutOfTimeError):
        return None
    return labels


def replay_all(audits: list[LayerAudit], update: ClientUpdate, model: nn.Module | None) -> Replay | None:
    """Replay the whole update with the first layer that recovered all samples and labels, or return None."""
    for inputs, labels in _whole_batches(audits):
        if model is not None:
            with suppress(OptionError, OutOfTimeError):
                return replay(model, update, inputs, labels)
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
    audits: list[LayerAudit], update: ClientUpdate, model: nn.Module | None, replayed: Replay | None, seconds: float
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
    for inputs, labels in _whole_batches(audits):
        if model is not None:
            with suppress(OptionError, OutOfTimeError):
                return estimate(model, update, inputs, labels, seconds=seconds)
    return None


def _whole_batches(audits: list[LayerAudit]) -> Iterator[tuple[Tensor, Tensor]]:
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
