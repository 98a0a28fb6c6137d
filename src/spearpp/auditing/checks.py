"""Check an update before any search: is it a gradient, and what was done to it? The check takes less than a second.

Every finding is a sentence that the owner of a system can act on. The check reads one layer at a time, and a large
layer in blocks of rows.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from spearpp.auditing.measurements import (
    HALF_TYPES,
    MIN_ENTRIES,
    Spectrum,
    half_precision,
    has_full_rank,
    quick_spectrum,
    sample,
    share_of_weights,
    share_of_zero_rows_and_columns,
    sizes_at,
)
from spearpp.model import Layer, check_types
from spearpp.update import ClientUpdate
from spearpp.update.lazy import nonzero, tensor_specs

MAX_WEIGHTS = 16_000_000
"""Largest number of weights of a layer whose spectrum is computed. A design choice: the Gram matrix of a square layer
of this size takes 128 MB in float64."""
WHOLE_WEIGHTS = 0.02
"""An update contains the whole weights if the factor of the weights in the update differs from 1 by at most this
number. A design choice: the fit is exact up to the noise, and no weight decay removes all weights in one round."""
SAME_DECAY_RATIO = 1.2
"""Two layers have the same weight decay if the ratio of their estimates is at most this number. A design choice: an
optimiser usually applies one weight decay to all layers."""
SAME_MAGNITUDE_RATIO = 1.05
"""All entries have the same magnitude if the ratio of the 90th to the 10th percentile of the magnitudes is at most this
number. A design choice: the ratio is 1 for signs and 13 for Gaussian entries."""
NOTICEABLE_NOISE = 1e-5
"""Smallest relative noise that is reported. A design choice: 1e-5 is about a hundred times the rounding of float32."""
MAX_QUANTISED_VALUES = 256
"""Largest number of different values of a quantised gradient. Derived: the number of values of 8 bits."""
PRUNED_ZEROS = 0.5
"""Share of zeros above which an update may have been pruned. A design choice: pruning that keeps at least half of the
entries hides little."""
SMALL_STEP_RATIO = 3.5
"""An optimiser limited the size of every entry if the ratio of the 99th percentile to the median of the magnitudes is
at most this number. Measured on three data sets: 1.0 to 2.9 after 1 to 20 steps of Adam and AdamW, 4.3 to 20 for SGD
with 20 samples. Gaussian noise has 3.8."""
SAME_LIMIT_RATIO = 1.5
"""One optimiser limited two matrices if the ratio of their 99th percentiles is at most this number. Measured in the
same way: 1.0 to 1.4 for Adam and AdamW, 2.8 to 18 for SGD."""
MAX_CORRELATION = 0.5
"""No optimiser causes a larger correlation between an update and the weights. Derived: 0.7 if the weights before and
after the training are unrelated, and 0 for steps that do not depend on the weights."""
UNEXPLAINED_ZEROS = 0.25
"""Share of zeros above which the update was pruned, not counting rows and columns that are zero throughout. A design
choice: the other entries of a dense gradient are zero only if no sample activates both their row and column."""


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
    return check_with_decay(update, layers)[0]


def check_with_decay(update: ClientUpdate, layers: Iterable[Layer]) -> tuple[list[Finding], float]:
    """Return the findings of ``check``, and the weight decay on which all layers agree. 0 if the layers do not agree.

    Raises:
        SpearError: if a file of the update is damaged. The function reads all files completely.
    """
    check_types(update, None)
    update.verify()
    layers = list(layers)
    found = [*_changes(update), *_changed_format(update), *_scale(update)]
    if any(finding.level == "error" for finding in found):
        return found, 0.0
    hidden = [layer for layer in layers if layer.qualifies and not layer.output]
    seen = {
        layer: quick_spectrum(update.gradients, update.weights, layer.weight, layer.bias)
        for layer in hidden or layers
        if layer.qualifies and tensor_specs(update.gradients)[layer.weight].numel() <= MAX_WEIGHTS
    }
    decays = [each.decay for each in seen.values()]
    agreed = bool(decays) and min(decays) > 0 and max(decays) <= SAME_DECAY_RATIO * min(decays)
    decay = statistics.median(decays) if agreed else 0.0
    if update.kind == "deltas" and all(_holds_weights(update, layer.weight) for layer in seen):
        decay = -1 / update.scale
    if seen and abs(abs(decay) * update.scale - 1) <= WHOLE_WEIGHTS:
        return [*found, _wrong_kind(update)], (1 if decay > 0 else -1) / update.scale
    if seen and all(has_full_rank(update.gradients, layer.weight, each.rank) for layer, each in seen.items()):
        limited = list(_limited_by_optimiser(update))
        if limited:
            return [*found, *limited], 0.0
    for layer, each in seen.items():
        found += _rank(layer, update, each, decay)
    return found, decay


def _holds_weights(update: ClientUpdate, name: str) -> bool:
    """Return whether deltas are nearly the weights themselves: before - after is then nearly -before."""
    share, correlation = share_of_weights(update, name)
    return abs(share + 1) <= WHOLE_WEIGHTS and correlation < WHOLE_WEIGHTS - 1


def _wrong_kind(update: ClientUpdate) -> Finding:
    """Return a finding for an update that contains the whole weights, because its file is of another kind."""
    why = "the update contains the whole weights, so the client's file probably does not hold"
    if update.kind == "weights":
        instead = "weights, but gradients or deltas. Pass --kind gradients or --kind deltas (kind= in Python)"
    else:
        instead = f"{update.kind}, but weights. Omit --kind {update.kind} (kind= in Python)"
    return Finding("warning", "update", f"{why} {instead}")


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


def _changed_format(update: ClientUpdate) -> Iterable[Finding]:
    """Yield findings about what the number format, a compressor or an optimiser did to the numbers."""
    sizes = tensor_specs(update.gradients)
    for each, spec in sizes.items():  # the largest tensor may be a table whose rows also decay
        found = sizes_at(sample(update.gradients, each), 0.1, 0.9) if spec.ndim > 1 else None
        if found is not None and found[1] <= SAME_MAGNITUDE_RATIO * found[0]:
            why = "all entries have the same magnitude: the client trained with Adam, or sent signs instead of "
            why += "gradients"
            yield Finding("error", each, f"{why}. The update does not contain the gradient, so it cannot be inverted")
            return
    name = max(sizes, key=lambda each: sizes[each].numel())
    dtype, values = sizes[name].dtype, sample(update.gradients, name)
    size = values[values != 0].abs()
    if len(size) < MIN_ENTRIES:
        return
    zeros = 1 - len(size) / len(values)
    stored = None if update.kind == "gradients" else half_precision(sample(update.weights, name))
    if stored is not None:
        why = f"the weights are {stored[0]} values: a step below their relative rounding error of {stored[1]} is lost"
        lost = f", and {zeros:.0%} of the weights did not change" if zeros > PRUNED_ZEROS else ""
        yield Finding("warning", name, f"{why}{lost}. Fewer inputs can be recovered")
    elif zeros > PRUNED_ZEROS:
        expected = share_of_zero_rows_and_columns(update.gradients, name)
        if zeros > expected + UNEXPLAINED_ZEROS * (1 - expected):
            why = f"{zeros:.0%} of the entries are zero: the update was pruned, so fewer inputs can be recovered"
            yield Finding("warning", name, why)
    if update.kind != "gradients":
        return
    limit = "the relative rounding error of {} limits how exactly inputs can be recovered"
    few = len(values[:: max(1, len(values) // 10_000)].unique()) <= MAX_QUANTISED_VALUES
    if few and len(values.unique()) <= MAX_QUANTISED_VALUES:
        why = f"the gradient has only {len(values.unique())} different values: it was quantised"
        yield Finding("warning", name, f"{why} to at most {MAX_QUANTISED_VALUES} levels")
    elif (half := HALF_TYPES.get(dtype) or half_precision(values)) is not None:
        yield Finding("note", name, f"every number is a {half[0]} value: {limit.format(half[1])}")


def _limited_by_optimiser(update: ClientUpdate) -> Iterable[Finding]:
    """Yield a finding if an optimiser such as Adam limited the size of every entry over several steps.

    Adam moves every weight by at most about lr in a step. The magnitudes of all matrices then end at the same value.
    """
    if update.kind == "gradients":
        return
    limits = []
    for name, spec in tensor_specs(update.gradients).items():
        found = sizes_at(sample(update.gradients, name), 0.5, 0.99) if spec.ndim > 1 else None
        if found is None:
            continue
        median, limit = found
        _, correlation = share_of_weights(update, name)
        if limit > SMALL_STEP_RATIO * median or abs(correlation) > MAX_CORRELATION:
            return
        limits.append(limit)
    if len(limits) > 1 and max(limits) <= SAME_LIMIT_RATIO * min(limits):
        moved = max(limits) * update.scale
        why = f"nearly all weights of all layers moved by at most {moved:.1g}, and the update has full "
        why += "rank: the client trained with Adam or a similar optimiser. The update does not contain the gradient"
        yield Finding("error", "update", f"{why}, so it cannot be inverted")


def _scale(update: ClientUpdate) -> Iterable[Finding]:
    """Yield a finding if the scale of the update is unknown or impossible.

    The gradient of the last bias of a softmax classifier is mean(p - y). It sums to zero and lies within ±1.
    """
    name, spec = list(tensor_specs(update.gradients).items())[-1]
    if spec.ndim != 1 or spec.numel() < 2 or update.clients > 1:
        return
    last = update.gradients[name]
    largest, total = float(last.abs().max()), float(last.double().sum().abs())
    if largest == 0 or total > 1e-3 * float(last.double().abs().sum()):  # not a softmax classifier: more than rounding
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
            "reasons: at least as many samples as neurons or inputs, strong noise, or weights of another round. Check "
            "that the weights are the ones that the client started from",
        )
    elif found.noise > NOTICEABLE_NOISE:
        dtype = tensor_specs(update.gradients)[layer.weight].dtype
        cause = "local steps or DP noise" if update.kind != "gradients" else "DP noise or compression"
        cause = "half precision" if dtype in (torch.float16, torch.bfloat16) else cause
        why = f"{found.rank} {layer.noun} are visible above the noise, which is {found.noise:.1e} of the gradient's"
        yield Finding("note", layer.weight, f"{why} root mean square. Possible reason: {cause}")
