"""Judge recovered inputs: replay each input alone, and find its label."""

from contextlib import suppress
from dataclasses import replace

import torch
from torch import nn

from spearpp.auditing.after_layer import labels_of
from spearpp.auditing.claim import Claim, Kind, Known
from spearpp.auditing.claims import claims_of
from spearpp.auditing.result import LayerAudit
from spearpp.auditing.signals import Signals, replay_alone
from spearpp.auditing.task import Task
from spearpp.errors import DataError, NonFiniteError, OptionError, SpearError
from spearpp.inversion.result import Inversion
from spearpp.linalg.time_limit import OutOfTimeError, time_is_up
from spearpp.model import Layer, Sees, assumed_networks
from spearpp.model.loss import Loss
from spearpp.types import Bool, Float, Tensor
from spearpp.update import ClientUpdate
from spearpp.update.lazy import pick, tensor_specs

PROVES_NETWORK = 1e-3
"""Largest mismatch of an input replayed alone that proves the assumed network. A design choice: 1e-3 is far above the
rounding of float32, and a wrong network leaves a far larger mismatch."""


def judge_all(
    audits: list[LayerAudit], update: ClientUpdate, model: nn.Module | None, task: Task
) -> tuple[list[LayerAudit], nn.Module | None, dict[str, Signals]]:
    """Replace the claims of inputs that can be replayed, and add labels where the gradient determines them.

    Without a model, the function tries several common networks. The first network through which the replay of an input
    reproduces the input's part of the update is used for all layers.

    Args:
        audits: the layers after their inversion.
        update: what the client sent.
        model: the network to replay inputs through, or None.
        task: what the caller asks for. If the loss is unknown, no input is replayed.

    Returns:
        The layers with claims and labels; the given model, or the network that was assumed and that a replay proved, or
        None; and the replay of each input alone, by name of the layer.
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
        for candidate in guesses if network is None else [network]:
            signals = _signals(candidate, update, each.layer, found, task.loss)
            if network is None and signals is not None and bool((signals.mismatch <= PROVES_NETWORK).any()):
                network = candidate
                break
        if network is not None and signals is not None:
            replayed[each.layer.name] = signals
            claimed = _with_claims(each, update, signals, task)
        labels = None if network is None else _labels(network, update, claimed, signals, task.loss)
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
        labels = torch.where(signals.mismatch <= PROVES_NETWORK, signals.labels, -1)
    return replace(_with_claims(audited, update, signals, task), labels=labels)


def judge_by_layer(audited: LayerAudit, update: ClientUpdate, task: Task) -> LayerAudit:
    """Add the claims that the gradient of the layer alone supports, without any replay."""
    return audited if audited.inversion is None else _with_claims(audited, update, None, task)


def _with_claims(audited: LayerAudit, update: ClientUpdate, signals: Signals | None, task: Task) -> LayerAudit:
    """Return the layer with a claim for each of its inputs.

    Approximate claims about inputs of an output layer are withdrawn. A softmax that is sure of a class gives nearly the
    same signal for different inputs, so the stated error of an input that is not exact is not reliable. Measured: one
    of 42 such inputs was off by more than half of its norm.
    """
    found, layer = audited.inversion, audited.layer
    if found is None:
        return audited
    claims = claims_of(found, patterns_of(layer, found.inputs, update), signals, known_of(layer, update, task))
    if layer.output:
        weak = Claim(Kind.FITS, float("inf"), float("nan"), "the output layer determines this input only approximately")
        claims = tuple(weak if each.kind is Kind.APPROXIMATE else each for each in claims)
    return replace(audited, claims=claims)


def known_of(layer: Layer, update: ClientUpdate, task: Task) -> Known:
    """Return what the audit knows about a layer in addition to its recovered inputs.

    The mean squared error is scaled in several ways (a mean or a sum over the outputs, a factor of 1/2), so its size
    does not count samples.
    """
    return Known(
        task.batch_size,
        absolute=_absolute(update) and task.loss is not Loss.MSE,
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
    model: nn.Module, update: ClientUpdate, layer: Layer, inversion: Inversion, loss: Loss | None
) -> Signals | None:
    """Replay each input of a layer alone, or return None if this is not possible."""
    if loss is None or update.clients > 1 or time_is_up():
        return None
    if layer.output and layer.sees != "inputs":
        model, update, layer = _output_alone(update, layer)
    elif layer.sees != "inputs":
        return None
    with suppress(OptionError, OutOfTimeError):
        return replay_alone(model, update, layer, inversion, loss=loss)
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
    model: nn.Module, update: ClientUpdate, audited: LayerAudit, signals: Signals | None, loss: Loss | None
) -> Tensor | None:
    """Return the labels of the replays if all replays match, else the labels that fit the gradient of the layer.

    The gradient of the layer alone names labels only for cross-entropy.
    """
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
    nothing = not bool(found.certified.any() or found.fits.any()) and found.stats.found < found.batch_size
    if nothing or loss is not Loss.CROSS_ENTROPY:
        return None
    try:
        labels = labels_of(model, update, audited.layer, found)
        if update.kind != "gradients" and not bool((labels >= 0).any()):
            labels = labels_of(model, update, audited.layer, found, uphill=True)
    except (DataError, NonFiniteError):
        raise
    except (SpearError, OutOfTimeError):
        return None
    return labels
