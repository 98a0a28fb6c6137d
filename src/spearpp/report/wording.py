"""An audit in the words of somebody who does not know the method."""

from collections.abc import Mapping
from typing import Any

from spearpp.audit import AuditResult, Verdict

SEES = {"inputs": "the model's inputs", "features": "features of an earlier layer"}


def sees(what: str) -> str:
    """What a layer is fed, in words."""
    return SEES.get(what, what)


def headline(result: AuditResult) -> str:
    """The verdict for a manager, in a sentence."""
    best = result.best
    if best is None:
        if result.verdict is Verdict.NOT_FOUND:
            return "No training data was recovered from this update with the time it was given."
        return "This audit does not apply to this update."
    count, of = len(result.inputs), best.batch_size
    how = "exactly" if best.recovered == count else "recognisably, up to noise"
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
    if result.verdict is Verdict.NOT_FOUND:
        return (
            "That is no proof of safety: a longer search, another attack, or another round may find what this one did "
            "not. The audit only ever proves that data leaks, never that it does not."
        )
    return "No layer could be inverted; the table below says why for each. Other attacks may still work."


def evidence(sample: Mapping[str, Any], scale_known: bool) -> tuple[str, str]:
    """Whether an input is certified, "close" or neither, and why, in words."""
    size = "" if scale_known else " Its brightness is unknown, since the layer has no bias."
    error = sample.get("error")
    if sample["certified"]:
        known = f" What noise leaves unknown of it is {error:.0e} of its size." if error is not None else ""
        return (
            "certified",
            f"In the batch, and exact: the odds of such agreement by chance are {_odds(sample)}.{known}{size}",
        )
    if sample["consistent"]:
        known = f"up to {error:.1%} of its size" if error is not None else "up to noise"
        return "close", f"In the batch, {known}: the odds of such agreement by chance are {_odds(sample)}.{size}"
    return (
        "approximate",
        f"Not certified by itself; it is shown because the whole update follows from all of these.{size}",
    )


def _odds(sample: Mapping[str, Any]) -> str:
    chance = sample.get("chance")
    if chance is None or chance < 1e-30:
        return "below 1 in 10^30"
    return f"below {chance:.0e}"


def number(value: Any) -> str:
    """A number as people read it."""
    if value is None:
        return "not known"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
