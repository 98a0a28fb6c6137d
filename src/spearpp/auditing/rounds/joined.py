"""Invert a layer over several rounds of one client, judge the inputs, and add the inputs of single rounds.

A client that trains on the same samples in T rounds sends T gradients D_t X̂ᵀ of the same inputs, under T different
weights. Stacked one below the other, these gradients form the gradient of one layer with T·m neurons. So the number of
neurons limits what one round reveals, but not what a client reveals over time. A sample that takes part in only some
rounds has zeros in the rows of the other rounds. The rounds need not share any samples: every further sample only
increases the rank of the joined gradient.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from spearpp.auditing.claims import Claim, ClaimKind
from spearpp.auditing.judge import judge_in_round
from spearpp.auditing.replay import as_sent
from spearpp.auditing.result import AuditResult, LayerAudit
from spearpp.auditing.task import Budget, Task
from spearpp.errors import OptionError, SpearError
from spearpp.inversion.evidence import Scope
from spearpp.inversion.invert import invert
from spearpp.inversion.network import SIGMAS
from spearpp.inversion.result import Inversion
from spearpp.model import Layer
from spearpp.model.following import Following
from spearpp.search import Search, Suggested
from spearpp.types import Bool, Float, LayerTensors, Tensor, select_rows
from spearpp.update import ClientUpdate

SAME_SAMPLE_DISTANCE = 1e-2
"""Largest relative distance of two inputs that count as one sample. Design choice: the same number as in the search."""
FIRST_SEARCH_TIME_SHARE = 0.75
"""Share of the time for the search that uses the zeros of ReLU, before the equations of the network are tried. Design
choice: the first search is the stronger one for a single hidden layer."""
MIN_CONTRIBUTION = 1e-3
"""Smallest signal of a sample in a round, relative to its strongest round, that counts as a contribution. Design
choice: far above the error of a recovered direction."""


@dataclass(frozen=True, eq=False)
class Joined:
    """What several rounds gave for one layer."""

    audited: LayerAudit | None
    """The layer with its claims. None if nothing was found."""
    present: list[set[int]]
    """For each input, the indices of the rounds to which it contributes."""
    known_from: list[int]
    """For each input, the index of the first round that, together with the rounds before it, proves the input."""
    samples: int | None
    """Number of different samples that the joined rounds show. None if there is no clear number."""
    outcome: str
    """Why the search ended, or why the rounds were not joined. The text has no capital letter and no full stop."""
    used: tuple[int, ...] = ()
    """Indices of the rounds that were joined. Empty if they were not joined."""


def join_rounds(layer: Layer, rounds: Mapping[int, ClientUpdate], task: Task) -> Joined:
    """Invert one layer over several rounds, and judge what was found.

    Args:
        layer: the layer. Its inputs must be the same function of the samples in all rounds.
        rounds: the rounds by their index, oldest first.
        task: what the caller asks for, with the budget for this layer.
    """
    used, updates = list(rounds), list(rounds.values())
    tensors, (next_gradient, next_weight) = joined_tensors(layer, updates), _next_layer(layer, updates)
    shown = replace(layer, name=f"{layer.name} ({len(updates)} rounds)")
    deadline = Budget.of(task.budget).deadline
    tell = None if task.progress is None else partial(task.progress, shown)

    def solve(search: Search | None, following: list[Following] | None, share: float) -> Inversion:
        return invert(
            *tensors,
            next_grad_weight=next_gradient,
            next_weight=next_weight,
            following=following,
            search=search,
            generator=task.generator,
            dropout=layer.dropout,
            one_step=all(each.one_gradient for each in updates),
            rounds=len(updates),
            seconds=max(0.1, share * (deadline - time.monotonic())),
            progress=tell,
        )

    try:
        following = _rests(layer, updates, task)
        if layer.equations and following is None:
            return not_joined("the rest of the network could not be computed in every round")
        alone = layer.equations or following is None
        found = solve(task.search, following if layer.equations else None, 1.0 if alone else FIRST_SEARCH_TIME_SHARE)
        if following is not None and not layer.equations and task.search is None and found.missing:
            more = solve(None, following, 1.0)
            found = more if int(more.certified.sum()) > int(found.certified.sum()) else found
    except SpearError as error:
        return not_joined(str(error))
    if found.factors is None or not bool(found.certified.any() or found.fits.any()):
        return not_joined(found.stats.stopped, found.batch_size)
    present = contributions(found, len(updates))
    audited = _judge(layer, found, present, updates, task)
    by_network = found.evidence is not None and found.evidence.scope is Scope.NETWORK
    known_from = _known_from(layer, found, audited, present, updates, following if by_network else None)
    takes_part = [{used[column] for column in torch.nonzero(row)[:, 0].tolist()} for row in present]
    first_known = [used[count - 1] for count in known_from]
    return Joined(audited, takes_part, first_known, found.batch_size, found.stats.stopped)


def joined_tensors(layer: Layer, updates: Sequence[ClientUpdate]) -> LayerTensors:
    """Return gradients and weights of a layer in all rounds, one below the other."""
    gradients = torch.cat([each.gradients[layer.weight] for each in updates])
    weights = torch.cat([each.weights[layer.weight] for each in updates])
    if layer.bias is None:
        return gradients, None, weights, None
    bias_gradients = torch.cat([each.gradients[layer.bias] for each in updates])
    return gradients, bias_gradients, weights, torch.cat([each.weights[layer.bias] for each in updates])


def _next_layer(layer: Layer, updates: Sequence[ClientUpdate]) -> tuple[Tensor | None, Tensor | None]:
    """Return gradients and weights of the next Linear layer in all rounds, side by side; None if there is none."""
    name = layer.next
    if name is None:
        return None, None
    gradients = torch.cat([each.gradients[name] for each in updates], 1)
    return gradients, torch.cat([each.weights[name] for each in updates], 1)


def _rests(layer: Layer, updates: Sequence[ClientUpdate], task: Task) -> list[Following] | None:
    """Return the rest of the network in every round; None if it is not known, or has no known loss.

    The signals of different rounds can only be compared if all gradients have the scale of the same loss.
    """
    scaled = all(each.kind == "gradients" or each.lr is not None for each in updates)
    if task.model is None or not scaled:
        return None
    try:
        following = [Following.of_model(as_sent(task.model, each), each, layer, task.loss) for each in updates]
    except OptionError:
        return None
    return following if all(each.loss is not None for each in following) else None


def not_joined(outcome: str, samples: int | None = None) -> Joined:
    """Return a result without inputs. ``outcome`` says why there are none."""
    return Joined(None, [], [], samples, outcome)


def contributions(found: Inversion, rounds: int) -> Bool[Tensor, "k T"]:
    """Return to which rounds each input contributes: those in which its signal L_t q exceeds the noise."""
    present = torch.ones(len(found.inputs), rounds, dtype=torch.bool)
    if found.factors is None or not len(found.directions):
        return present
    factors, directions = found.factors, found.directions.to(found.factors.left)
    signals = (directions @ factors.left.T).reshape(len(directions), rounds, -1)
    strength = torch.linalg.vector_norm(signals, dim=2)
    spread = torch.linalg.vector_norm(directions / factors.singular_values, dim=1, keepdim=True)
    noise = torch.linalg.vector_norm(factors.row_noise.reshape(rounds, -1), dim=1) * spread
    least = torch.maximum(SIGMAS * noise, MIN_CONTRIBUTION * strength.amax(1, keepdim=True))
    present[: len(directions)] = (strength > least).cpu()
    return present


def _judge(
    layer: Layer, found: Inversion, present: Bool[Tensor, "k T"], updates: Sequence[ClientUpdate], task: Task
) -> LayerAudit:
    """Judge every input in each round to which it contributes.

    If the joined rounds certify an input, its strongest claim counts. An input that they do not certify counts only if
    each of at least two rounds proves it, and its weakest claim counts.
    """
    nowhere = Claim.nothing("fewer than two rounds say anything about the input")
    collected: list[list[Claim]] = [[] for _ in range(len(found.inputs))]
    labels = torch.full((len(found.inputs),), -1)
    for index, update in enumerate(updates):
        takes_part = present[: len(found.directions), index]
        wrong = ~found.fits[: len(found.directions)].cpu()  # their errors may be in all other inputs
        rows = torch.nonzero(takes_part | wrong)[:, 0]
        missing = found.batch_size - len(found.inputs)
        own = replace(_in_round(found, rows, index, len(updates)), batch_size=int(takes_part.sum()) + missing)
        part = LayerAudit(layer, layer.reason, own)
        judged = judge_in_round(part, update, task)
        for row, claim in zip(rows.tolist(), judged.claims, strict=False):
            if bool(takes_part[row]):
                collected[row].append(claim)
        if judged.labels is not None:
            named = judged.labels.cpu() >= 0
            labels[rows[named]] = judged.labels.cpu()[named]
    joined = torch.zeros(len(found.inputs)).bool() if found.evidence is None else found.evidence.consistent.cpu()
    claims = [
        min(each, key=strength) if consistent and each else max(each, key=strength) if len(each) > 1 else nowhere
        for each, consistent in zip(collected, joined.tolist(), strict=True)
    ]
    known = labels if bool((labels >= 0).any()) else None
    return LayerAudit(layer, f"{layer.reason}; {found.stats.stopped}", found, known, tuple(claims))


def _in_round(found: Inversion, rows: Tensor, index: int, rounds: int) -> Inversion:
    """Return the part of an inversion of joined rounds that belongs to one round."""
    factors = found.factors
    if factors is None:
        raise ValueError("the inversion has no factors")
    own = slice(index * len(factors.left) // rounds, (index + 1) * len(factors.left) // rounds)
    rows = rows.to(found.inputs.device)
    directions = found.directions[rows]
    size = torch.linalg.vector_norm(directions.to(factors.left) @ factors.left[own].T, dim=1, keepdim=True)
    return replace(
        found,
        inputs=found.inputs[rows],
        certified=found.certified[rows],
        directions=directions / size.clamp_min(torch.finfo(size.dtype).tiny).to(directions),
        evidence=None if found.evidence is None else select_rows(found.evidence, rows),
        zeros=found.zeros[rows],
        fits=found.fits[rows],
        factors=replace(
            factors,
            left=factors.left[own],
            row_noise=factors.row_noise[own],
            live=factors.live[own],
            row_norms=factors.row_norms[own],
        ),
    )


def _known_from(
    layer: Layer,
    found: Inversion,
    audited: LayerAudit,
    present: Bool[Tensor, "k T"],
    updates: Sequence[ClientUpdate],
    following: list[Following] | None,
) -> list[int]:
    """Return for each input how many rounds, from the oldest on, prove it.

    The certificate is computed for the rounds so far, with the recovered inputs instead of a search.
    """
    known = [len(updates)] * len(found.inputs)
    labels = torch.zeros(len(found.inputs), dtype=torch.long) if audited.labels is None else audited.labels
    for count in range(len(updates) - 1, 0, -1):
        rows = torch.nonzero(present[:, :count].any(1))[:, 0].to(found.inputs.device)
        if not len(rows):
            break
        suggested = Suggested(found.inputs[rows], labels.to(rows.device)[rows].clamp_min(0))
        try:
            earlier = invert(
                *joined_tensors(layer, updates[:count]),
                following=None if following is None else following[:count],
                search=suggested,
                dropout=layer.dropout,
                one_step=all(each.one_gradient for each in updates),
                rounds=count,
            )
        except SpearError:  # the rounds so far do not show a clear rank
            break
        proved = same_inputs(found.inputs, earlier.inputs[earlier.certified]).any(1)
        if not bool(proved.any()):
            break
        for row in torch.nonzero(proved)[:, 0].tolist():
            known[row] = count
    return known


def same_inputs(first: Float[Tensor, "k n"], second: Float[Tensor, "j n"]) -> Bool[Tensor, "k j"]:
    """Return which pairs of inputs are the same sample."""
    if not len(first) or not len(second):
        return torch.zeros(len(first), len(second), dtype=torch.bool)
    distances = torch.cdist(first.double(), second.double().to(first.device))
    return (distances <= SAME_SAMPLE_DISTANCE * torch.linalg.vector_norm(first.double(), dim=1, keepdim=True)).cpu()


def strength(claim: Claim) -> tuple[int, float]:
    """Return what claims about one input are ordered by, the strongest first, and then the one with less error."""
    return list(ClaimKind).index(claim.kind), claim.error


def unite(layer: Layer, alone: list[AuditResult | None], joined: Joined) -> Joined:
    """Add the inputs that only a single round gave to those of the joined rounds, without repetitions.

    Args:
        layer: the layer.
        alone: the audit of every round alone, None where it was not audited alone.
        joined: what the joined rounds gave.
    """
    for index, result in enumerate(alone):
        single = None if result is None else of_layer(result, layer)
        if single is not None and single.inversion is not None and bool(single.is_recovered.any()):
            joined = _added(joined, single, single.inversion, index)
    return joined


def _added(joined: Joined, single: LayerAudit, found: Inversion, index: int) -> Joined:
    """Add the recovered inputs of one round.

    If the round has a stronger claim about a sample, both its claim and its input replace the earlier ones, because the
    claim states the error of this input.
    """
    before = joined.audited
    if before is None or before.inversion is None:
        rows = len(found.inputs)
        return replace(joined, audited=single, present=[{index} for _ in range(rows)], known_from=[index] * rows)
    base, claims = before.inversion, list(before.claims)
    present, known = [set(each) for each in joined.present], list(joined.known_from)
    labels = [-1] * len(claims) if before.labels is None else before.labels.tolist()
    same = same_inputs(found.inputs, base.inputs)
    inputs, exact = base.inputs.clone(), base.certified.clone()
    new, replaced = [], False
    for row in torch.nonzero(single.is_recovered)[:, 0].tolist():
        matches = torch.nonzero(same[row])[:, 0].tolist()
        for match in matches[:1]:
            present[match].add(index)
            known[match] = min(known[match], index)
            if strength(single.claims[row]) < strength(claims[match]):
                claims[match], replaced = single.claims[row], True
                inputs[match], exact[match] = found.inputs[row].to(inputs), claims[match].certified
                labels[match] = labels[match] if single.labels is None else int(single.labels[row])
        if not matches:
            new.append(row)
    chosen = torch.tensor(new, dtype=torch.long, device=found.inputs.device)
    certified = torch.tensor([single.claims[row].certified for row in new], dtype=torch.bool, device=chosen.device)
    inputs = torch.cat([inputs, found.inputs[chosen].to(inputs)])
    inversion = replace(
        base,
        inputs=inputs,
        certified=torch.cat([exact, certified]),
        fits=torch.cat([base.fits, torch.ones_like(certified)]),
        batch_size=max(base.batch_size, found.batch_size, len(inputs)),
        evidence=None if new or replaced else base.evidence,
    )
    labels += [-1 if single.labels is None else int(single.labels[row]) for row in new]
    audited = replace(
        before,
        inversion=inversion,
        claims=(*claims, *(single.claims[row] for row in new)),
        labels=torch.tensor(labels) if max(labels, default=-1) >= 0 else None,
    )
    present += [{index} for _ in new]
    return replace(joined, audited=audited, present=present, known_from=[*known, *([index] * len(new))])


def of_layer(result: AuditResult, layer: Layer) -> LayerAudit | None:
    """Return the part of an audit that belongs to a layer, or None."""
    return next((each for each in result.layers if each.layer.name == layer.name), None)
