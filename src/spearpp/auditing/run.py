"""Invert the layers of a plan one after the other, within a budget."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from spearpp.auditing.plan import Plan
from spearpp.auditing.result import LayerAudit
from spearpp.errors import SpearError
from spearpp.inversion.invert import invert
from spearpp.inversion.result import Progress
from spearpp.model import Layer
from spearpp.search import Gated, Search
from spearpp.update import ClientUpdate

LEAST_SECONDS = 0.5
"""A layer's share of the budget at least."""


@dataclass(frozen=True)
class Budget:
    """The seconds of an audit."""

    seconds: float | None
    began: float

    def share(self, layers: int) -> float | None:
        """What each of the layers that are left may take."""
        if self.seconds is None:
            return None
        return max(LEAST_SECONDS, (self.seconds - (time.monotonic() - self.began)) / layers)

    @property
    def spent(self) -> bool:
        """Whether nothing is left."""
        return self.seconds is not None and time.monotonic() - self.began >= self.seconds

    def rest(self, most: float) -> float:
        """What is left, at most this."""
        share = self.share(1)
        return most if share is None else min(most, share)


def run(
    plan: Plan,
    search: Search | None,
    clock: Budget,
    generator: torch.Generator,
    progress: Callable[[Layer, Progress], None] | None,
) -> tuple[list[LayerAudit], bool]:
    """Invert the layers one after the other; whether somebody interrupted that."""
    done: dict[str, LayerAudit] = {}
    interrupted = False
    for index, layer in enumerate(plan.feasible):
        share = clock.share(len(plan.feasible) - index)
        if interrupted:
            done[layer.name] = LayerAudit(layer, True, "not tried: the audit was interrupted")
        elif index and clock.spent:
            done[layer.name] = LayerAudit(layer, True, "not tried: the budget was spent")
        elif layer.sees == "features" and any(_complete(each) for each in done.values()):
            done[layer.name] = LayerAudit(layer, True, "not inverted: what it sees follows from the recovered inputs")
        else:
            try:
                done[layer.name] = _invert(layer, plan.update, _within(search, share), generator, progress)
                interrupted = done[layer.name].interrupted
            except KeyboardInterrupt:
                done[layer.name] = LayerAudit(layer, True, "interrupted before its search began")
                interrupted = True
    return [
        done.get(each.name) or LayerAudit(each, False, plan.why_not[each.name]) for each in plan.layers
    ], interrupted


def _complete(audited: LayerAudit) -> bool:
    """Whether the model's inputs are all there, with certificates."""
    found = audited.inversion
    return audited.layer.sees == "inputs" and found is not None and 0 < int(found.certified.sum()) == found.batch_size


def _within(search: Search | None, seconds: float | None) -> Search | None:
    """The same search with so many seconds, where it takes such a bound."""
    search = Gated() if search is None else search
    if seconds is None or not isinstance(search, Gated):
        return search
    return replace(search, seconds=seconds if search.seconds is None else min(seconds, search.seconds))


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
            dropout=layer.dropout,
            progress=tell,
        )
    except SpearError as error:
        return LayerAudit(layer, False, str(error))
    if result.batch_size == 0:
        return LayerAudit(layer, False, result.stats.stopped, result)
    return LayerAudit(layer, True, f"{layer.reason}; {result.stats.stopped}", result)
