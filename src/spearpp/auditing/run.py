"""Invert the layers of a plan one after the other, within the time budget."""

import importlib
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from spearpp.auditing.claims import MAX_ERROR
from spearpp.auditing.local_training import invert_training
from spearpp.auditing.plan import OUTPUT_LAYER, Plan
from spearpp.auditing.replay import as_sent
from spearpp.auditing.result import LayerAudit
from spearpp.auditing.task import MIN_SECONDS, Budget, Task
from spearpp.errors import OptionError, RankError, SpearError
from spearpp.inversion.evidence import Scope
from spearpp.inversion.invert import invert
from spearpp.inversion.loop import OUT_OF_TIME
from spearpp.inversion.result import Inversion, Progress
from spearpp.model import Layer, assumed_networks
from spearpp.model.following import Following
from spearpp.search import Equations, Gated, Search
from spearpp.types import LayerTensors

TRIAL_STARTS = 64
"""Number of starts with each activation that is tried. A design choice: four first rounds on a CPU
(``search.equations.starts.FIRST_STARTS``), so that no activation takes long."""
FIRST_STARTS = 512
"""Smallest number of starts of the first search of a ReLU layer with a next layer. Measured (``docs/lab/notebook.md``,
"ReLU: which search comes first"): with 256 starts, fresh networks take 1.6 to 2.2 times as long. With 1024 starts,
trained ones take 1.4 to 1.6 times as long."""
FIRST_STARTS_PER_SAMPLE = 4
"""Smallest number of starts of this search for each sample. A design choice: it counts from 129 samples on."""
ENOUGH_CERTIFIED = 0.75
"""Share of the samples that the equations must certify so that the search with all starts is skipped. Measured: on
trained networks they certified 79 % or more, and more starts gained nothing. After two local steps with momentum they
certified half of the samples, and the search with all starts certified all of them (``docs/tutorial-flower.md``)."""
COMPILER = "torch._dynamo"
"""The compiler that ``torch.func`` imports when it first computes a derivative."""
LOADING_SECONDS = 3.0
"""Smallest remaining time for which this compiler is loaded for a second search. Measured: loading takes 1.5 to 2.5 s
on a CPU core."""


def run_searches(plan: Plan, task: Task, clock: Budget) -> tuple[list[LayerAudit], bool]:
    """Invert the layers one after the other. Return them, and whether Ctrl-C interrupted the inversion."""
    done: dict[str, LayerAudit] = {}
    interrupted = False
    for index, layer in enumerate(plan.to_invert):
        # The output layer comes last and takes seconds, so it does not shorten the time of the other layers. The inputs
        # of the model matter most, so a layer that receives them gets half of the time.
        waiting = max(1, sum(not each.output for each in plan.to_invert[index:]))
        share = clock.share(min(2, waiting) if layer.sees == "inputs" else waiting)
        if interrupted:
            done[layer.name] = LayerAudit(layer, "not tried: the audit was interrupted")
        elif index and clock.spent:
            done[layer.name] = LayerAudit(layer, f"not tried: {OUT_OF_TIME}")
        elif layer.sees == "features" and (why := _covered(done.values())):
            done[layer.name] = LayerAudit(layer, f"not inverted: {why}")
        else:
            try:
                done[layer.name] = _invert(layer, plan, task, share)
                interrupted = done[layer.name].interrupted
            except KeyboardInterrupt:
                done[layer.name] = LayerAudit(layer, "interrupted before its search began")
                interrupted = True
    return [done.get(each.layer.name, each) for each in plan.layers], interrupted


def _covered(done: Iterable[LayerAudit]) -> str:
    """Return why a layer that receives features says nothing more than the layers before it, or an empty string."""
    for each in done:
        found = each.inversion
        if each.layer.sees != "inputs" or found is None:
            continue
        if each.complete or len(found.inputs) == found.batch_size == _recovered(found):
            return "its inputs follow from the recovered inputs of the model"
        if bool(found.certified.any()) and _by_network(found):
            return f"the equations that recovered inputs of layer {each.layer.name} include its gradient"
    return ""


def _recovered(found: Inversion) -> int:
    """Return the number of inputs whose evidence holds with an error that allows at least an approximate claim."""
    evidence = found.evidence
    return 0 if evidence is None else int((evidence.consistent & (evidence.error <= MAX_ERROR)).sum())


def _by_network(found: Inversion) -> bool:
    """Return whether the equations of the whole network determine the inputs."""
    return found.evidence is not None and found.evidence.scope is Scope.NETWORK


@dataclass(frozen=True, eq=False)
class _LayerRun:
    """One layer to invert, with everything that its searches need."""

    layer: Layer
    plan: Plan
    task: Task
    tensors: LayerTensors
    deadline: float
    """End of the time for the layer on the clock ``time.monotonic``; inf without a budget."""
    progress: Callable[[Progress], None] | None

    @property
    def remaining(self) -> float:
        """Seconds until the deadline, which may be negative."""
        return self.deadline - time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds for the next search."""
        return max(MIN_SECONDS, self.remaining)

    def invert(
        self, following: Following | None = None, search: Search | None = None, seconds: float | None = None
    ) -> Inversion:
        """Solve the given equations, or search for sparse directions, with the next layer if there is one."""
        layer, update = self.layer, self.plan.update
        name = layer.next if following is None else None
        return invert(
            *self.tensors,
            next_grad_weight=None if name is None else update.gradients[name],
            next_weight=None if name is None else update.weights[name],
            following=following,
            search=search,
            generator=self.task.generator,
            dropout=layer.dropout,
            one_step=update.one_gradient,
            seconds=self.seconds if seconds is None else seconds,
            progress=self.progress,
        )

    def repeat_training(self) -> Inversion | None:
        """Invert the layer by repeating the client's local training, or return None if this is not possible."""
        if self.plan.replay_skipped is not None:
            return None
        return invert_training(self.layer, self.plan.update, replace(self.task, budget=self.seconds))

    def following(self, model: nn.Module | None) -> Following:
        """Return what follows the layer in a model, with the weights that the client started from."""
        layer, update, loss = self.layer, self.plan.update, self.task.loss
        if layer.output and loss is not None and (model is None or layer.assumed):
            return Following.of_output(layer.neurons, loss)
        if model is None:
            raise OptionError("the equations of the network need a model")
        following = Following.of_model(as_sent(model, update), update, layer, loss)
        if not following.rest.is_chain:
            importlib.import_module(COMPILER)  # before the search, so that the search does not wait for it
        return following


def _invert(layer: Layer, plan: Plan, task: Task, seconds: float) -> LayerAudit:
    """Invert one layer.

    A layer with ReLU, known or assumed, is searched for sparse directions first. If this does not certify every input,
    the equations of the network are solved too.
    """
    # Outside of the try block, because a file that can no longer be read ends the whole audit.
    tensors = plan.update.layer(layer.weight, layer.bias)
    tell = None if task.progress is None else partial(task.progress, layer)
    here = _LayerRun(layer, plan, task, tensors, time.monotonic() + seconds, tell)
    try:
        if layer.equations or isinstance(task.search, Equations):
            result = _by_equations(here)
        elif task.search is not None or plan.replay_skipped is not None or not _time_to_load(seconds / 2):
            result = here.invert(search=task.search)
        else:
            layer, result = _by_both(here)
    except RankError:
        return LayerAudit(layer, _full_rank(layer), invertible=False)
    except SpearError as error:
        return LayerAudit(layer, str(error), invertible=False)
    if result.batch_size == 0:
        return LayerAudit(layer, result.stats.stopped, result, invertible=False)
    if layer.output and result.batch_size > 1 and not result.stats.starts:
        why = f"{OUTPUT_LAYER}; its gradient shows at least {result.batch_size} samples, too many for the equations of "
        return LayerAudit(layer, f"{why}{layer.neurons} outputs", invertible=False)
    outcome = _outcome(layer, result)
    if here.remaining <= 0 and result.missing and OUT_OF_TIME not in outcome:
        outcome += f"; {OUT_OF_TIME} by further searches of this layer"
    return LayerAudit(layer, outcome, result)


def _by_both(here: _LayerRun) -> tuple[Layer, Inversion]:
    """Search a layer with ReLU for sparse directions, and solve the equations of the network if an input is missing.

    The first search is short, and the equations start from the inputs that it found. Without a model, other common
    activations are tried if it found less than half of the sparse directions that a ReLU causes. If the equations
    recover few inputs, they may hold only approximately, as after local training. If the first search used all of its
    starts, the layer is then searched again with more.

    Returns:
        The layer and its inversion, with another reason if the equations recovered more.
    """
    layer, model, starts = here.layer, here.task.model, Gated.starts
    if layer.next is not None:
        starts = max(FIRST_STARTS, FIRST_STARTS_PER_SAMPLE * (here.task.batch_size or 0))
    best = first = here.invert(search=Gated(starts), seconds=here.remaining / 2)
    if _ended(first):
        return layer, first
    again, in_time = starts <= first.stats.starts < Gated.starts, _time_to_load(here.remaining)
    if model is None and layer.sees == "inputs" and in_time and 2 * first.stats.found < first.batch_size:
        found = _other_activation(here)
        if found is not None:
            return found
    if model is not None and in_time:
        with suppress(OptionError):
            following = here.following(model)
            if _has_forward_equations(following, first.batch_size):
                seconds = here.remaining / (2 if again else 1)
                second = here.invert(following, Equations(inputs=first.inputs), seconds)
                again = again and _recovered(second) < ENOUGH_CERTIFIED * first.batch_size
                best = _better(first, second)
    if again and here.remaining > 0 and not _ended(best):
        best = _better(best, here.invert())
    if _by_network(best):
        layer = replace(layer, reason=f"{layer.reason}; the equations of the network were solved")
    return layer, best


def _has_forward_equations(following: Following, batch_size: int) -> bool:
    """Return whether the inputs of a later layer give equations: it needs more neurons than the batch has samples.

    Without them, the equations do not determine the inputs of a layer with ReLU. Besides the activation pattern, its
    signals depend only on the outputs of the next layer, and these are then about as many numbers as the unknowns, or
    fewer.
    """
    return any(len(gradient) > batch_size for gradient, *_ in following.layers.values())


def _better(first: Inversion, second: Inversion) -> Inversion:
    """Return the inversion that certifies more inputs, recovers more, or has more that fit, in this order.

    The first one is returned if they are alike. Ctrl-C in the second one also ends the audit.
    """
    best = max(first, second, key=lambda each: (int(each.certified.sum()), _recovered(each), int(each.fits.sum())))
    return replace(best, stats=replace(best.stats, interrupted=second.stats.interrupted))


def _ended(result: Inversion) -> bool:
    """Return whether no further search of this layer can find more, or none is wanted.

    If the evidence holds for every input, and none is exact, noise is the reason, and other searches cannot change it.
    """
    only_noise = not bool(result.certified.any()) and len(result.inputs) == result.batch_size == _recovered(result)
    return result.stats.interrupted or not result.missing or only_noise


def _by_equations(here: _LayerRun) -> Inversion:
    """Solve the equations of the network, and repeat the local training of a client that sent weights."""
    steps, search = here.plan.update.steps, here.task.search
    found = here.repeat_training() if (steps or 1) > 1 else None
    if found is not None:
        return found
    result = here.invert(here.following(here.task.model), search if isinstance(search, Equations) else None)
    if steps in (None, 1) and result.batch_size > 0 and not bool(result.fits.any()):
        found = here.repeat_training()
    return result if found is None else found


def _other_activation(here: _LayerRun) -> tuple[Layer, Inversion] | None:
    """Try common activations other than ReLU for an update without a model.

    A few starts for each activation show whether its equations have a solution. A recovered input proves the
    activation, and the search then goes on with it.

    Returns:
        The layer and its inversion with the first activation that fits, or None.
    """
    quiet = replace(here, progress=None)
    for network in assumed_networks(here.plan.update)[1:]:
        if here.remaining <= 0:
            return None
        following = here.following(network)
        if _recovered(quiet.invert(following, Equations(TRIAL_STARTS))):
            reason = f"its output goes to {network.activation.__name__}, whose equations hold"
            return replace(here.layer, equations=True, reason=reason), here.invert(following)
    return None


def _outcome(layer: Layer, result: Inversion) -> str:
    """Return why the layer was inverted, how its search ended, and which equations of the network were used."""
    outcome, certified = f"{layer.reason}; {result.stats.stopped}", int(result.certified.sum())
    if certified < result.batch_size:  # a search may end because it has a candidate for every input
        outcome = outcome.replace("the whole batch was found", "every input has a candidate")
        outcome += f"; {certified} of {result.batch_size} inputs are certified"
    evidence = result.evidence
    if evidence is None or evidence.scope is not Scope.NETWORK or "forward" not in evidence.numbers:
        return outcome  # ``stopped`` already describes a repeated local training
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


def _time_to_load(seconds: float) -> bool:
    """Return whether these seconds are enough to load the compiler, if necessary, and to use it."""
    return seconds > (0.0 if COMPILER in sys.modules else LOADING_SECONDS)
