"""Which layers of an update are inverted, and why the others are not."""

from dataclasses import dataclass, replace

import torch

from spearpp.auditing.checks import Finding, check_with_decay
from spearpp.auditing.result import LayerAudit
from spearpp.auditing.task import Task
from spearpp.model import Layer, find_layers
from spearpp.model.loss import Loss
from spearpp.update import ClientUpdate
from spearpp.update.lazy import elementwise, tensor_specs

MAX_OUTSIDE_RANK_ONE = 1e-3
"""A gradient counts as having rank one if at most this share of its norm lies outside the direction of its largest row.
A design choice: 1e-3 is above the relative rounding error of float16, 5e-4."""
BYTES_PER_INVERTED_WEIGHT = 52
"""Bytes per weight of a layer that is inverted. Derived: gradient and weight in float32 and in float64 (24), the
gradient without dead neurons (8), the singular vectors with their workspace (16), and 4 to spare. Measured:
``docs/lab/notebook.md``, Memory (``make bench NAME=memory``)."""
BYTES_PER_REPLAYED_WEIGHT = 24
"""Bytes per weight of a model whose update is replayed. Derived: a copy of the model, the gradients of the model and
the gradients of the update, each up to 8 bytes."""
OUTPUT_LAYER = "its output is the model's output"
"""Begins the reason of an output layer."""


@dataclass(frozen=True)
class Plan:
    """Which layers are inverted, and why the others are not."""

    update: ClientUpdate
    """The update after subtracting weight decay."""
    layers: list[LayerAudit]
    """All Linear layers of the model, not inverted yet. ``reason`` says why a layer is or is not inverted."""
    to_invert: list[Layer]
    """The layers to invert, in this order: layers that a known activation follows, layers whose activation is assumed,
    the output layer."""
    findings: list[Finding]
    decay: float
    """The weight decay that was subtracted. 0 if there was none."""
    left_out: list[str]
    """Sentences about layers that are skipped, or inverted without the next layer, to save memory."""
    replay_skipped: str | None
    """A sentence if a copy of the whole network does not fit into memory. The equations of the network and the replay
    need such a copy. None if it fits."""


def make_plan(update: ClientUpdate, task: Task) -> Plan:
    """Find the layers, check the update and subtract weight decay.

    Args:
        update: what the client sent.
        task: what the caller asks for. The model, the memory limit and the loss are used.
    """
    replay_skipped, memory = _replay_skip_reason(update, task.memory), task.memory
    layers = [
        _with_loss(each, task.loss) if replay_skipped is None or not each.equations or each.output else _too_large(each)
        for each in find_layers(task.model, update)
    ]
    findings, decay = check_with_decay(update, layers)
    if decay:  # weight decay adds a multiple of the weights to every gradient
        pure = elementwise(lambda sent, weight: sent - decay * weight.to(sent), update.gradients, update.weights)
        update = replace(update, gradients=pure)
    sized = [_check_layer_memory(_qualified_if_rank_one(layer, update, memory), update, memory) for layer in layers]
    layers, left_out = [layer for layer, _ in sized], [why for _, why in sized if why is not None]
    broken = next((finding for finding in findings if finding.level == "error"), None)
    to_invert = [layer for layer in layers if layer.qualifies and broken is None]
    to_invert.sort(key=lambda layer: (layer.output, layer.assumed))
    not_inverted = [
        LayerAudit(layer, broken.message if broken and layer.qualifies else layer.reason, invertible=False)
        for layer in layers
    ]
    return Plan(update, not_inverted, to_invert, findings, decay, left_out, replay_skipped)


def _with_loss(layer: Layer, loss: Loss | None) -> Layer:
    """Return the layer with the reason that fits the loss. Without a loss, an output layer does not qualify."""
    if not layer.output or loss is Loss.CROSS_ENTROPY:
        return layer
    if loss is None:
        reason = f"{OUTPUT_LAYER}, and its equations need the loss"
        return replace(layer, qualifies=False, equations=False, output=False, reason=reason)
    return replace(layer, reason=f"{OUTPUT_LAYER}: the equations of {loss} are solved")


def _too_large(layer: Layer) -> Layer:
    """Return a layer that is not inverted, because the equations of its network need too much memory."""
    reason = "its equations need a copy of the model that takes too much memory; raise memory= (--memory)"
    return replace(layer, qualifies=False, equations=False, reason=reason)


def _qualified_if_rank_one(layer: Layer, update: ClientUpdate, memory: int | None) -> Layer:
    """Return the layer, qualified for inversion if its gradient has rank one.

    The rows of such a gradient are multiples of the input, so the layer is inverted without the next layer.
    """
    if (layer.qualifies and not layer.output) or layer.bias is None:
        return layer
    if layer.weight not in update.gradients or layer.bias not in update.gradients or layer.weight not in update.weights:
        return layer
    if not _check_layer_memory(replace(layer, qualifies=True, next=None), update, memory)[0].qualifies:
        return layer
    gradient, bias = update.gradients[layer.weight], update.gradients[layer.bias]
    if gradient.ndim != 2 or bias.shape != gradient.shape[:1]:
        return layer
    whole = torch.cat([gradient, bias[:, None]], dim=1).double()
    norms = torch.linalg.vector_norm(whole, dim=1)
    row = whole[norms.argmax()]
    if not bool(torch.isfinite(norms).all()) or not float(norms.max()) > 0:
        return layer
    rest = whole - torch.outer(whole @ row / (row @ row), row)
    if float(torch.linalg.vector_norm(rest)) > MAX_OUTSIDE_RANK_ONE * float(torch.linalg.vector_norm(norms)):
        return layer
    reason = f"its gradient has rank one, so it is inverted although {layer.reason}"
    return replace(layer, qualifies=True, reason=reason, next=None, equations=False, output=False)


def _check_layer_memory(layer: Layer, update: ClientUpdate, memory: int | None) -> tuple[Layer, str | None]:
    """Return the layer, reduced to what fits into memory, and a sentence about what does not fit (or None).

    A layer that does not fit no longer qualifies. If only the next layer does not fit, the layer is inverted alone.
    """
    if memory is None or not layer.qualifies:
        return layer, None
    sizes = tensor_specs(update.weights)
    own = BYTES_PER_INVERTED_WEIGHT * sizes[layer.weight].numel()
    both = own if layer.next is None else own + BYTES_PER_INVERTED_WEIGHT * sizes[layer.next].numel()
    if own > memory:
        why = f"skipped: inverting it takes about {_readable(own)}, more than the {_readable(memory)} allowed"
        why += "; raise memory= (--memory) to invert it"
        return replace(layer, qualifies=False, reason=why), f"Layer {layer.name} was {why}."
    if both > memory:
        why = f"the gradient of the next layer was not used: both layers take about {_readable(both)}, more than the "
        why += f"{_readable(memory)} allowed; raise memory= (--memory) to use it"
        return replace(layer, next=None), f"Layer {layer.name}: {why}."
    return layer, None


def _replay_skip_reason(update: ClientUpdate, memory: int | None) -> str | None:
    """Return a sentence if the model needs too much memory to be replayed, else None."""
    needed = BYTES_PER_REPLAYED_WEIGHT * sum(each.numel() for each in tensor_specs(update.weights).values())
    if memory is None or needed <= memory:
        return None
    return (
        f"No labels and no replay: running the model takes about {_readable(needed)}, more than the "
        f"{_readable(memory)} allowed; raise memory= (--memory) to get them."
    )


def _readable(count: int) -> str:
    """Return a number of bytes with a suitable unit.

    >>> _readable(2**33), _readable(5 * 2**19), _readable(100)
    ('8 GiB', '2.5 MiB', '100 bytes')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
