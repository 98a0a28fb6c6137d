"""Sentences of the report for readers who do not know the method."""

from collections.abc import Mapping
from typing import Any

from spearpp.auditing import AuditResult, ClaimKind, Verdict
from spearpp.auditing.wording import how_exactly
from spearpp.model import Sees

LAYER_INPUTS = {
    "inputs": "the model's inputs",
    "features": "features of an earlier layer",
    "inputs from features": "features, from which the model's inputs were computed",
}
"""What a layer receives, in words."""

LABELS = {
    "entangled": "mixing",
    "hidden": "active without gradient",
    "allowed": "expected by noise",
    "moved": "moved by training",
}
"""Labels of numbers of the evidence whose names in ``report.json`` do not say what they are."""


def headline(result: AuditResult) -> str:
    """Return the verdict as one sentence for a manager."""
    best = result.best
    if best is None and result.verdict is Verdict.LEAKS:
        count = sum(each.count for each in result.vocabulary if each.leaks)
        return f"This update leaks the vocabulary of this client: {count:,} tokens, categories or items."
    if best is None:
        if result.fitting == 1:
            return "One computed input fits this update. It may be a training sample or the mean of several."
        if result.fitting:
            return f"{result.fitting} computed inputs fit this update. They may be training samples or means of them."
        if result.verdict is Verdict.NOT_FOUND:
            return "The audit recovered no training data from this update within its time limit."
        return "This audit cannot be applied to this update."
    recovered, total = len(result.inputs), best.batch_size
    if best.layer.sees == "features":
        what = f"the inner features of {recovered} of {total} {best.layer.noun}"
    else:
        what = f"{recovered} of {total} training {best.layer.noun}"
    through = ", computed from features of an inner layer" if best.layer.sees == Sees.INPUTS_FROM_FEATURES else ""
    return f"This update leaks training data: {what} were recovered {how_exactly(best)}{through}."


STATES = {
    ClaimKind.ONE: ("certified", "one sample"),
    ClaimKind.ONE_OR_MEAN: ("certified", "one sample or a mean"),
    ClaimKind.APPROXIMATE: ("close", "approximate"),
    ClaimKind.SEVERAL: ("approximate", "several samples"),
    ClaimKind.FITS: ("approximate", "fits, not certified"),
    ClaimKind.NONE: ("approximate", "nothing claimed"),
}
"""CSS class and label for each kind of claim."""


def evidence(sample: Mapping[str, Any], scale_known: bool) -> tuple[str, str, str]:
    """Return the CSS class, the label and the explanation of the claim about an input, from ``report.json``.

    The scale of the input is unknown for a layer without a bias.
    """
    style, label = STATES[ClaimKind(sample["claim"])]
    error = "" if sample["error"] is None else f" Stated error: {sample['error']:.0e}."
    scale = "" if scale_known else " The scale of the input is unknown, because the layer has no bias."
    why = str(sample["why"])
    return style, label, f"{why[:1].upper()}{why[1:]}.{error}{scale}"


def number(value: Any) -> str:
    """Format a value for people.

    >>> number(12345), number(0.123456), number(None), number(True)
    ('12,345', '0.1235', 'not known', 'yes')
    """
    if value is None:
        return "not known"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
