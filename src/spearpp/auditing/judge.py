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
from spearpp.errors import DataError, NonFiniteError, OptionError, SpearError
from spearpp.inversion.factors import Factors
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
    audits: list[LayerAudit],
    update: ClientUpdate,
    model: nn.Module | None,
    batch_size: int | None,
    loss: Loss | None,
) -> tuple[list[LayerAudit], nn.Module | None, dict[str, Signals]]:
    """Replace the claims of inputs that can be replayed, and add labels where the gradient determines them.

    Without a model, the function tries several common networks. The first network through which the replay of an input
    reproduces the input's part of the update is used for all layers.

    Args:
        audits: the layers after their inversion.
        update: what the client sent.
        model: the network, or None.
        batch_size: the number of samples that the client trained on, or None.
        loss: the loss of the client; None if it is unknown. No input is replayed then.

    Returns:
        The layers with claims and labels; the given model, or the network that was assumed and that a replay proved, or
        None; and the replay of each input alone, by name of the layer.
    """
    guesses = assumed_networks(update) if model is None and update.clients == 1 else []
    network = model
    judged, replayed = [], {}
    for each in audits:
        factors = None if each.inversion is None else each.inversion.factors
        if each.inversion is None or factors is None or not len(each.inversion.inputs):
            judged.append(each)
            continue
        signals, claimed = None, each
        for candidate in guesses if network is None else [network]:
            signals = _signals(candidate, update, each.layer, each.inversion, factors, loss)
            if network is None and signals is not None and bool((signals.mismatch <= PROVES_NETWORK).any()):
                network = candidate
                break
        if network is not None and signals is not None:
            replayed[each.layer.name] = signals
            patterns = patterns_of(each.layer, each.inversion.inputs, update)
            claims = claims_of(each.inversion, patterns, signals, known_of(each.layer, update, batch_size, loss))
            claimed = _exact_only(replace(each, claims=claims))
        labels = None if network is None else _labels(network, update, claimed, factors, signals, loss)
        judged.append(replace(claimed, labels=labels))
    return judged, network, replayed


def judge_in_round(
    audited: LayerAudit,
    update: ClientUpdate,
    model: nn.Module | None,
    batch_size: int | None,
    loss: Loss | None,
) -> LayerAudit:
    """Add claims and labels to inputs that several rounds gave together, from what one of the rounds says about them.

    Args:
        audited: the layer. Its inversion contains the inputs of this round, and its factors the rows of this round.
        update: what the client sent in this round.
        model: the network, or None.
        batch_size: the number of samples that the client trained on in this round, or None.
        loss: the loss of the client; None if it is unknown.
    """
    found = audited.inversion
    if found is None or found.factors is None or not len(found.inputs):
        return audited
    signals = None if model is None else _signals(model, update, audited.layer, found, found.factors, loss)
    patterns = patterns_of(audited.layer, found.inputs, update)
    claims = claims_of(found, patterns, signals, known_of(audited.layer, update, batch_size, loss))
    labels = None
    if signals is not None and len(signals.labels) == len(found.inputs):
        labels = torch.where(signals.mismatch <= PROVES_NETWORK, signals.labels, -1)
    return _exact_only(replace(audited, claims=claims, labels=labels))


def judge_by_layer(audited: LayerAudit, update: ClientUpdate, batch_size: int | None) -> LayerAudit:
    """Add the claims that the gradient of the layer alone supports, without any replay."""
    if audited.inversion is None:
        return audited
    patterns = patterns_of(audited.layer, audited.inversion.inputs, update)
    claims = claims_of(audited.inversion, patterns, None, known_of(audited.layer, update, batch_size))
    return _exact_only(replace(audited, claims=claims))


def _exact_only(audited: LayerAudit) -> LayerAudit:
    """Withdraw approximate claims about inputs of an output layer.

    A softmax that is sure of a class gives nearly the same signal for different inputs, so the stated error of an input
    that is not exact is not reliable. Measured: one of 42 such inputs was off by more than half of its norm.
    """
    if not audited.layer.output:
        return audited
    weak = Claim(Kind.FITS, float("inf"), float("nan"), "the output layer determines this input only approximately")
    claims = tuple(weak if each.kind is Kind.APPROXIMATE else each for each in audited.claims)
    return replace(audited, claims=claims)


def known_of(
    layer: Layer, update: ClientUpdate, batch_size: int | None, loss: Loss | None = Loss.CROSS_ENTROPY
) -> Known:
    """Return what the audit knows about a layer in addition to its recovered inputs.

    The mean squared error is scaled in several ways (a mean or a sum over the outputs, a factor of 1/2), so its size
    does not count samples.
    """
    return Known(
        batch_size,
        absolute=_absolute(update) and loss is not Loss.MSE,
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
    model: nn.Module,
    update: ClientUpdate,
    layer: Layer,
    inversion: Inversion,
    factors: Factors,
    loss: Loss | None,
) -> Signals | None:
    """Replay each input of a layer alone, or return None if this is not possible."""
    if loss is None or update.clients > 1 or time_is_up():
        return None
    if layer.output and layer.sees != "inputs":
        model, update, layer = _output_alone(update, layer)
    elif layer.sees != "inputs":
        return None
    with suppress(OptionError, OutOfTimeError):
        return replay_alone(model, update, layer, inversion, factors, loss=loss)
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
    model: nn.Module,
    update: ClientUpdate,
    audited: LayerAudit,
    factors: Factors,
    signals: Signals | None,
    loss: Loss | None,
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
        labels = labels_of(model, update, audited.layer, found, factors)
        if update.kind != "gradients" and not bool((labels >= 0).any()):
            labels = labels_of(model, update, audited.layer, found, factors, uphill=True)
    except (DataError, NonFiniteError):
        raise
    except (SpearError, OutOfTimeError):
        return None
    return labels
