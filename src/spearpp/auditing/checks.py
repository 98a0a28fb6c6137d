"""Whether an update is what it is said to be, before any search: a look that takes less than a second.

Every finding is a sentence that the owner of a system can act on. Of a large layer a block of rows is in memory at a
time, and of all layers one.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from spearpp.inversion.factors.rank import ROUNDING, numerical_rank
from spearpp.model import Layer
from spearpp.types import Float, Tensor
from spearpp.update import ClientUpdate
from spearpp.update.lazy import NUMBERS, Named, blocks, nonzero, tensor_specs

LARGEST = 16_000_000
"""Numbers of a weight up to which its spectrum is looked at."""
TAKEN = (512, 2048)
"""Rows and columns of a weight, twice as many at most, whose spectrum is looked at first."""
SAMPLE = 200_000
"""Entries of a gradient that are looked at for its format."""
EQUAL = 1.05
"""Ratio of large to small entries below which an update has one size everywhere."""
FEW_VALUES = 256
PRUNED = 0.5
AGREED = 1.2
"""Ratio of the decays that layers show up to which it is one."""
EXPLAINED = 0.2
"""Share of the tail that may be left when weight decay explains it."""


@dataclass(frozen=True)
class Finding:
    """Something about the update that its owner should know."""

    level: Literal["note", "warning", "error"]
    about: str
    """A parameter's name, or "update"."""
    message: str


@dataclass(frozen=True)
class Spectrum:
    """What the singular values of one layer's gradient say."""

    rank: int | None
    """Samples that can be told from noise; None if none can."""
    noise: float
    """Standard deviation of an entry's noise over the root mean square of all entries."""
    decay: float
    """λ if the gradient holds λ W on top of a low rank: weight decay. 0 if not."""


def check(update: ClientUpdate, layers: Iterable[Layer]) -> list[Finding]:
    """Everything about an update that can be seen without a search.

    >>> import torch
    >>> from torch import nn
    >>> from spearpp.model import find_layers
    >>> model = nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 5))
    >>> _ = model(torch.randn(4, 20)).logsumexp(1).mean().backward()
    >>> adam = ClientUpdate.from_gradients(model, [p.grad.sign() for p in model.parameters()])
    >>> [finding.message[:41] for finding in check(adam, find_layers(model, adam)) if finding.level == "error"]
    ['all entries have one size: Adam, or signs']
    """
    return inspect(update, layers)[0]


def inspect(update: ClientUpdate, layers: Iterable[Layer]) -> tuple[list[Finding], float]:
    """The findings of ``check``, and the weight decay on which all layers agree; 0 if there is none.

    Raises:
        SpearError: for an update whose files are damaged: all of it is looked through.
    """
    update.verify()
    found = [*_changes(update), *_format(update), *_scale(update)]
    if any(finding.level == "error" for finding in found):
        return found, 0.0
    seen = {
        layer: _look(update.gradients, update.weights, layer.weight)
        for layer in layers
        if layer.qualifies and tensor_specs(update.gradients)[layer.weight].numel() <= LARGEST
    }
    decays = [each.decay for each in seen.values()]
    agreed = bool(decays) and min(decays) > 0 and max(decays) <= AGREED * min(decays)
    decay = statistics.median(decays) if agreed else 0.0
    for layer, each in seen.items():
        found += _rank(layer, update, each, decay)
    return found, decay


def _changes(update: ClientUpdate) -> Iterable[Finding]:
    absent = [name for name in update.weights if name not in update.gradients]
    if absent:
        yield Finding("note", "update", f"{len(absent)} parameters were not sent ({absent[0]} …): they are not audited")
    if update.buffers:
        yield Finding("note", "update", f"{len(update.buffers)} running statistics were sent; they are not looked at")
    if not any(nonzero(update.gradients, name) for name in update.gradients):
        yield Finding("error", "update", "nothing changed: the client did not train, or one file was given twice")


def _format(update: ClientUpdate) -> Iterable[Finding]:
    """What the wire, a compressor or an optimiser did to the numbers."""
    sizes = tensor_specs(update.gradients)
    name = max(sizes, key=lambda each: sizes[each].numel())
    dtype, values = sizes[name].dtype, _sample(update.gradients, name)
    size = values[values != 0].abs()
    if len(size) < 100:
        return
    low, high = torch.quantile(size[:: max(1, len(size) // 10_000)], torch.tensor([0.1, 0.9], device=size.device))
    if high <= EQUAL * low:
        why = (
            "all entries have one size: Adam, or signs instead of gradients. Such an update holds no gradient to invert"
        )
        yield Finding("error", name, why)
        return
    zeros = 1 - len(size) / len(values)
    if zeros > PRUNED:
        silent = _silent(update.gradients, name)
        if zeros > silent + 0.25 * (1 - silent):
            why = f"{zeros:.0%} of the entries are zero: the update was pruned, which hides inputs"
            yield Finding("warning", name, why)
    if update.kind != "gradients":
        return
    few = len(values[:: max(1, len(values) // 10_000)].unique()) <= FEW_VALUES
    if few and len(values.unique()) <= FEW_VALUES:
        yield Finding(
            "warning", name, f"{len(values.unique())} different values: quantised to {FEW_VALUES} levels or fewer"
        )
    elif dtype == torch.float16 or bool((values.half().float() == values).all()):
        yield Finding("note", name, "the numbers are those of float16: rounding to 5e-4 limits what comes back")
    elif dtype == torch.bfloat16 or bool((values.bfloat16().float() == values).all()):
        yield Finding("note", name, "the numbers are those of bfloat16: rounding to 4e-3 limits what comes back")


def _sample(tensors: Named, name: str) -> Float[Tensor, "taken"]:
    """Entries of a tensor at equal distances, in float32."""
    outline = tensor_specs(tensors)[name]
    step = max(1, outline.numel() // SAMPLE)
    # Small tensors made between blocks would pin the memory of those: there is one for all, made first.
    values = torch.empty(-(-outline.numel() // step), device=outline.device)
    place, filled = 0, 0
    for block in blocks(tensors, name):
        taken = block.flatten()[-place % step :: step]
        values[filled : filled + len(taken)] = taken
        place, filled = place + block.numel(), filled + len(taken)
    return values


def _silent(tensors: Named, name: str) -> float:
    """The share of a tensor that rows and columns of zeros take: dead neurons, black pixels."""
    rows, columns = [], []
    for block in blocks(tensors, name):
        matrix = block.flatten(1) if block.ndim > 1 else block.reshape(-1, 1)
        rows.append(matrix.any(1))
        columns.append(matrix.any(0))
    return 1 - float(torch.cat(rows).float().mean() * torch.stack(columns).any(0).float().mean())


def _scale(update: ClientUpdate) -> Iterable[Finding]:
    """The gradient of a softmax classifier's last bias is mean(p - y): within ±1, and it sums to zero."""
    name, outline = list(tensor_specs(update.gradients).items())[-1]
    if outline.ndim != 1 or outline.numel() < 2 or update.clients > 1:
        return
    last = update.gradients[name]
    largest, total = float(last.abs().max()), float(last.double().sum().abs())
    if total > 1e-3 * float(last.double().abs().sum()):
        return
    if update.lr is None and update.kind != "gradients":
        least = largest * (update.steps or 1)
        why = f"lr is not known: lr · steps is {least:.2g} at least, for a classifier's last bias gradient is within ±1"
        yield Finding("note", name, f"{why}. Inversion does not need the scale")
    elif largest > 1.001:
        what = "the loss is a sum" if update.kind == "gradients" else "lr or steps is too small"
        why = f"a classifier's last bias gradient is within ±1, here it reaches {largest:.3g}"
        yield Finding("note", name, f"{why}: {what}. Inversion does not need the scale")


def _rank(layer: Layer, update: ClientUpdate, seen: Spectrum, decay: float) -> Iterable[Finding]:
    if decay:
        why = f"it holds {seen.decay:.3g} times the weights on top of a low rank: weight decay. The audit takes it off"
        yield Finding("note", layer.weight, why)
    elif seen.rank is None:
        yield Finding(
            "warning",
            layer.weight,
            f"its rank fills the {layer.neurons} x {layer.features} gradient: as many samples as neurons or more, "
            "strong noise, Adam, or weights of another round. Nothing can be inverted; check that these are the "
            "weights the client had",
        )
    elif seen.noise > 1e-5:
        dtype = tensor_specs(update.gradients)[layer.weight].dtype
        cause = "half precision" if dtype in (torch.float16, torch.bfloat16) else ""
        cause = cause or ("local steps, or DP noise" if update.kind != "gradients" else "DP noise, or compression")
        share = f"noise of {seen.noise:.1e} of the gradient's root mean square"
        yield Finding("note", layer.weight, f"{seen.rank} samples stand above {share} ({cause})")


def spectrum(gradient: Float[Tensor, "m n"], weight: Float[Tensor, "m n"]) -> Spectrum:
    """Rank, noise and weight decay of one gradient, from the eigenvalues of its Gram matrix.

    Half of the digits are lost by that, and float32 has no more than half of those of float64. Of a large gradient
    every second or third row and column is enough: it has the same rank, unless that fills what was taken.
    """
    return _look({"it": gradient}, {"it": weight}, "it")


def _look(gradients: Named, weights: Named, name: str) -> Spectrum:
    shape = tensor_specs(gradients)[name].shape
    rows, columns = (max(1, size // most) for size, most in zip(shape, TAKEN, strict=True))
    found = _spectrum(*(_every(each, name, rows, columns) for each in (gradients, weights)))
    whole = rows == columns == 1 or found.rank is not None or found.decay > 0
    return found if whole else _spectrum(gradients[name], weights[name])


def _every(tensors: Named, name: str, rows: int, columns: int) -> Float[Tensor, "taken_rows taken"]:
    """So manieth rows and columns of a matrix."""
    outline = tensor_specs(tensors)[name]
    height, width = outline.shape
    values = torch.empty(-(-height // rows), -(-width // columns), dtype=outline.dtype, device=outline.device)
    place, filled = 0, 0
    for block in blocks(tensors, name):
        taken = block[-place % rows :: rows, ::columns]
        values[filled : filled + len(taken)] = taken
        place, filled = place + len(block), filled + len(taken)
    return values


def _spectrum(gradient: Float[Tensor, "m n"], weight: Float[Tensor, "m n"]) -> Spectrum:
    wide = gradient.shape[0] <= gradient.shape[1]
    core = gradient.double() if wide else gradient.double().T
    epsilon = max(torch.finfo(gradient.dtype).eps, torch.finfo(torch.float32).eps)
    gram = core @ core.T
    values = torch.linalg.eigvalsh(gram).clamp_min(0).sqrt().flip(0)
    rank = numerical_rank(values, (core.shape[0], core.shape[1]), epsilon)
    k = len(values) // 2 if rank is None else rank
    rounding = ROUNDING * epsilon * torch.linalg.vector_norm(values)
    if (
        torch.linalg.vector_norm(values[k:]) > rounding
        and 0 < k <= len(values) - max(8, len(values) // 8)
        and bool(weight.any())
    ):
        other = weight.double() if wide else weight.double().T
        _, vectors = torch.linalg.eigh(gram)
        share, left_over = _decay(core, other, vectors[:, :-k], torch.linalg.qr(core.T @ vectors[:, -k:])[0])
        if left_over < EXPLAINED and share > 0:
            return Spectrum(rank, 0.0, share)
    size = torch.linalg.vector_norm(values)
    tail_size = torch.linalg.vector_norm(values[rank:]) if rank is not None else size
    freedom = (max(1, core.shape[0] - (rank or 0)) * max(1, core.shape[1] - (rank or 0))) ** 0.5
    noise = float(tail_size / freedom / (size / core.numel() ** 0.5).clamp_min(torch.finfo(size.dtype).tiny))
    return Spectrum(rank, noise, 0.0)


def _decay(
    core: Float[Tensor, "m n"], other: Float[Tensor, "m n"], tail: Float[Tensor, "m t"], lead: Float[Tensor, "n k"]
) -> tuple[float, float]:
    """The λ that fits best, and the share of the tail that λ W does not explain, some rows at a time.

    Outside the leading singular directions on both sides, λ W is left as it is.
    """
    across, own, size = 0.0, 0.0, 0.0
    for some in tail.T.split(max(1, NUMBERS // core.shape[1])):
        inside, decayed = some @ core, some @ other
        decayed -= (decayed @ lead) @ lead.T
        across += float((inside * decayed).sum())
        own += float(decayed.square().sum())
        size += float(inside.square().sum())
    if not own or not size:
        return 0.0, 1.0
    share = across / own
    return share, max(0.0, 1 - across * share / size) ** 0.5
