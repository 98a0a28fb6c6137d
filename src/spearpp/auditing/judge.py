"""What recovered inputs prove: each replayed alone, their labels, and the whole update computed again."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import nn

from spearpp.auditing.checks import Finding
from spearpp.auditing.claims import Claim, Kind, Known, judge
from spearpp.auditing.estimate import LARGEST, Estimate, estimate
from spearpp.auditing.replay import Replay, replay
from spearpp.auditing.result import LayerAudit
from spearpp.auditing.signals import Signals, labels_of, replay_alone
from spearpp.errors import DataError, NonFiniteError, OptionError, SpearError
from spearpp.inversion.evidence import EXACT
from spearpp.inversion.factors import Factors
from spearpp.inversion.result import Inversion
from spearpp.model import Layer, assumed_networks
from spearpp.types import Bool, Float, Tensor
from spearpp.update import ClientUpdate
from spearpp.update.lazy import tensor_specs

UNEXPLAINED = 0.5
"""Largest mismatch of an input that a replay of the whole batch proves, and at most twice what that leaves. Wrong
inputs have 0.5 and more."""
MARGIN = 2.0
"""The stated error of such an input is this many times the average that the replay implies."""
NOISY = 50.0
"""How many times the noise of its signal the mismatch of an input, and that of the whole update, may be and still be
due to noise. It is 7 to 16 where noise has changed the sign of some neurons (noise of a tenth of the gradient's
root mean square, 8 inputs)."""
UP_TO_NOISE = 0.5
"""Largest stated error of such an input: four standard deviations, so that it is off by an eighth of its norm or so."""
PROVED = 1e-3
"""Mismatch of an input replayed alone up to which it proves the network that was assumed."""


@dataclass(frozen=True)
class Judged:
    """Layers with their claims and labels."""

    audits: list[LayerAudit]
    network: nn.Module | None
    """The model, or the one that was assumed and proved by a replay."""
    signals: dict[str, Signals]
    """Inputs replayed alone, by layer."""


def judge_all(
    audits: list[LayerAudit], update: ClientUpdate, model: nn.Module | None, batch_size: int | None
) -> Judged:
    """What is claimed of every recovered input, and its label."""
    guesses = assumed_networks(update) if model is None and update.clients == 1 else []
    network = model
    judged, replayed = [], {}
    for each in audits:
        factors = None if each.inversion is None else each.inversion.factors
        if each.inversion is None or factors is None or not len(each.inversion.inputs):
            judged.append(each)
            continue
        signals = None
        for tried in guesses if network is None else [network]:
            signals = _signals(tried, update, each.layer, each.inversion, factors)
            if network is None and signals is not None and bool((signals.mismatch <= PROVED).any()):
                network = tried
                break
        if network is not None and signals is not None:
            replayed[each.layer.name] = signals
            patterns = _patterns(each.layer, each.inversion.inputs, update)
            claims = judge(each.inversion, patterns, signals, _known(each.layer, update, batch_size))
            each = replace(each, claims=claims)
        labels = None if network is None else _labels(network, update, each, factors, signals)
        judged.append(replace(each, labels=labels))
    return Judged(judged, network, replayed)


def judge_by_layer(audited: LayerAudit, update: ClientUpdate, batch_size: int | None) -> LayerAudit:
    """What the layer alone allows to claim, before anything is replayed."""
    if audited.inversion is None:
        return audited
    patterns = _patterns(audited.layer, audited.inversion.inputs, update)
    return replace(audited, claims=judge(audited.inversion, patterns, None, _known(audited.layer, update, batch_size)))


def _known(layer: Layer, update: ClientUpdate, batch_size: int | None) -> Known:
    return Known(
        batch_size,
        absolute=_absolute(update),
        one_step=is_one_step(update),
        one_row_each=layer.sees == "inputs",
        dropout=layer.dropout,
    )


def is_one_step(update: ClientUpdate) -> bool:
    """Whether the update is one gradient of one client."""
    return update.kind == "gradients" and update.clients == 1


def _absolute(update: ClientUpdate) -> bool:
    """Whether a gradient has the scale of the loss: weights that moved by one step of a known learning rate."""
    once = update.steps in (None, 1) and update.lr is not None
    return update.clients == 1 and (update.kind == "gradients" or once)


def _signals(
    model: nn.Module | None, update: ClientUpdate, layer: Layer, inversion: Inversion, factors: Factors
) -> Signals | None:
    if model is None or layer.sees != "inputs" or update.clients > 1:
        return None
    with suppress(OptionError):
        return replay_alone(model, update, layer, inversion, factors)
    return None


def _patterns(layer: Layer, inputs: Float[Tensor, "k n"], update: ClientUpdate) -> Bool[Tensor, "k m"]:
    weight = update.weights[layer.weight]
    z = inputs.to(weight.device).double() @ weight.double().T
    return z + (0.0 if layer.bias is None else update.weights[layer.bias].double()) > 0


def _labels(
    model: nn.Module, update: ClientUpdate, audited: LayerAudit, factors: Factors, signals: Signals | None
) -> Tensor | None:
    """The labels that explain the inputs' signals; where they do not explain them all, those that fit the gradient."""
    found = audited.inversion
    if found is None or audited.layer.sees != "inputs":
        return None
    if signals is not None and len(signals.labels) == len(found.inputs) and bool((signals.mismatch <= PROVED).all()):
        return signals.labels
    if not bool(found.certified.any() or found.fits.any()) and found.stats.found < found.batch_size:
        return None
    try:
        labels = labels_of(model, update, audited.layer, found, factors)
        if update.kind != "gradients" and not bool((labels >= 0).any()):
            labels = labels_of(model, update, audited.layer, found, factors, uphill=True)
    except (DataError, NonFiniteError):
        raise
    except SpearError:
        return None
    return labels


def replay_all(audits: list[LayerAudit], update: ClientUpdate, model: nn.Module | None) -> Replay | None:
    """The whole update computed again, where a layer gave all of its samples and their labels."""
    for inputs, labels in _whole_batches(audits):
        if model is not None:
            with suppress(OptionError):
                return replay(model, update, inputs, labels)
    return None


def add_proof(
    audits: list[LayerAudit], again: Replay | None, signals: dict[str, Signals], *, one_step: bool
) -> list[LayerAudit]:
    """Claims for inputs of a whole batch that only their replay together proves, each with its own signal in line.

    Mixing each input with another one, half and half, leaves the difference ``again.mixed``. So inputs whose replay
    leaves less are off by less than half of their distance to others, in the same proportion. That is an average: an
    input whose own signal is not explained is left out. So is, for ``one_step``, an input whose signal noise does not
    explain: only noise makes the inputs of a single gradient approximate.
    """
    if again is None or not again.proves:
        return audits
    return [
        _with_proof(each, again, signals[each.layer.name], one_step) if each.layer.name in signals else each
        for each in audits
    ]


def _with_proof(audited: LayerAudit, again: Replay, signals: Signals, one_step: bool) -> LayerAudit:
    found, labels = audited.inversion, audited.labels
    if found is None or labels is None or not bool((labels >= 0).all()) or len(signals.mismatch) != len(found.inputs):
        return audited
    inputs = found.inputs.double()
    half = torch.linalg.vector_norm(inputs - inputs.roll(1, 0), dim=1) / 2
    share = again.difference / again.baseline * half / torch.linalg.vector_norm(inputs, dim=1).clamp_min(1e-300)
    noise = torch.zeros_like(share) if found.certificates is None else found.certificates.error.double()
    error = torch.maximum(MARGIN * share, noise)
    explained = (signals.mismatch <= min(UNEXPLAINED, 2 * again.difference)) & (error <= UP_TO_NOISE)
    if one_step:  # nothing but noise makes right inputs approximate
        explained &= signals.mismatch.clamp_min(again.difference) <= NOISY * signals.noise
    why = f"replayed together the inputs leave {again.difference:.1%} of the update, mixed ones {again.mixed:.0%}"
    claims = list(audited.claims)
    for row in torch.nonzero(explained)[:, 0].tolist():
        if not claims[row].recovered and claims[row].kind is not Kind.SEVERAL:
            kind = Kind.ONE_OR_MEAN if error[row] <= EXACT else Kind.APPROXIMATE
            claims[row] = Claim(kind, float(error[row]), float("nan"), why)
    return replace(audited, claims=tuple(claims))


def estimate_training(
    audits: list[LayerAudit], update: ClientUpdate, model: nn.Module | None, again: Replay | None, seconds: float
) -> Estimate | None:
    """How the client trained, where a replay says that these are its samples and it sent no gradient."""
    if again is None or not again.proves or again.scale <= 0 or update.kind == "gradients" or update.clients > 1:
        return None
    if sum(each.numel() for each in tensor_specs(update.gradients).values()) > LARGEST:
        return None
    for inputs, labels in _whole_batches(audits):
        if model is not None:
            with suppress(OptionError):
                return estimate(model, update, inputs, labels, seconds=seconds)
    return None


def _whole_batches(audits: list[LayerAudit]) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and labels of layers whose samples are all there."""
    for each in audits:
        if each.inversion is None or each.labels is None:
            continue
        if len(each.inversion.inputs) == each.inversion.batch_size and bool((each.labels >= 0).all()):
            yield each.inversion.inputs, each.labels


def training_findings(trained: Estimate | None, update: ClientUpdate) -> Iterator[Finding]:
    """What the update says of how the client trained, against what was said of it."""
    if trained is None:
        return
    if trained.differs_from(update):
        given = f"lr={update.lr:.3g}" + ("" if update.steps is None else f", steps={update.steps}")
        yield Finding("warning", "update", f"{given} was given, but the update fits {trained}")
    elif trained.lr is not None or update.lr is None:
        yield Finding("note", "update", f"the update fits {trained}")
