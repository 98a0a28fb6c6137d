"""Audit several rounds of one client: first each round alone, then all rounds joined. The result combines both."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from spearpp.auditing.checks import Finding
from spearpp.auditing.plan import BYTES_PER_INVERTED_WEIGHT, Plan, make_plan
from spearpp.auditing.replay import Replay, replay_all
from spearpp.auditing.result import AuditResult, History, LayerAudit, RoundSummary, Verdict, best_of, verdict_of
from spearpp.auditing.rounds.joined import Joined, join_rounds, not_joined, of_layer, unite
from spearpp.auditing.task import Budget, Task
from spearpp.auditing.vocabulary import unite_vocabularies
from spearpp.auditing.wording import Context, caveats_of_rounds, summary_of_rounds, worded
from spearpp.errors import DataError, OptionError
from spearpp.model import Layer, named_as
from spearpp.update import ClientUpdate
from spearpp.update.lazy import tensor_specs

TIME_SHARE_ALONE = 0.4
"""Share of the time budget for the single rounds. Design choice: single rounds that give nothing end early, and the
joined rounds are the larger problem."""

COMPARED_ENTRIES = 2**16
"""Number of weights and gradients of each round that are compared to choose rounds. Design choice: this number measures
the distances between rounds to within a percent, and 1,000 rounds take less than 600 MB."""


def check_rounds(updates: Sequence[ClientUpdate]) -> Sequence[ClientUpdate]:
    """Check that updates can be rounds of one client, and return them.

    Raises:
        OptionError: if there is no update, or an element is not an update.
        DataError: if the updates belong to different models, or are sums of several clients.
    """
    if not updates:
        raise OptionError("no update is given: expected at least one round")
    for number, each in enumerate(updates, start=1):
        if not isinstance(each, ClientUpdate):
            raise OptionError(f"round {number} is a {type(each).__name__}: expected a spearpp.ClientUpdate")
        if _shapes(each) != _shapes(updates[0]):
            why = f"round {number} has other parameters or shapes than round 1: is it another model?"
            raise DataError(why, hint="the folder must contain updates of one model only")
        if each.clients > 1:
            raise DataError(f"round {number} is the sum of {each.clients} clients: rounds of one client are needed")
    return updates


def _shapes(update: ClientUpdate) -> dict[str, tuple[int, ...]]:
    return {name: tuple(each.shape) for name, each in tensor_specs(update.weights).items()}


def first_layer(plans: Sequence[Plan]) -> Layer | None:
    """Return the layer whose inputs are the same in all rounds, or None if there is none.

    This is a layer that sees the inputs of the model, or a layer after weights that do not change between the rounds.
    """
    names = [{layer.name for layer in plan.to_invert} for plan in plans]
    for layer in plans[-1].to_invert:
        if all(layer.name in each for each in names) and (layer.sees != "features" or _is_first(layer, plans)):
            return layer
    return None


def _is_first(layer: Layer, plans: Sequence[Plan]) -> bool:
    """Return whether all weights that come before the layer are equal in all rounds."""
    weights = [plan.update.weights for plan in plans]
    before = list(weights[0])[: list(weights[0]).index(layer.weight)]
    return all(torch.equal(weights[0][name], each[name]) for each in weights[1:] for name in before)


def choose_rounds(layer: Layer, updates: Sequence[ClientUpdate], memory: int | None) -> list[int]:
    """Return the rounds that fit into memory: those whose weights differ most from each other, the latest one included.

    Rounds with nearly equal weights have nearly equal gradients and add little. A round with exactly the gradient of an
    earlier round adds nothing and is left out. Such rounds occur if the server does not change its weights.
    """
    step = max(1, layer.neurons * layer.features // COMPARED_ENTRIES)
    gradients = [each.gradients[layer.weight].flatten()[::step].clone() for each in updates]
    new = [i for i, each in enumerate(gradients) if not any(torch.equal(each, other) for other in gradients[:i])]
    most = len(new)
    if memory is not None:
        most = max(1, memory // (BYTES_PER_INVERTED_WEIGHT * layer.neurons * layer.features))
    if most >= len(new):
        return new
    weights = torch.stack([updates[i].weights[layer.weight].flatten()[::step].float() for i in new])
    distances = torch.cdist(weights, weights)
    chosen = [len(new) - 1]
    while len(chosen) < most:
        nearest = distances[:, chosen].amin(1)
        nearest[chosen] = -1.0
        chosen.append(int(nearest.argmax()))
    return [new[index] for index in sorted(chosen)]


def audit_rounds(
    updates: Sequence[ClientUpdate],
    task: Task,
    audit_one: Callable[[ClientUpdate, float], AuditResult],
    *,
    each_alone: bool = True,
) -> AuditResult:
    """Audit several rounds of one client.

    Args:
        updates: the rounds, oldest first, each with the weights that it started from.
        task: what the caller asks for. The budget covers all rounds together, the memory limits the number of rounds
            that are joined, and the batch size is that of each single round.
        audit_one: audits one round within a number of seconds.
        each_alone: whether to audit every round alone first, and not only the last one.
    """
    updates = [named_as(each, task.model) for each in check_rounds(updates)]
    began, whole = time.monotonic(), Budget.of(task.budget)
    first = 0 if each_alone else len(updates) - 1
    alone, last = _audit_alone(updates, audit_one, first, Budget.of(task.budget, TIME_SHARE_ALONE))
    audited = [each for each in alone if each is not None]
    plans = [make_plan(each, task) for each in updates]
    sent = [index for index, plan in enumerate(plans) if plan.to_invert]  # an idle round has nothing to invert
    layer = first_layer([plans[index] for index in sent]) if sent else None
    interrupted = any(each.interrupted for each in audited)
    outcome = "the audit was interrupted" if interrupted else _why_not_joined(layer, audited, len(updates))
    joined = not_joined(outcome)
    if layer is not None and not outcome:
        used = [sent[index] for index in choose_rounds(layer, [plans[index].update for index in sent], task.memory)]
        joined = not_joined("only one round sent a gradient of its own, or memory allows only one of them")
        if len(used) > 1:
            rest = replace(task, budget=whole.share(1))
            joined = replace(join_rounds(layer, {index: plans[index].update for index in used}, rest), used=tuple(used))
    if layer is not None:
        joined = unite(layer, alone, joined)
    audits, shown = _layers(last, joined), len(updates) - 1
    if best_of(audits) is None:  # a leak of a single round counts, whatever the other rounds give
        counts = [0 if each is None else len(each.inputs) for each in alone]
        shown = max(range(len(alone)), key=lambda index: (counts[index], index))
        best = alone[shown] or last
        audits, last = (best.layers, best) if best_of(best.layers) is not None else (audits, last)
    history = _history(alone, layer, joined)
    tables = unite_vocabularies([each.vocabulary for each in audited])
    tried = any(each.verdict is not Verdict.NOT_APPLICABLE for each in audited)
    tried |= any(each.invertible for each in audits)  # the joined rounds may be invertible although no single round is
    result = AuditResult(
        verdict=verdict_of(audits, tables, tried=tried),
        summary="",
        layers=audits,
        findings=_findings(alone),
        caveats=caveats_of_rounds(history, shown),
        interrupted=interrupted,
        replay=_replay_last(joined, updates, task) or last.replay,
        seconds=time.monotonic() - began,
        budget=task.budget,
        history=history,
        vocabulary=tables,
    )
    result = worded(Context(result, updates[shown], task, task.model is not None, plans[shown].decay, None))
    return replace(result, summary=result.summary + summary_of_rounds(history))


def _audit_alone(
    updates: Sequence[ClientUpdate],
    audit_one: Callable[[ClientUpdate, float], AuditResult],
    first: int,
    clock: Budget,
) -> tuple[list[AuditResult | None], AuditResult]:
    """Audit the rounds from the first one on, each alone, until Ctrl-C ends one of these audits.

    The last round comes first, so that it is always audited.

    Returns:
        The audit of each round, None where it was not audited; and the audit of the last round.
    """
    last = audit_one(updates[-1], clock.share(len(updates) - first))
    alone: list[AuditResult | None] = [*([None] * (len(updates) - 1)), last]
    audited = last
    for index in range(len(updates) - 2, first - 1, -1):
        if audited.interrupted:
            break
        alone[index] = audited = audit_one(updates[index], clock.share(index - first + 1))
    return alone, last


def _findings(alone: list[AuditResult | None]) -> list[Finding]:
    """Return the findings about all rounds, with the number of the round."""
    return [
        replace(finding, message=f"round {number}: {finding.message}")
        for number, each in enumerate(alone, start=1)
        for finding in (each.findings if each is not None else [])
    ]


def _why_not_joined(layer: Layer | None, audited: list[AuditResult], rounds: int) -> str:
    """Return why joining the rounds cannot give more than the single rounds, or an empty string if it can."""
    if rounds < 2:
        return "there is only one round"
    if layer is None:
        return "no layer that can be inverted sees the same inputs in every round"
    found = [of_layer(each, layer) for each in audited]
    if all(each is not None and each.complete for each in found):
        return f"{'every round' if len(found) > 1 else 'the last round'} alone gave all of its samples"
    return ""


def _layers(last: AuditResult, joined: Joined) -> list[LayerAudit]:
    """Return the layers of the last round, with the inputs of all rounds in the layer that was joined."""
    united = joined.audited
    return [each if united is None or each.layer.name != united.layer.name else united for each in last.layers]


def _replay_last(joined: Joined, updates: Sequence[ClientUpdate], task: Task) -> Replay | None:
    """Replay the last round from all inputs that contribute to it; None if there are none, or labels are missing."""
    found, labels = (None, None) if joined.audited is None else (joined.audited.inversion, joined.audited.labels)
    if found is None or labels is None or len(found.inputs) < found.batch_size:
        return None
    rows = torch.tensor([len(updates) - 1 in each for each in joined.present], dtype=torch.bool)
    inputs, labels = found.inputs[rows.to(found.inputs.device)], labels.to(rows.device)[rows]
    if not bool(rows.any()) or not bool((labels >= 0).all()):
        return None
    return replay_all(task.model, updates[-1], [(inputs, labels.to(inputs.device))], task.loss)


def _history(alone: list[AuditResult | None], layer: Layer | None, joined: Joined) -> History:
    """Return what the rounds gave, alone and together."""

    def summary(result: AuditResult | None) -> RoundSummary:
        if result is None:
            return RoundSummary(None, None, 0)
        audited = None if layer is None else of_layer(result, layer)
        samples = None if audited is None else audited.batch_size
        return RoundSummary(str(result.verdict), samples, len(result.inputs))

    rows = [] if joined.audited is None else torch.nonzero(joined.audited.is_recovered)[:, 0].tolist()
    return History(
        rounds=tuple(map(summary, alone)),
        joined=joined.used,
        samples=joined.samples,
        outcome=joined.outcome,
        present=tuple(tuple(sorted(joined.present[row])) for row in rows),
        known_from=tuple(joined.known_from[row] for row in rows),
    )
