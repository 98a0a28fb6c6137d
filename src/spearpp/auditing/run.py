"""Invert the layers of a plan one after the other, within the time budget."""

import importlib
import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import nn

from spearpp.auditing.local_training import invert_training
from spearpp.auditing.plan import Plan
from spearpp.auditing.replay import as_sent
from spearpp.auditing.result import LayerAudit
from spearpp.errors import OptionError, RankError, SpearError
from spearpp.inversion.evidence import WHOLE_NETWORK
from spearpp.inversion.invert import invert
from spearpp.inversion.loop import OUT_OF_TIME
from spearpp.inversion.result import Inversion, Progress
from spearpp.model import Layer, assumed_networks
from spearpp.model.following import Following
from spearpp.model.loss import Loss
from spearpp.search import Equations, Search
from spearpp.types import LayerTensors

TRIAL_STARTS = 64
"""Number of starts with each activation that is tried. A design choice: four first rounds on a CPU
(``search.equations.rounds.TRIAL``), so that no activation takes long."""
LEAST_SECONDS = 0.5
"""Smallest share of the budget that a layer gets, in seconds: less would not finish one round of a search."""


SEARCH_SHARE = 0.9
"""Share of the budget that the searches may use. A design choice: the rest is for replaying what they found."""
LOADING_SECONDS = 3.0
"""Smallest rest of the budget with which PyTorch's compiler is loaded for a second search. Measured: loading takes 1.5
to 2.5 s on a CPU core."""


def load_derivatives() -> None:
    """Load what ``torch.func`` imports when it first computes a derivative, so that no search has to wait for it."""
    importlib.import_module("torch._dynamo")


def _time_to_load(seconds: float) -> bool:
    """Return whether there is enough time left that derivatives can be loaded, if necessary, and used."""
    return seconds > (0.0 if "torch._dynamo" in sys.modules else LOADING_SECONDS)


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
    def deadline(self) -> float:
        """The end of the budget on the clock ``time.monotonic``; inf without a budget."""
        return math.inf if self.seconds is None else self.began + self.seconds

    @property
    def of_search(self) -> "Budget":
        """The part of the budget that the searches may use."""
        return self if self.seconds is None else replace(self, seconds=SEARCH_SHARE * self.seconds)

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
    model: nn.Module | None,
    search: Search | None,
    clock: Budget,
    generator: torch.Generator,
    progress: Callable[[Layer, Progress], None] | None,
) -> tuple[list[LayerAudit], bool]:
    """Invert the layers one after the other. The second result says whether Ctrl-C interrupted this."""
    done: dict[str, LayerAudit] = {}
    interrupted = False
    for index, layer in enumerate(plan.feasible):
        # The output layer comes last and takes seconds, so it does not shorten the time of the other layers.
        share = clock.share(max(1, sum(not each.output for each in plan.feasible[index:])))
        if interrupted:
            done[layer.name] = LayerAudit(layer, True, "not tried: the audit was interrupted")
        elif index and clock.spent:
            done[layer.name] = LayerAudit(layer, True, f"not tried: {OUT_OF_TIME}")
        elif layer.sees == "features" and any(_complete(each) for each in done.values()):
            why = "not inverted: its inputs follow from the recovered inputs of the model"
            done[layer.name] = LayerAudit(layer, True, why)
        else:
            try:
                done[layer.name] = _invert(layer, plan, model, search, share, generator, progress)
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
    plan: Plan,
    model: nn.Module | None,
    search: Search | None,
    seconds: float | None,
    generator: torch.Generator,
    progress: Callable[[Layer, Progress], None] | None,
) -> LayerAudit:
    """Invert one layer.

    A layer with ReLU, known or assumed, is searched for sparse directions first. If this does not certify every input,
    the equations of the network are solved too, in the other half of the time.
    """
    update = plan.update

    def tell(state: Progress) -> None:
        if progress is not None:
            progress(layer, state)

    # A file that can no longer be read ends the whole audit, so this is outside of the try block.
    tensors = update.layer(layer.weight, layer.bias)
    next_gradient = None if layer.next is None else update.gradients[layer.next]
    next_weight = None if layer.next is None else update.weights[layer.next]
    deadline = None if seconds is None else time.monotonic() + seconds
    second_search = search is None and not layer.equations and plan.copies_fit
    second_search = second_search and (seconds is None or _time_to_load(seconds / 2))
    try:
        solve = layer.equations or isinstance(search, Equations)
        if solve:
            load_derivatives()
            seconds = None if deadline is None else max(LEAST_SECONDS, deadline - time.monotonic())
        trained = solve and update.kind != "gradients" and model is not None and plan.copies_fit
        trained = trained and plan.loss is Loss.CROSS_ENTROPY
        if trained and model is not None and (update.steps or 1) > 1:
            local = invert_training(layer, update, model, seconds=seconds, generator=generator, progress=tell)
            if local is not None:
                return LayerAudit(layer, True, f"{layer.reason}; {local.stats.stopped}", local)
            seconds = None if deadline is None else max(LEAST_SECONDS, deadline - time.monotonic())
        following = _following(layer, plan, model) if solve else None
        result = invert(
            *tensors,
            next_grad_weight=next_gradient,
            next_weight=next_weight,
            following=following,
            search=search if following is None or isinstance(search, Equations) else None,
            generator=generator,
            dropout=layer.dropout,
            seconds=seconds / 2 if seconds is not None and second_search else seconds,
            progress=tell,
        )
    except RankError:
        return LayerAudit(layer, False, _full_rank(layer))
    except SpearError as error:
        return LayerAudit(layer, False, str(error))
    if result.batch_size == 0:
        return LayerAudit(layer, False, result.stats.stopped, result)
    if trained and model is not None and update.steps in (None, 1) and not bool(result.fits.any()):
        left = None if deadline is None else max(LEAST_SECONDS, deadline - time.monotonic())
        local = invert_training(layer, update, model, seconds=left, generator=generator, progress=tell)
        result = result if local is None else local
    if layer.output and result.batch_size > 1 and not result.stats.starts:
        why = f"{layer.reason.partition(':')[0]}; its gradient shows at least {result.batch_size} samples"
        return LayerAudit(layer, False, f"{why}, too many for the equations of {layer.neurons} outputs")
    if result.stats.interrupted or not second_search or bool(result.certified.all()):
        return LayerAudit(layer, True, _outcome(layer, result), result)
    left = None if deadline is None else deadline - time.monotonic()
    if model is not None:
        more = _by_equations(layer, plan, model, tensors, left, generator, tell)
        if more is not None and int(more.certified.sum()) > int(result.certified.sum()):
            layer, result = replace(layer, reason=f"{layer.reason}; the equations of the network were solved"), more
    elif layer.sees == "inputs" and not bool(result.certified.any()):
        found = _other_activation(layer, plan, tensors, left, generator, tell)
        if found is not None:
            layer, result = found
    outcome = _outcome(layer, result)
    if deadline is not None and time.monotonic() >= deadline and not bool(result.certified.all()):
        outcome += "" if OUT_OF_TIME in outcome else f"; {OUT_OF_TIME} by the second search"
    return LayerAudit(layer, True, outcome, result)


def _outcome(layer: Layer, result: Inversion) -> str:
    """Return why the layer was inverted, how its search ended, and which equations of the network were used."""
    outcome = f"{layer.reason}; {result.stats.stopped}"
    evidence = result.evidence
    if evidence is None or evidence.layers != WHOLE_NETWORK or "forward" not in evidence.numbers:
        return outcome  # a repeated local training says so in how its search ended
    forward, backward = (int(evidence.numbers[each]) for each in ("forward", "backward"))
    parts = [f"{forward} forward"] if forward else []
    parts += [f"{backward} backward"] if backward else []
    return f"{outcome}; used {' and '.join(parts)} equations"


def _full_rank(layer: Layer) -> str:
    """Return why a layer whose gradient has full rank is not inverted."""
    if layer.neurons == 1:
        return "it has one output, so its gradient is one weighted sum of all samples"
    rank = min(layer.neurons, layer.features + (layer.bias is not None))
    return f"its gradient has full rank: there are at least {rank:,} {layer.noun}, or noise hides their number"


def _following(layer: Layer, plan: Plan, model: nn.Module | None) -> Following:
    """Return what follows a layer, with the weights that the client started from."""
    if layer.output and plan.loss is not None and (model is None or layer.assumed):
        return Following.of_output(layer.neurons, plan.loss)
    if model is None:
        raise OptionError("the equations of the network need a model")
    return Following.of_model(as_sent(model, plan.update), plan.update, layer, plan.loss)


def _by_equations(
    layer: Layer,
    plan: Plan,
    model: nn.Module,
    tensors: LayerTensors,
    seconds: float | None,
    generator: torch.Generator,
    progress: Callable[[Progress], None],
) -> Inversion | None:
    """Solve the equations of the network for a layer with ReLU whose sparse directions did not certify every input.

    Returns:
        The inversion, or None if there is no time left or nothing after the layer can be computed from it alone.
    """
    if seconds is not None and not _time_to_load(seconds):
        return None
    deadline = None if seconds is None else time.monotonic() + seconds
    load_derivatives()
    seconds = None if deadline is None else max(LEAST_SECONDS, deadline - time.monotonic())
    with suppress(OptionError):
        following = _following(layer, plan, model)
        return invert(*tensors, following=following, generator=generator, seconds=seconds, progress=progress)
    return None


def _other_activation(
    layer: Layer,
    plan: Plan,
    tensors: LayerTensors,
    seconds: float | None,
    generator: torch.Generator,
    progress: Callable[[Progress], None],
) -> tuple[Layer, Inversion] | None:
    """Try common activations other than ReLU for an update without a model.

    A few starts for each activation show whether its equations have a solution. A certified input proves the
    activation, and the search then goes on with it.

    Returns:
        The layer and its inversion with the first activation that fits, or None.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    if seconds is not None and not _time_to_load(seconds):
        return None
    load_derivatives()
    for network in assumed_networks(plan.update)[1:]:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return None
        following = _following(layer, plan, network)
        trial = invert(*tensors, following=following, search=Equations(TRIAL_STARTS), generator=generator, seconds=left)
        if bool(trial.certified.any()):
            left = None if deadline is None else max(LEAST_SECONDS, deadline - time.monotonic())
            result = invert(*tensors, following=following, generator=generator, seconds=left, progress=progress)
            reason = f"its output goes to {network.activation.__name__}, whose equations hold"
            return replace(layer, equations=True, reason=reason), result
    return None
