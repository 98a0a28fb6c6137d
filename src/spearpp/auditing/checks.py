"""Check an update before any search: is it a gradient, and what was done to it? The check takes less than a second.

Every finding is a sentence that the owner of a system can act on. The check reads one layer at a time, and a large
layer in blocks of rows.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from spearpp.auditing.spectrum import Spectrum, quick_spectrum
from spearpp.model import Layer
from spearpp.types import Float, Tensor
from spearpp.update import ClientUpdate
from spearpp.update.lazy import Named, blocks, nonzero, tensor_specs

MAX_WEIGHTS = 16_000_000
"""Largest number of weights of a layer whose spectrum is computed.

A design choice: the Gram matrix of a square layer of this size takes 128 MB in float64.
"""
SAMPLED_ENTRIES = 200_000
"""Number of entries of a gradient that are examined for its number format.

A design choice: 200,000 entries show each of 256 quantisation levels many times, and examining them takes milliseconds.
"""
FEWEST_ENTRIES = 100
"""Smallest number of nonzero entries for which the number format is examined.

A design choice: the percentiles of fewer entries are unreliable.
"""
SAME_MAGNITUDE = 1.05
"""Largest ratio of the 90th to the 10th percentile of the magnitudes at which all entries have the same magnitude.

A design choice: the ratio is 1 for signs and 13 for Gaussian entries.
"""
FEW_VALUES = 256
"""Largest number of different values of a quantised gradient: the number of values of 8 bits."""
PRUNED = 0.5
"""Share of zeros above which an update may have been pruned.

A design choice: pruning that keeps at least half of the entries hides little.
"""
UNEXPLAINED_ZEROS = 0.25
"""Share of zeros above which the update was pruned, not counting rows and columns that are zero throughout.

A design choice: the other entries of a dense gradient are zero only if no sample activates both their row and column.
"""
SAME_DECAY = 1.2
"""Largest ratio of the weight decays of two layers at which both layers have the same weight decay.

A design choice: an optimiser usually applies one weight decay to all layers.
"""
NOTICEABLE_NOISE = 1e-5
"""Smallest relative noise that is reported.

A design choice: 1e-5 is about a hundred times the rounding of float32.
"""


@dataclass(frozen=True)
class Finding:
    """One property of the update that its owner should know."""

    level: Literal["note", "warning", "error"]
    about: str
    """The name of a parameter, or "update"."""
    message: str


def check(update: ClientUpdate, layers: Iterable[Layer]) -> list[Finding]:
    """Return the findings about an update that need no search.

    Args:
        update: what the client sent.
        layers: the Linear layers of the model, from ``find_layers``.

    >>> import torch
    >>> from torch import nn
    >>> from spearpp.model import find_layers
    >>> model = nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 5))
    >>> _ = model(torch.randn(4, 20)).logsumexp(1).mean().backward()
    >>> adam = ClientUpdate.from_gradients(model, [p.grad.sign() for p in model.parameters()])
    >>> [finding.message[:36] for finding in check(adam, find_layers(model, adam)) if finding.level == "error"]
    ['all entries have the same magnitude:']
    """
    return inspect(update, layers)[0]


def inspect(update: ClientUpdate, layers: Iterable[Layer]) -> tuple[list[Finding], float]:
    """Return the findings of ``check``, and the weight decay on which all layers agree. 0 if the layers do not agree.

    Raises:
        SpearError: if a file of the update is damaged. The function reads all files completely.
    """
    update.verify()
    layers = list(layers)
    found = [*_changes(update), *_format(update), *_scale(update)]
    if any(finding.level == "error" for finding in found):
        return found, 0.0
    hidden = [layer for layer in layers if layer.qualifies and not layer.output]
    seen = {
        layer: quick_spectrum(update.gradients, update.weights, layer.weight)
        for layer in hidden or layers
        if layer.qualifies and tensor_specs(update.gradients)[layer.weight].numel() <= MAX_WEIGHTS
    }
    decays = [each.decay for each in seen.values()]
    agreed = bool(decays) and min(decays) > 0 and max(decays) <= SAME_DECAY * min(decays)
    decay = statistics.median(decays) if agreed else 0.0
    for layer, each in seen.items():
        found += _rank(layer, update, each, decay)
    return found, decay


def _changes(update: ClientUpdate) -> Iterable[Finding]:
    """Yield findings about parameters that were not sent or did not change."""
    absent = [name for name in update.weights if name not in update.gradients]
    if absent:
        why = f"{len(absent)} parameters were not sent ({absent[0]} …), so they are not audited"
        yield Finding("note", "update", why)
    if update.buffers:
        why = f"{len(update.buffers)} running statistics were sent; the audit ignores them"
        yield Finding("note", "update", why)
    if not any(nonzero(update.gradients, name) for name in update.gradients):
        why = "nothing changed: the client did not train, or the same file was given twice"
        yield Finding("error", "update", why)


def _format(update: ClientUpdate) -> Iterable[Finding]:
    """Yield findings about what the number format, a compressor or an optimiser did to the numbers."""
    sizes = tensor_specs(update.gradients)
    name = max(sizes, key=lambda each: sizes[each].numel())
    dtype, values = sizes[name].dtype, _sample(update.gradients, name)
    size = values[values != 0].abs()
    if len(size) < FEWEST_ENTRIES:
        return
    low, high = torch.quantile(size[:: max(1, len(size) // 10_000)], torch.tensor([0.1, 0.9], device=size.device))
    if high <= SAME_MAGNITUDE * low:
        why = "all entries have the same magnitude: the client trained with Adam, or sent signs instead of gradients. "
        yield Finding("error", name, f"{why}The update does not contain the gradient, so it cannot be inverted")
        return
    zeros = 1 - len(size) / len(values)
    if zeros > PRUNED:
        expected = _share_of_zero_rows_and_columns(update.gradients, name)
        if zeros > expected + UNEXPLAINED_ZEROS * (1 - expected):
            why = f"{zeros:.0%} of the entries are zero: the update was pruned, so fewer inputs can be recovered"
            yield Finding("warning", name, why)
    if update.kind != "gradients":
        return
    limit = "the relative rounding error of {} limits how exactly inputs can be recovered"
    few = len(values[:: max(1, len(values) // 10_000)].unique()) <= FEW_VALUES
    if few and len(values.unique()) <= FEW_VALUES:
        why = f"the gradient has only {len(values.unique())} different values: it was quantised"
        yield Finding("warning", name, f"{why} to at most {FEW_VALUES} levels")
    elif dtype == torch.float16 or bool((values.half().float() == values).all()):
        yield Finding("note", name, f"every number is a float16 value: {limit.format('5e-4')}")
    elif dtype == torch.bfloat16 or bool((values.bfloat16().float() == values).all()):
        yield Finding("note", name, f"every number is a bfloat16 value: {limit.format('4e-3')}")


def _sample(tensors: Named, name: str) -> Float[Tensor, "sampled"]:
    """Return evenly spaced entries of a tensor, in float32."""
    spec = tensor_specs(tensors)[name]
    step = max(1, spec.numel() // SAMPLED_ENTRIES)
    # The result is allocated first: small tensors that are allocated between blocks would keep the blocks' memory.
    values = torch.empty(-(-spec.numel() // step), device=spec.device)
    position, filled = 0, 0
    for block in blocks(tensors, name):
        entries = block.flatten()[-position % step :: step]
        values[filled : filled + len(entries)] = entries
        position, filled = position + block.numel(), filled + len(entries)
    return values


def _share_of_zero_rows_and_columns(tensors: Named, name: str) -> float:
    """Return the share of a tensor in rows and columns of zeros, which come from dead neurons and black pixels."""
    rows, columns = [], []
    for block in blocks(tensors, name):
        matrix = block.flatten(1) if block.ndim > 1 else block.reshape(-1, 1)
        rows.append(matrix.any(1))
        columns.append(matrix.any(0))
    return 1 - float(torch.cat(rows).float().mean() * torch.stack(columns).any(0).float().mean())


def _scale(update: ClientUpdate) -> Iterable[Finding]:
    """Yield a finding if the scale of the update is unknown or impossible.

    The gradient of the last bias of a softmax classifier is mean(p - y). It sums to zero and lies within ±1.
    """
    name, spec = list(tensor_specs(update.gradients).items())[-1]
    if spec.ndim != 1 or spec.numel() < 2 or update.clients > 1:
        return
    last = update.gradients[name]
    largest, total = float(last.abs().max()), float(last.double().sum().abs())
    if total > 1e-3 * float(last.double().abs().sum()):  # more than rounding: not a softmax classifier
        return
    limit = "the gradient of the last bias of a classifier lies within ±1"
    if update.lr is None and update.kind != "gradients":
        why = f"lr is not known; lr · steps is at least {largest * (update.steps or 1):.2g} because {limit}"
        yield Finding("note", name, f"{why}. The inversion does not need the scale")
    elif largest > 1.001:
        cause = "the loss is a sum" if update.kind == "gradients" else "lr or steps is too small"
        why = f"{limit}, but here it reaches {largest:.3g}: {cause}. The inversion does not need the scale"
        yield Finding("note", name, why)


def _rank(layer: Layer, update: ClientUpdate, found: Spectrum, decay: float) -> Iterable[Finding]:
    """Yield a finding about the rank, the noise or the weight decay of one layer."""
    if decay:
        why = f"the gradient contains {found.decay:.3g} times the weights, which is weight decay"
        yield Finding("note", layer.weight, f"{why}. The audit subtracts it")
    elif found.rank is None:
        yield Finding(
            "warning",
            layer.weight,
            f"the {layer.neurons} x {layer.features} gradient has full rank, so it cannot be inverted. Possible "
            "reasons: at least as many samples as neurons, strong noise, Adam, or weights of another round. Check that "
            "the weights are the ones that the client started from",
        )
    elif found.noise > NOTICEABLE_NOISE:
        dtype = tensor_specs(update.gradients)[layer.weight].dtype
        cause = "local steps or DP noise" if update.kind != "gradients" else "DP noise or compression"
        cause = "half precision" if dtype in (torch.float16, torch.bfloat16) else cause
        why = f"{found.rank} samples are visible above the noise, which is {found.noise:.1e} of the gradient's"
        yield Finding("note", layer.weight, f"{why} root mean square. Possible reason: {cause}")
