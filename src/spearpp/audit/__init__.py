"""From a client's update to a verdict: which layers can be inverted, what they give away, and proof of it."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import torch
from torch import nn

from spearpp.audit.memory import MEMORY, check_memory, fitting, unplayed
from spearpp.audit.result import AuditResult, LayerAudit, Verdict, best_of
from spearpp.audit.wording import caveats, summary
from spearpp.consistency import Finding, inspect
from spearpp.errors import DataError, NonFiniteError, OptionError, SpearError
from spearpp.estimate import LARGEST, SECONDS, Estimate, estimate
from spearpp.invert import invert
from spearpp.layers import Layer, find_layers
from spearpp.replay import Replay, labels_of, replay
from spearpp.result import Progress
from spearpp.search import Gated, Search
from spearpp.shapes import Tensor
from spearpp.update import ClientUpdate
from spearpp.update.lazy import elementwise, outlines

__all__ = ["AuditResult", "LayerAudit", "Verdict", "audit"]
LEAST_SECONDS = 0.5
"""A layer's share of the budget at least."""


def audit(
    update: ClientUpdate,
    model: nn.Module | None = None,
    *,
    budget: float | None = None,
    memory: int | None = MEMORY,
    search: Search | None = None,
    batch_size: int | None = None,
    generator: torch.Generator | None = None,
    progress: Callable[[Layer, Progress], None] | None = None,
) -> AuditResult:
    """Find out whether an update gives its training batch away.

    Every Linear layer before a ReLU is inverted, with the next layer as a second witness where there is one, until the
    model's inputs are all there (what later layers see follows from them). The verdict is LEAKS if any input comes back
    with evidence that it is in the batch, exactly or up to noise, or if the update can be computed again from what came
    back; NOT_FOUND if nothing does within the budget; and NOT_APPLICABLE if there is no layer to invert.

    An update that is in files is looked through first, then read a layer at a time; nothing of it is kept.

    Ctrl-C ends the search, not the call: what was certified until then is in the result, ``interrupted`` is True.

    Args:
        update: what the client sent.
        model: the network, to tell which layers feed a ReLU, to find labels and to replay; None to go without.
        budget: seconds for all layers together, kept to a round of the search; None leaves it to the search.
        memory: bytes that the work on one layer may take; larger layers are skipped, and the caveats say so. None for
            no bound.
        search: how to look; None is ``spearpp.search.Gated()``.
        batch_size: only a check: what is read off the update counts, and a caveat says if they differ.
        generator: source of randomness; None is a generator with seed 0.
        progress: called after every round with the layer and how far it is.

    Raises:
        SpearError: for an update that is none, or whose file is damaged, changed or gone. "Nothing found" is a result,
            not an error.

    >>> import torch, spearpp
    >>> from spearpp import simulate
    >>> model = simulate.mlp(30, [90, 90], 10, generator=torch.Generator().manual_seed(2))
    >>> batch = simulate.random_batch(6, features=30, generator=torch.Generator().manual_seed(1))
    >>> update = simulate.FedSGD()(model, batch)
    >>> result = spearpp.audit(update, model)
    >>> print(result.summary)
    LEAKS: 6 of 6 training inputs were recovered exactly from layer 0
    >>> bool((result.layers[0].labels.sort().values == batch.labels.sort().values).all())
    True
    >>> result.replay.difference < 1e-5
    True
    """
    if not isinstance(update, ClientUpdate):
        raise OptionError(f"update is a {type(update).__name__}: expected a spearpp.ClientUpdate")
    if budget is not None and (not isinstance(budget, int | float) or not budget > 0):
        raise OptionError(f"budget={budget!r}: seconds, or None for none")
    if budget is not None and search is not None and not isinstance(search, Gated):
        raise OptionError("a budget in seconds needs the gated search; the others are bounded by their starts")
    check_memory(memory)
    began = time.monotonic()
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    layers = find_layers(model, update)
    findings, decay = inspect(update, layers)
    update = _without_decay(update, decay)
    sized = [fitting(layer, update, memory) for layer in layers]
    layers, left_out = [layer for layer, _ in sized], [why for _, why in sized if why is not None]
    unseen = None if model is None else unplayed(update, memory)
    broken = next((finding for finding in findings if finding.level == "error"), None)
    feasible = [layer for layer in layers if layer.qualifies and broken is None]
    feasible.sort(key=lambda layer: layer.assumed)
    done: dict[str, LayerAudit] = {}
    interrupted = False
    for index, layer in enumerate(feasible):
        left = None
        if budget is not None:
            left = max(LEAST_SECONDS, (budget - (time.monotonic() - began)) / (len(feasible) - index))
        if interrupted:
            done[layer.name] = LayerAudit(layer, True, "not tried: the audit was interrupted")
        elif budget is not None and index and time.monotonic() - began >= budget:
            done[layer.name] = LayerAudit(layer, True, "not tried: the budget was spent")
        elif layer.sees == "features" and any(_complete(each) for each in done.values()):
            done[layer.name] = LayerAudit(layer, True, "not inverted: what it sees follows from the recovered inputs")
        else:
            try:
                done[layer.name] = _invert(layer, update, _within(search, left), generator, progress)
                interrupted = done[layer.name].interrupted
            except KeyboardInterrupt:
                done[layer.name] = LayerAudit(layer, True, "interrupted before its search began")
                interrupted = True
    why = {layer.name: broken.message if broken and layer.qualifies else layer.reason for layer in layers}
    audits = [done.get(layer.name) or LayerAudit(layer, False, why[layer.name]) for layer in layers]
    again, trained = None, None
    network, model = model, None if unseen else model
    try:
        audits = [_with_labels(each, update, model) for each in audits]
        again = _replayed(audits, update, model)
        left = SECONDS if budget is None else min(SECONDS, max(LEAST_SECONDS, budget - (time.monotonic() - began)))
        trained = _estimated(audits, update, model, again, left)
    except KeyboardInterrupt:  # the inputs are there; labels and the replay are not
        interrupted = True
    verdict = _verdict(audits, again)
    return AuditResult(
        verdict=verdict,
        summary=summary(verdict, audits, time.monotonic() - began, again),
        layers=audits,
        findings=[*findings, *_training(trained, update)],
        caveats=[
            *caveats(verdict, audits, update, network, batch_size, decay, again, trained, interrupted, unseen),
            *left_out,
        ],
        interrupted=interrupted,
        replay=again,
        estimated=trained,
        seconds=time.monotonic() - began,
        budget=budget,
    )


def _complete(audited: LayerAudit) -> bool:
    """Whether the model's inputs are all there, with evidence."""
    return audited.layer.sees == "inputs" and 0 < len(audited.inputs) == audited.batch_size


def _within(search: Search | None, seconds: float | None) -> Search | None:
    """The same search with so many seconds, where it takes such a bound."""
    search = Gated() if search is None else search
    if seconds is None or not isinstance(search, Gated):
        return search
    return replace(search, seconds=seconds if search.seconds is None else min(seconds, search.seconds))


def _without_decay(update: ClientUpdate, decay: float) -> ClientUpdate:
    """The update without weight decay, which adds a multiple of the weights to every gradient."""
    if not decay:
        return update
    pure = elementwise(lambda sent, weight: sent - decay * weight.to(sent), update.gradients, update.weights)
    return replace(update, gradients=pure)


def _invert(
    layer: Layer,
    update: ClientUpdate,
    search: Search | None,
    generator: torch.Generator,
    progress: Callable[[Layer, Progress], None] | None,
) -> LayerAudit:
    def tell(state: Progress) -> None:
        if progress is not None:
            progress(layer, state)

    # A file that cannot be read any more is no outcome of this layer: it ends the audit.
    tensors = update.layer(layer.weight, layer.bias)
    next_gradient = None if layer.next is None else update.gradients[layer.next]
    next_weight = None if layer.next is None else update.weights[layer.next]
    try:
        result = invert(
            *tensors,
            next_grad_weight=next_gradient,
            next_weight=next_weight,
            search=search,
            generator=generator,
            progress=tell,
        )
    except SpearError as error:
        return LayerAudit(layer, False, str(error))
    if result.batch_size == 0:
        return LayerAudit(layer, False, result.stats.stopped, result)
    return LayerAudit(layer, True, f"{layer.reason}; {result.stats.stopped}", result)


def _with_labels(audited: LayerAudit, update: ClientUpdate, model: nn.Module | None) -> LayerAudit:
    if model is None or audited.inversion is None or audited.layer.sees != "inputs":
        return audited
    if not len(audited.inputs) and audited.inversion.stats.found < audited.inversion.batch_size:
        return audited
    try:
        labels = labels_of(model, update, audited.layer, audited.inversion)
        if update.kind != "gradients" and not bool((labels >= 0).any()):
            labels = labels_of(model, update, audited.layer, audited.inversion, uphill=True)
    except (DataError, NonFiniteError):
        raise
    except SpearError:
        return audited
    return replace(audited, labels=labels)


def _replayed(audits: list[LayerAudit], update: ClientUpdate, model: nn.Module | None) -> Replay | None:
    for inputs, labels in _whole_batches(audits):
        if model is not None:
            with suppress(OptionError):
                return replay(model, update, inputs, labels)
    return None


def _estimated(
    audits: list[LayerAudit], update: ClientUpdate, model: nn.Module | None, again: Replay | None, seconds: float
) -> Estimate | None:
    """How the client trained, where a replay says that these are its samples and it sent no gradient."""
    if again is None or not again.proves or again.scale <= 0 or update.kind == "gradients" or update.clients > 1:
        return None
    if sum(each.numel() for each in outlines(update.gradients).values()) > LARGEST:
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


def _training(trained: Estimate | None, update: ClientUpdate) -> Iterator[Finding]:
    """What the update says of how the client trained, against what was said of it."""
    if trained is None:
        return
    if trained.differs_from(update):
        given = f"lr={update.lr:.3g}" + ("" if update.steps is None else f", steps={update.steps}")
        yield Finding("warning", "update", f"{given} was given, but the update fits {trained}")
    elif trained.lr is not None or update.lr is None:
        yield Finding("note", "update", f"the update fits {trained}")


def _verdict(audits: list[LayerAudit], again: Replay | None) -> Verdict:
    if best_of(audits, again) is not None:
        return Verdict.LEAKS
    return Verdict.NOT_FOUND if any(each.feasible for each in audits) else Verdict.NOT_APPLICABLE
