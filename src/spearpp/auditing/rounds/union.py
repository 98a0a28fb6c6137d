"""Combine the inputs that single rounds and joined rounds gave, without repetitions."""

from dataclasses import dataclass, replace

import torch

from spearpp.auditing.result import AuditResult, LayerAudit
from spearpp.auditing.rounds.joined import Joined, same_inputs, strongest
from spearpp.inversion.result import Inversion
from spearpp.model import Layer


@dataclass(frozen=True, eq=False)
class Union:
    """All inputs of one layer that single rounds or the joined rounds gave, without repetitions."""

    audited: LayerAudit
    present: list[set[int]]
    """For each input, the rounds to which it contributes."""
    known_from: list[int]
    """For each input, the first round after which the rounds so far prove it."""


def unite(layer: Layer, alone: list[AuditResult | None], joined: Joined) -> Union | None:
    """Combine the inputs of the joined rounds with those that only a single round gave.

    Args:
        layer: the layer.
        alone: the audit of every round alone, None where it was not audited alone.
        joined: what the joined rounds gave.
    """
    union = None
    if joined.audited is not None:
        used = joined.used
        present = [{used[column] for column in torch.nonzero(row)[:, 0].tolist()} for row in joined.present]
        union = Union(joined.audited, present, [used[count - 1] for count in joined.known_from])
    for index, result in enumerate(alone):
        single = None if result is None else of_layer(result, layer)
        if single is not None and single.inversion is not None and bool(single.is_recovered.any()):
            union = _added(union, single, single.inversion, index)
    return union


def _added(union: Union | None, single: LayerAudit, found: Inversion, index: int) -> Union:
    """Add the recovered inputs of one round.

    An input and its claim belong together: the claim states the error of this input. If the round has a stronger claim
    about a sample, its input therefore replaces the one that was there.
    """
    if union is None or union.audited.inversion is None:
        rows = len(found.inputs)
        return Union(single, [{index} for _ in range(rows)], [index] * rows)
    base, claims = union.audited.inversion, list(union.audited.claims)
    present, known = [set(each) for each in union.present], list(union.known_from)
    labels = [-1] * len(claims) if union.audited.labels is None else union.audited.labels.tolist()
    same = same_inputs(found.inputs, base.inputs)
    inputs, exact = base.inputs.clone(), base.certified.clone()
    new, replaced = [], False
    for row in torch.nonzero(single.is_recovered)[:, 0].tolist():
        matches = torch.nonzero(same[row])[:, 0].tolist()
        for match in matches[:1]:
            present[match].add(index)
            known[match] = min(known[match], index)
            if strongest([claims[match], single.claims[row]]) is not claims[match]:
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
        union.audited,
        inversion=inversion,
        claims=(*claims, *(single.claims[row] for row in new)),
        labels=torch.tensor(labels) if max(labels, default=-1) >= 0 else None,
    )
    return Union(audited, [*present, *({index} for _ in new)], [*known, *([index] * len(new))])


def of_layer(result: AuditResult, layer: Layer) -> LayerAudit | None:
    """Return the part of an audit that belongs to a layer, or None."""
    return next((each for each in result.layers if each.layer.name == layer.name), None)
