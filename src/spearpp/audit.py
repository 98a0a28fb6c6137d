"""From a client's update to a verdict: which layers can be inverted, what they give away, and proof of it."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import nn

from spearpp.consistency import LARGEST, Finding, check, spectrum
from spearpp.errors import OptionError, SpearError
from spearpp.invert import invert
from spearpp.layers import Layer, find_layers
from spearpp.replay import Replay, labels_of, replay
from spearpp.result import Inversion, Progress
from spearpp.search import Gated, Search
from spearpp.shapes import Int, Tensor
from spearpp.update import ClientUpdate

LEAST_SECONDS = 0.5
"""A layer's share of the budget at least."""


class Verdict(StrEnum):
    """What an audit comes to. There is no "safe"."""

    LEAKS = "LEAKS"
    NOT_FOUND = "NOT_FOUND"
    NOT_APPLICABLE = "NOT_APPLICABLE"


@dataclass(frozen=True, eq=False)
class LayerAudit:
    """One layer: what it holds, and what came of it."""

    layer: Layer
    feasible: bool
    reason: str
    """Why it was inverted, or why not."""
    inversion: Inversion | None = None
    labels: Int[Tensor, "k"] | None = None
    """The class of each recovered input, -1 where none fits; None where labels cannot be told."""

    @property
    def batch_size(self) -> int | None:
        """How many samples its gradient holds, where that could be read."""
        return None if self.inversion is None else self.inversion.batch_size

    @property
    def recovered(self) -> int:
        """How many of them came back exactly, with a certificate."""
        return 0 if self.inversion is None else int(self.inversion.certified.sum())

    @property
    def approximate(self) -> int:
        """How many more came back up to noise, with evidence that they are in the batch."""
        return len(self.inputs) - self.recovered

    @property
    def inputs(self) -> Tensor:
        """The inputs that are in the batch by their certificates, exact ones first."""
        held = self._held
        if self.inversion is None or held is None:
            return torch.zeros(0, self.layer.features)
        return self.inversion.inputs[held]

    @property
    def error(self) -> float:
        """The largest implied error of these inputs, over their root mean square."""
        held = self._held
        if self.inversion is None or self.inversion.certificates is None or held is None or not bool(held.any()):
            return 0.0
        return float(self.inversion.certificates.error[held].max())

    @property
    def _held(self) -> Tensor | None:
        if self.inversion is None or self.inversion.certificates is None:
            return None
        # A single direction above noise may be the mean of many alike: nothing tells them apart.
        alone = self.inversion.batch_size == 1
        return self.inversion.certified if alone else self.inversion.certified | self.inversion.certificates.consistent


@dataclass(frozen=True, eq=False)
class AuditResult:
    """What one update gives away."""

    verdict: Verdict
    summary: str
    """The verdict in a sentence."""
    layers: list[LayerAudit]
    findings: list[Finding]
    caveats: list[str]
    """What the verdict does not say."""
    replay: Replay | None
    """The update computed again from what was recovered, where all of it was."""
    seconds: float
    budget: float | None
    """Seconds that were allowed; None for no bound but the search's own."""

    @property
    def best(self) -> LayerAudit | None:
        """The layer that gives away most: the model's inputs before features, then the larger number."""
        return _best(self.layers, self.replay)

    @property
    def inputs(self) -> Tensor:
        """What the layer that gives away most gave: inputs with evidence, or all that a replay proves."""
        best = self.best
        if best is None or best.inversion is None:
            return torch.zeros(0, 0)
        return best.inputs if len(best.inputs) else best.inversion.inputs


def audit(
    update: ClientUpdate,
    model: nn.Module | None = None,
    *,
    budget: float | None = None,
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

    Args:
        update: what the client sent.
        model: the network, to tell which layers feed a ReLU, to find labels and to replay; None to go without.
        budget: seconds for all layers together, kept to a round of the search; None leaves it to the search.
        search: how to look; None is ``spearpp.search.Gated()``.
        batch_size: only a check: what is read off the update counts, and a caveat says if they differ.
        generator: source of randomness; None is a generator with seed 0.
        progress: called after every round with the layer and how far it is.

    Raises:
        SpearError: for an update that is none. "Nothing found" is a result, not an error.

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
    began = time.monotonic()
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    layers = find_layers(model, update)
    findings = check(update, layers)
    update, decay = _without_decay(update, layers)
    broken = next((finding for finding in findings if finding.level == "error"), None)
    feasible = [layer for layer in layers if layer.qualifies and broken is None]
    feasible.sort(key=lambda layer: layer.assumed)
    done: dict[str, LayerAudit] = {}
    for index, layer in enumerate(feasible):
        left = None
        if budget is not None:
            left = max(LEAST_SECONDS, (budget - (time.monotonic() - began)) / (len(feasible) - index))
        if budget is not None and index and time.monotonic() - began >= budget:
            done[layer.name] = LayerAudit(layer, True, "not tried: the budget was spent")
        elif layer.sees == "features" and any(_complete(each) for each in done.values()):
            done[layer.name] = LayerAudit(layer, True, "not inverted: what it sees follows from the recovered inputs")
        else:
            done[layer.name] = _invert(layer, update, _within(search, left), generator, progress)
    why = {layer.name: broken.message if broken and layer.qualifies else layer.reason for layer in layers}
    audits = [done.get(layer.name) or LayerAudit(layer, False, why[layer.name]) for layer in layers]
    audits = [_with_labels(each, update, model) for each in audits]
    again = _replayed(audits, update, model)
    verdict = _verdict(audits, again)
    return AuditResult(
        verdict=verdict,
        summary=_summary(verdict, audits, time.monotonic() - began, again),
        layers=audits,
        findings=findings,
        caveats=_caveats(verdict, audits, update, model, batch_size, decay, again),
        replay=again,
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


def _without_decay(update: ClientUpdate, layers: list[Layer]) -> tuple[ClientUpdate, float]:
    """The update without weight decay, which adds a multiple of the weights to every gradient."""
    for layer in layers:
        gradient = update.gradients.get(layer.weight)
        if gradient is not None and layer.qualifies and gradient.numel() <= LARGEST:
            decay = spectrum(gradient, update.weights[layer.weight]).decay
            if decay:
                pure = {name: each - decay * update.weights[name].to(each) for name, each in update.gradients.items()}
                return replace(update, gradients=pure), decay
            return update, 0.0
    return update, 0.0


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

    try:
        result = invert(
            *update.layer(layer.weight, layer.bias),
            next_grad_weight=None if layer.next is None else update.gradients[layer.next],
            next_weight=None if layer.next is None else update.weights[layer.next],
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
        return replace(audited, labels=labels_of(model, update, audited.layer, audited.inversion))
    except SpearError:
        return audited


def _replayed(audits: list[LayerAudit], update: ClientUpdate, model: nn.Module | None) -> Replay | None:
    for each in audits:
        if model is None or each.inversion is None or each.labels is None:
            continue
        if len(each.inversion.inputs) == each.inversion.batch_size and bool((each.labels >= 0).all()):
            with suppress(SpearError):
                return replay(model, update, each.inversion.inputs, each.labels)
    return None


def _best(audits: list[LayerAudit], again: Replay | None) -> LayerAudit | None:
    """The layer that gives away most: inputs before features, be they proved by certificates or by a replay."""
    proven = again is not None and again.proves
    found = [each for each in audits if len(each.inputs) or (proven and each.labels is not None)]
    return max(found, key=lambda each: (each.layer.sees != "features", len(each.inputs)), default=None)


def _verdict(audits: list[LayerAudit], again: Replay | None) -> Verdict:
    if _best(audits, again) is not None:
        return Verdict.LEAKS
    return Verdict.NOT_FOUND if any(each.feasible for each in audits) else Verdict.NOT_APPLICABLE


def _summary(verdict: Verdict, audits: list[LayerAudit], seconds: float, again: Replay | None) -> str:
    best = _best(audits, again)
    if best is not None:
        what = "samples' features" if best.layer.sees == "features" else "training inputs"
        if best.recovered == len(best.inputs) > 0:
            how = "exactly"
        elif len(best.inputs):
            how = f"up to an error of {best.error:.1%} of their size"
        else:
            how = "up to noise: none is certified, but computed again from them the update differs by "
            how += f"{again.difference:.1%}," if again is not None else ""
        count = len(best.inputs) or best.batch_size
        return f"LEAKS: {count} of {best.batch_size} {what} were recovered {how} from layer {best.layer.name}"
    if verdict is Verdict.NOT_FOUND:
        tried = sum(each.feasible and each.inversion is not None for each in audits)
        where = f"{tried} layers" if tried > 1 else "one layer"
        return f"NOT_FOUND: nothing was recovered from {where} in {seconds:.3g} s; that is no proof of safety"
    reasons = [each.reason for each in audits]
    return "NOT_APPLICABLE: " + (
        f"no layer can be inverted ({reasons[0]})" if reasons else "the model has no Linear layer"
    )


def _caveats(
    verdict: Verdict,
    audits: list[LayerAudit],
    update: ClientUpdate,
    model: nn.Module | None,
    batch_size: int | None,
    decay: float,
    again: Replay | None,
) -> list[str]:
    said = []
    if verdict is Verdict.LEAKS:
        said.append("The recovered inputs are personal data: keep and share them as such.")
        said.append(
            "Samples that fire exactly the same neurons are one to the gradient: they come back as one mixture."
        )
        best = _best(audits, again)
        if best is not None and best.recovered < (best.batch_size or 0):
            said.append("Errors that are given count the noise alone; samples that lie below it are not seen.")
    else:
        said.append(
            "Nothing found is no proof of safety: other attacks, a larger budget or another round may find more."
        )
    for each in audits:
        if each.inversion is not None and each.feasible and each.inversion.missing and each.recovered:
            missing = f"{each.inversion.missing} of {each.inversion.batch_size} samples were not recovered"
            said.append(
                f"Layer {each.layer.name}: {missing}; samples with tiny gradients may lie below the noise unseen."
            )
        if each.inversion is not None and batch_size is not None and each.batch_size not in (0, batch_size):
            said.append(
                f"Layer {each.layer.name}: {each.batch_size} samples were read off the update, {batch_size} were given."
            )
        if each.inversion is not None and not each.inversion.scale_known and len(each.inputs):
            said.append(f"Layer {each.layer.name} has no bias: its inputs are known up to a positive factor each.")
        if len(each.inputs) and each.layer.assumed:
            said.append(f"Layer {each.layer.name}: that a ReLU follows was assumed; the certificates prove it.")
    if decay:
        said.append(f"Weight decay of {decay:.3g} was taken off the update.")
    if update.clients > 1:
        said.append(f"The update is a sum of {update.clients} clients': which client an input belongs to is not told.")
    if model is None:
        said.append("Without a model neither labels nor a replay are possible.")
    elif verdict is Verdict.LEAKS and again is None:
        said.append("No replay: inputs are missing, labels could not be told, or the model does not take the inputs.")
    elif again is not None and again.difference > 1e-2:
        said.append(
            f"A replay with one step differs by {again.difference:.1%}: several local steps, another loss, noise, or "
            "layers that behave differently in training."
        )
    return said
