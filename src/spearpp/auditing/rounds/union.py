"""Combine the inputs that single rounds and joined rounds gave, without repetitions."""

from dataclasses import replace

import torch

from spearpp.auditing.result import AuditResult, LayerAudit
from spearpp.auditing.rounds.joined import Joined, same_inputs, strength
from spearpp.inversion.result import Inversion
from spearpp.model import Layer


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

    An input and its claim belong together: the claim states the error of this input. If the round has a stronger claim
    about a sample, its input therefore replaces the one that was there.
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
