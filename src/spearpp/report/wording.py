"""An audit in the words of somebody who does not know the method."""

from collections.abc import Mapping
from typing import Any

from spearpp.auditing import AuditResult, Kind, Verdict

SEES = {"inputs": "the model's inputs", "features": "features of an earlier layer"}


def sees(what: str) -> str:
    """What a layer is fed, in words."""
    return SEES.get(what, what)


def headline(result: AuditResult) -> str:
    """The verdict for a manager, in a sentence."""
    best = result.best
    if best is None:
        if result.fitting:
            if result.fitting == 1:
                return "An input was computed that fits this update. It may be training data, or a mean of it."
            count = result.fitting
            return f"{count} inputs were computed that fit this update. They may be training data, or means of it."
        if result.verdict is Verdict.NOT_FOUND:
            return "No training data was recovered from this update with the time it was given."
        return "This audit does not apply to this update."
    count, of = len(result.inputs), best.batch_size
    how = "exactly" if best.recovered == count else "recognisably, up to a stated error"
    if best.layer.sees == "features":
        return (
            f"This update gives training data away: the inner features of {count} of {of} samples were recovered {how}."
        )
    return f"This update gives training data away: {count} of {of} training samples were recovered {how}."


def meaning(result: AuditResult) -> str:
    """What that means, in a sentence or two."""
    if result.best is not None and result.best.layer.sees == "features":
        return (
            "Whoever can see this update and the weights the client had been sent can compute what the model's inner "
            "layer knew of each sample: not the data itself, but all that the layers behind it need to recognise it."
        )
    if result.verdict is Verdict.LEAKS:
        return (
            "Whoever can see this update and the weights the client had been sent can compute the data it was trained "
            "on. No guess is involved, and no access to the client."
        )
    if result.fitting:
        return (
            f"Not certified: {result.why_not_certified}. Treat this as a likely leak until you know better; a gate "
            "with --fail-on leak stops this update."
        )
    if result.verdict is Verdict.NOT_FOUND:
        return (
            "That is no proof of safety: a longer search, another attack, or another round may find what this one did "
            "not. The audit only ever proves that data leaks, never that it does not."
        )
    return "No layer could be inverted; the table below says why for each. Other attacks may still work."


STATES = {
    Kind.ONE: ("certified", "one sample"),
    Kind.ONE_OR_MEAN: ("certified", "one or a mean"),
    Kind.APPROXIMATE: ("close", "approximate"),
    Kind.SEVERAL: ("approximate", "several samples"),
    Kind.FITS: ("approximate", "fits, not certified"),
    Kind.NONE: ("approximate", "nothing claimed"),
}
"""The style and the words for each kind of claim."""


def evidence(sample: Mapping[str, Any], scale_known: bool) -> tuple[str, str, str]:
    """What is claimed of an input: its style, a few words, and a sentence."""
    size = "" if scale_known else " Its brightness is unknown, since the layer has no bias."
    style, words = STATES[Kind(sample["claim"])]
    error = "" if sample["error"] is None else f" Largest relative error: {sample['error']:.0e}."
    why = str(sample["why"])
    return style, words, f"{why[:1].upper()}{why[1:]}.{error}{size}"


def number(value: Any) -> str:
    """A number as people read it."""
    if value is None:
        return "not known"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
