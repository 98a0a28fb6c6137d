"""From a client's update to a verdict: which layers can be inverted, what they give away, and proof of it."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import nn

from spearpp.audit.claims import RECOGNISABLE, SAFETY, Claim, Kind, Known, judge
from spearpp.audit.memory import MEMORY, check_memory, fitting, unplayed
from spearpp.audit.result import AuditResult, LayerAudit, Verdict, best_of
from spearpp.audit.wording import Context, caveats, summary
from spearpp.certificate import EXACT
from spearpp.consistency import Finding, inspect
from spearpp.errors import DataError, NonFiniteError, OptionError, SpearError
from spearpp.estimate import LARGEST, SECONDS, Estimate, estimate
from spearpp.invert import invert
from spearpp.layers import Layer, assumed_networks, find_layers
from spearpp.lowrank import Factors, decompose
from spearpp.observation import observe
from spearpp.replay import Replay, replay
from spearpp.result import Inversion, Progress
from spearpp.search import Gated, Search
from spearpp.shapes import Bool, Float, Tensor
from spearpp.signals import Signals, labels_of, replay_alone
from spearpp.update import ClientUpdate
from spearpp.update.lazy import elementwise, outlines

__all__ = ["AuditResult", "Claim", "Kind", "LayerAudit", "Verdict", "audit"]
LEAST_SECONDS = 0.5
"""A layer's share of the budget at least."""
NOISY = 5.0
"""How many times its noise the mismatch of an input may have that a replay of the whole batch proves."""
PROVED = 1e-3
"""Mismatch of an input replayed alone up to which it proves the network that was assumed."""
RANK_ONE = 1e-3
"""What may be left of a gradient of rank one after its strongest row is taken out, over its norm."""


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
    model's inputs are all there (what later layers see follows from them). A layer whose gradient has rank one is
    inverted whatever follows it. Each recovered input is then replayed alone through the model, which tells how many
    samples it stands for and how far it may be off (``spearpp.audit.claims``).

    The verdict is LEAKS if an input is a sample of this client, or within a stated distance of one; NOT_FOUND if none
    is within the budget (inputs that fit the gradient without being proved are counted and explained); and
    NOT_APPLICABLE if there is no layer to invert.

    An update that is in files is looked through first, then read a layer at a time; nothing of it is kept.

    Ctrl-C ends the search, not the call: what was certified until then is in the result, ``interrupted`` is True.

    Args:
        update: what the client sent.
        model: the network, to tell which layers feed a ReLU, to find labels and to replay; None to go without.
        budget: seconds for all layers together, kept to a round of the search; None leaves it to the search.
        memory: bytes that the work on one layer may take; larger layers are skipped, and the caveats say so. None for
            no bound.
        search: how to look; None is ``spearpp.search.Gated()``.
        batch_size: how many samples the client trained on, if that is known (Flower's ``num-examples``). With it an
            input can be proved to be one sample; without it, one sample or the mean of samples very close to each
            other.
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
    >>> result = spearpp.audit(update, model, batch_size=6)
    >>> print(result.summary)
    LEAKS: 6 of 6 training inputs were recovered exactly from layer 0
    >>> bool((result.layers[0].labels.sort().values == batch.labels.sort().values).all())
    True
    >>> result.replay.difference < 1e-5
    True
    """
    _check(update, budget, search, batch_size)
    check_memory(memory)
    began = time.monotonic()
    clock = _Budget(budget, began)
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    plan = _plan(update, model, memory)
    audits, interrupted = _run(plan, search, clock, generator, progress)
    audits = [_by_layer(each, plan.update, batch_size) for each in audits]
    again, trained, network, unseen = None, None, model, None if model is None else unplayed(update, memory)
    try:
        judged = _judge(audits, plan.update, None if unseen else model, batch_size)
        audits, network = judged.audits, judged.network
        again = _replayed(audits, plan.update, network)
        audits = _proved(audits, again, judged.signals)
        trained = _estimated(audits, plan.update, network, again, clock.rest(SECONDS))
    except KeyboardInterrupt:  # the inputs are there; labels and the replay are not
        interrupted = True
    verdict = _verdict(audits)
    context = Context(
        verdict,
        audits,
        update,
        model is not None,
        network is not None,
        batch_size,
        plan.decay,
        again,
        trained,
        interrupted,
        unseen,
    )
    return AuditResult(
        verdict=verdict,
        summary=summary(context, time.monotonic() - began),
        layers=audits,
        findings=[*plan.findings, *_training(trained, update)],
        caveats=[*caveats(context), *plan.left_out],
        interrupted=interrupted,
        replay=again,
        estimated=trained,
        seconds=time.monotonic() - began,
        budget=budget,
    )


def _check(update: object, budget: object, search: Search | None, batch_size: object) -> None:
    if not isinstance(update, ClientUpdate):
        raise OptionError(f"update is a {type(update).__name__}: expected a spearpp.ClientUpdate")
    if budget is not None and (not isinstance(budget, int | float) or not budget > 0):
        raise OptionError(f"budget={budget!r}: seconds, or None for none")
    if budget is not None and search is not None and not isinstance(search, Gated):
        raise OptionError("a budget in seconds needs the gated search; the others are bounded by their starts")
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise OptionError(f"batch_size={batch_size!r}: the number of samples the client trained on, or None")


@dataclass(frozen=True)
class _Budget:
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


@dataclass(frozen=True)
class _Plan:
    """Which layers are inverted, and why the others are not."""

    update: ClientUpdate
    """The update without weight decay."""
    layers: list[Layer]
    feasible: list[Layer]
    why_not: dict[str, str]
    findings: list[Finding]
    decay: float
    left_out: list[str]


def _plan(update: ClientUpdate, model: nn.Module | None, memory: int | None) -> _Plan:
    layers = find_layers(model, update)
    findings, decay = inspect(update, layers)
    update = _without_decay(update, decay)
    sized = [fitting(_alone_if_rank_one(layer, update, memory), update, memory) for layer in layers]
    layers, left_out = [layer for layer, _ in sized], [why for _, why in sized if why is not None]
    broken = next((finding for finding in findings if finding.level == "error"), None)
    feasible = [layer for layer in layers if layer.qualifies and broken is None]
    feasible.sort(key=lambda layer: layer.assumed)
    why = {layer.name: broken.message if broken and layer.qualifies else layer.reason for layer in layers}
    return _Plan(update, layers, feasible, why, findings, decay, left_out)


def _alone_if_rank_one(layer: Layer, update: ClientUpdate, memory: int | None) -> Layer:
    """The same layer, qualified if its gradient has rank one: then its rows are multiples of the input."""
    if layer.qualifies or layer.bias is None:
        return layer
    if layer.weight not in update.gradients or layer.bias not in update.gradients or layer.weight not in update.weights:
        return layer
    if not fitting(replace(layer, qualifies=True, next=None), update, memory)[0].qualifies:
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
    if float(torch.linalg.vector_norm(rest)) > RANK_ONE * float(torch.linalg.vector_norm(norms)):
        return layer
    reason = f"its gradient has rank one, so it is inverted although {layer.reason}"
    return replace(layer, qualifies=True, reason=reason, next=None)


def _run(
    plan: _Plan,
    search: Search | None,
    clock: _Budget,
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
            dropout=layer.dropout,
            progress=tell,
        )
    except SpearError as error:
        return LayerAudit(layer, False, str(error))
    if result.batch_size == 0:
        return LayerAudit(layer, False, result.stats.stopped, result)
    return LayerAudit(layer, True, f"{layer.reason}; {result.stats.stopped}", result)


@dataclass(frozen=True)
class _Judged:
    audits: list[LayerAudit]
    network: nn.Module | None
    """The model, or the one that was assumed and proved by a replay."""
    signals: dict[str, Signals]
    """Inputs replayed alone, by layer."""


def _judge(audits: list[LayerAudit], update: ClientUpdate, model: nn.Module | None, batch_size: int | None) -> _Judged:
    """What is claimed of every recovered input, and its label."""
    guesses = assumed_networks(update) if model is None and update.clients == 1 else []
    network = model
    judged, replayed = [], {}
    for each in audits:
        if each.inversion is None or not len(each.inversion.inputs):
            judged.append(each)
            continue
        factors = decompose(observe(*update.layer(each.layer.weight, each.layer.bias)), each.inversion.batch_size)
        signals = None
        for tried in guesses if network is None else [network]:
            signals = _signals(tried, update, each.layer, each.inversion, factors)
            if network is None and signals is not None and bool((signals.mismatch <= PROVED).any()):
                network = tried
                break
        if network is not None and signals is not None:
            replayed[each.layer.name] = signals
            patterns = _patterns(each.layer, each.inversion.inputs, update)
            claims = judge(each.inversion, patterns, signals, _known(each.layer, update, batch_size))
            each = replace(each, claims=claims)
        labels = None if network is None else _labels(network, update, each, factors)
        judged.append(replace(each, labels=labels))
    return _Judged(judged, network, replayed)


def _by_layer(audited: LayerAudit, update: ClientUpdate, batch_size: int | None) -> LayerAudit:
    """What the layer alone allows to claim, before anything is replayed."""
    if audited.inversion is None:
        return audited
    patterns = _patterns(audited.layer, audited.inversion.inputs, update)
    return replace(audited, claims=judge(audited.inversion, patterns, None, _known(audited.layer, update, batch_size)))


def _known(layer: Layer, update: ClientUpdate, batch_size: int | None) -> Known:
    return Known(
        batch_size,
        absolute=_absolute(update),
        one_step=update.kind == "gradients" and update.clients == 1,
        one_row_each=layer.sees == "inputs",
        dropout=layer.dropout,
    )


def _absolute(update: ClientUpdate) -> bool:
    """Whether a gradient has the scale of the loss: weights that moved by one step of a known learning rate."""
    once = update.steps in (None, 1) and update.lr is not None
    return update.clients == 1 and (update.kind == "gradients" or once)


def _signals(
    model: nn.Module | None, update: ClientUpdate, layer: Layer, inversion: Inversion, factors: Factors
) -> Signals | None:
    if model is None or layer.sees != "inputs" or update.clients > 1:
        return None
    with suppress(OptionError):
        return replay_alone(model, update, layer, inversion, factors)
    return None


def _patterns(layer: Layer, inputs: Float[Tensor, "k n"], update: ClientUpdate) -> Bool[Tensor, "k m"]:
    weight = update.weights[layer.weight]
    z = inputs.to(weight.device).double() @ weight.double().T
    return z + (0.0 if layer.bias is None else update.weights[layer.bias].double()) > 0


def _labels(model: nn.Module, update: ClientUpdate, audited: LayerAudit, factors: Factors) -> Tensor | None:
    found = audited.inversion
    if found is None or audited.layer.sees != "inputs":
        return None
    if not bool(found.certified.any() or found.fits.any()) and found.stats.found < found.batch_size:
        return None
    try:
        labels = labels_of(model, update, audited.layer, found, factors)
        if update.kind != "gradients" and not bool((labels >= 0).any()):
            labels = labels_of(model, update, audited.layer, found, factors, uphill=True)
    except (DataError, NonFiniteError):
        raise
    except SpearError:
        return None
    return labels


def _replayed(audits: list[LayerAudit], update: ClientUpdate, model: nn.Module | None) -> Replay | None:
    for inputs, labels in _whole_batches(audits):
        if model is not None:
            with suppress(OptionError):
                return replay(model, update, inputs, labels)
    return None


def _proved(audits: list[LayerAudit], again: Replay | None, signals: dict[str, Signals]) -> list[LayerAudit]:
    """Claims for inputs of a whole batch that only their replay together proves, each with its own signal in line.

    Mixing each input with another one, half and half, leaves the difference ``again.mixed``. So inputs whose replay
    leaves less are off by less than half of their distance to others, in the same proportion. That is an average: an
    input whose own signal is not explained is left out.
    """
    if again is None or not again.proves:
        return audits
    return [
        _with_proof(each, again, signals[each.layer.name]) if each.layer.name in signals else each for each in audits
    ]


def _with_proof(audited: LayerAudit, again: Replay, signals: Signals) -> LayerAudit:
    found, labels = audited.inversion, audited.labels
    if found is None or labels is None or not bool((labels >= 0).all()) or len(signals.mismatch) != len(found.inputs):
        return audited
    inputs = found.inputs.double()
    half = torch.linalg.vector_norm(inputs - inputs.roll(1, 0), dim=1) / 2
    share = again.difference / again.baseline * half / torch.linalg.vector_norm(inputs, dim=1).clamp_min(1e-300)
    noise = torch.zeros_like(share) if found.certificates is None else found.certificates.error.double()
    error = torch.maximum(SAFETY * share, noise)
    explained = (signals.mismatch <= (NOISY * signals.noise).clamp_min(again.difference)) & (error <= RECOGNISABLE)
    why = f"replayed together the inputs leave {again.difference:.1%} of the update, mixed ones {again.mixed:.0%}"
    claims = list(audited.claims)
    for row in torch.nonzero(explained)[:, 0].tolist():
        if not claims[row].recovered and claims[row].kind is not Kind.SEVERAL:
            kind = Kind.ONE_OR_MEAN if error[row] <= EXACT else Kind.APPROXIMATE
            claims[row] = Claim(kind, float(error[row]), float("nan"), why)
    return replace(audited, claims=tuple(claims))


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


def _verdict(audits: list[LayerAudit]) -> Verdict:
    if best_of(audits) is not None:
        return Verdict.LEAKS
    return Verdict.NOT_FOUND if any(each.feasible for each in audits) else Verdict.NOT_APPLICABLE
