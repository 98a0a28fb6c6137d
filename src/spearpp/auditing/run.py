"""Invert the layers of a plan one after the other, within the time budget."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from spearpp.auditing.plan import Plan
from spearpp.auditing.result import LayerAudit
from spearpp.errors import SpearError
from spearpp.inversion.invert import invert
from spearpp.inversion.result import Progress
from spearpp.model import Layer
from spearpp.search import Search
from spearpp.update import ClientUpdate

LEAST_SECONDS = 0.5
"""Smallest share of the budget that a layer gets, in seconds: less would not finish one round of a search."""


@dataclass(frozen=True)
class Budget:
    """The time budget of an audit."""

    seconds: float | None
    began: float

    def share(self, layers: int) -> float | None:
        """Seconds for each of the remaining layers; None without a budget."""
        if self.seconds is None:
            return None
        return max(LEAST_SECONDS, (self.seconds - (time.monotonic() - self.began)) / layers)

    @property
    def spent(self) -> bool:
        """Whether the budget is used up."""
        return self.seconds is not None and time.monotonic() - self.began >= self.seconds

    def rest(self, most: float) -> float:
        """The remaining seconds, but not more than ``most``."""
        share = self.share(1)
        return most if share is None else min(most, share)


def run(
    plan: Plan,
    search: Search | None,
    clock: Budget,
    generator: torch.Generator,
    progress: Callable[[Layer, Progress], None] | None,
) -> tuple[list[LayerAudit], bool]:
    """Invert the layers one after the other. The second result says whether Ctrl-C interrupted this."""
    done: dict[str, LayerAudit] = {}
    interrupted = False
    for index, layer in enumerate(plan.feasible):
        share = clock.share(len(plan.feasible) - index)
        if interrupted:
            done[layer.name] = LayerAudit(layer, True, "not tried: the audit was interrupted")
        elif index and clock.spent:
            done[layer.name] = LayerAudit(layer, True, "not tried: the time budget was spent")
        elif layer.sees == "features" and any(_complete(each) for each in done.values()):
            why = "not inverted: its inputs follow from the recovered inputs of the model"
            done[layer.name] = LayerAudit(layer, True, why)
        else:
            try:
                done[layer.name] = _invert(layer, plan.update, search, share, generator, progress)
                interrupted = done[layer.name].interrupted
            except KeyboardInterrupt:
                done[layer.name] = LayerAudit(layer, True, "interrupted before its search began")
                interrupted = True
    return [
        done.get(each.name) or LayerAudit(each, False, plan.why_not[each.name]) for each in plan.layers
    ], interrupted


def _complete(audited: LayerAudit) -> bool:
    """Whether all inputs of the model were recovered and certified."""
    found = audited.inversion
    return audited.layer.sees == "inputs" and found is not None and 0 < int(found.certified.sum()) == found.batch_size


def _invert(
    layer: Layer,
    update: ClientUpdate,
    search: Search | None,
    seconds: float | None,
    generator: torch.Generator,
    progress: Callable[[Layer, Progress], None] | None,
) -> LayerAudit:
    def tell(state: Progress) -> None:
        if progress is not None:
            progress(layer, state)

    # A file that can no longer be read ends the whole audit, so this is outside of the try block.
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
            seconds=seconds,
            progress=tell,
        )
    except SpearError as error:
        return LayerAudit(layer, False, str(error))
    if result.batch_size == 0:
        return LayerAudit(layer, False, result.stats.stopped, result)
    return LayerAudit(layer, True, f"{layer.reason}; {result.stats.stopped}", result)
