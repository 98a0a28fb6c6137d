"""The labels of recovered inputs: from the replay of each input alone, or from the gradient of one layer."""

import torch
from torch import nn

from spearpp.auditing.result import LayerAudit
from spearpp.auditing.signals import AfterLayer, Signals, observed_signals, signals_of_labels
from spearpp.errors import DataError, NonFiniteError, OptionError, SpearError
from spearpp.inversion.result import Inversion
from spearpp.linalg.time_limit import OutOfTimeError
from spearpp.model import Layer
from spearpp.model.loss import Loss
from spearpp.types import Int, Tensor
from spearpp.update import ClientUpdate

MAX_SHARE_OUTSIDE = 0.6
"""Largest share of a signal outside the column space of the gradient for which a label fits. Measured: 1e-6 for exact
inputs, up to 0.5 for inputs that noise has moved by 7 %, and 0.7 to 0.9 for wrong labels."""
LABEL_MARGIN = 1.3
"""How many times the share outside of the best label the share of the second-best label must be. A design choice: 1.3
is below the ratio of 1.4 or more between wrong and right labels, whose shares are given above."""
LABEL_RESOLUTION = 0.01
"""Smallest share outside that the second-best label must have. A design choice: smaller shares may be rounding, even if
they exceed the share of the best label many times."""


def find_labels(
    model: nn.Module, update: ClientUpdate, audited: LayerAudit, signals: Signals | None, loss: Loss | None
) -> Tensor | None:
    """Return the labels of the replays if all replays match, else the labels that fit the gradient of the layer.

    The gradient of the layer alone names labels only for cross-entropy.
    """
    found = audited.inversion
    if found is not None and audited.layer.output and audited.layer.sees == "features" and signals is not None:
        labels = torch.where(signals.matched, signals.labels, -1).cpu()
        return torch.cat([labels, labels.new_full((len(found.inputs) - len(labels),), -1)])
    if found is None or audited.layer.sees != "inputs":
        return None
    if signals is not None and len(signals.labels) == len(found.inputs) and bool(signals.matched.all()):
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


def labels_of(
    model: nn.Module, update: ClientUpdate, layer: Layer, result: Inversion, *, uphill: bool = False
) -> Int[Tensor, "k"]:
    """Return the label of each recovered input, or -1 for an input that no label fits.

    With the right label the predicted signal lies in the column space of the layer's gradient. With a wrong label the
    signal lies outside, so each label can be determined without the other samples. With two classes the signals of both
    labels lie inside, and the sign decides: the signal must point in the direction of L q_i. If ``uphill`` is True, the
    signal must point in the opposite direction, because the weights before and after training were swapped.

    Raises:
        OptionError: if the model does not accept the inputs or is not a classifier, or if the result was read from a
            folder, which holds no factors.
    """
    factors = result.factors
    if factors is None:
        raise OptionError("labels need the factors of the gradient, which a folder does not hold")
    network = AfterLayer(model, update, layer)
    observed = observed_signals(factors, result) * (-1 if uphill else 1)
    shares_outside = []
    for rows in torch.arange(len(result.inputs)).split(network.rows_at_once):
        outputs, jacobian = network(result.inputs[rows])
        signals = signals_of_labels(outputs.softmax(1), jacobian)
        outside = torch.linalg.vector_norm(signals - (signals @ factors.left) @ factors.left.T, dim=2)
        share = outside / torch.linalg.vector_norm(signals, dim=2).clamp_min(torch.finfo(signals.dtype).tiny)
        has_direction = rows < len(observed)
        opposite = (signals[has_direction] * observed[rows[has_direction], None]).sum(2) <= 0
        share[has_direction] = torch.where(opposite, torch.inf, share[has_direction])
        shares_outside.append(share)
    shares, labels = torch.cat(shares_outside).sort(dim=1)
    clear = shares[:, 1] >= (LABEL_MARGIN * shares[:, 0]).clamp_min(LABEL_RESOLUTION)
    return torch.where((shares[:, 0] <= MAX_SHARE_OUTSIDE) & clear, labels[:, 0], -1)
