"""What a decision needs: severity, one sentence of risk, one of action, and which checks passed.

Accepted leaks of ``spearpp.toml`` change the action and the checks. They never change the severity, and every one of
them is listed with its reason.
"""

import datetime
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from spearpp.config import LEAK_KINDS, Acceptance, Config
from spearpp.inversion.loop import OUT_OF_TIME
from spearpp.report.leaks import Leak, leaks

Severity = Literal["critical", "high", "medium", "low", "unknown"]
STATUSES = ("accepted", "expired", "exceeded")
"""States of a leak that an acceptance names. If several do, the first of these states counts."""
CHECK_NAMES = {
    "inputs": "Recovered inputs of the model",
    "features": "Recovered features of an inner layer",
    "unproved": "Computed inputs that fit the update without proof",
    "vocabulary": "Revealed vocabulary",
}
"""What is checked for each kind of leak. A name is a noun, so that it reads well after both "pass" and "fail"."""
NOUNS = {"inputs": "inputs", "features": "samples' features", "unproved": "unproved inputs", "vocabulary": "rows"}
RISKS = {
    "critical": "Everyone who can read this update can compute training data of this client, without guessing.",
    "inputs": "Everyone who can read this update can compute recognisable versions of this client's training samples.",
    "features": "Everyone who can read this update can compute what the model knows about this client's samples.",
    "vocabulary": "Everyone who can read this update can see which words, categories or items this client has.",
    "unproved": "Inputs that were computed from this update may be training samples of this client.",
    "low": "No leak was found within the time limit, which does not prove that there is none.",
    "interrupted": "The audit was interrupted before it found anything, so the risk is unknown.",
    "unknown": "The audit could not test this update, so its risk is unknown.",
}
PROTECT = (
    "Stop sending updates like this one until they contain calibrated noise, or until the server sees only sums of so "
    "many clients that a sum has more samples than any Linear layer has neurons."
)
ACTIONS = {
    "critical": PROTECT,
    "inputs": PROTECT,
    "features": "Decide whether features are personal data here, and add noise or send only sums with many samples.",
    "vocabulary": "Freeze the embedding, or add noise to all of its rows, before more clients send updates.",
    "unproved": "Treat these inputs as a likely leak until you know more.",
    "low": "Audit more clients and rounds before you rely on this result.",
    "interrupted": "Audit this update again, and let the audit end.",
    "unknown": "Read why no layer could be tested. If the model and the files are right, test other attacks too.",
}
"""A sentence for each severity without a leak, an interrupted audit, certified inputs, and each kind of leak."""
LARGER_BUDGET = "The time limit ended the search, so audit again with a larger budget."
"""Further action if nothing was certified and a search ran out of time."""


def decide(
    content: Mapping[str, Any],
    config: Config | None = None,
    fail_on: str = "never",
    today: datetime.date | None = None,
) -> dict[str, Any]:
    """Return the fields ``severity``, ``risk``, ``action``, ``leaks``, ``checks`` and ``gate`` of ``report.json``.

    ``content`` is that of ``report.json``, at least with the fields of ``AuditResult.to_dict``. Acceptances must hold
    today, by default today in UTC.
    """
    config = config or Config()
    hashes = {str(each["sha256"]) for each in content.get("files") or []}
    found = leaks(content)
    judged = judge(found, config, hashes, today)
    severity, cause = _severity(content, found)
    checks = [_check(kind, content, judged, config.thresholds.get(kind, 0)) for kind in LEAK_KINDS]
    used = {each["id"] for each in judged}
    gate: dict[str, Any] = {
        "fail_on": fail_on,
        "passed": None,
        "config": config.path,
        "thresholds": dict(config.thresholds),
        "unused": [each.leak for each in config.accepted if each.leak not in used],
    }
    if fail_on != "never":
        gate["passed"] = not refused(judged, gate)
    return {
        "severity": severity,
        "risk": RISKS[cause],
        "action": _action(cause, judged, content),
        "leaks": judged,
        "checks": [*checks, _completeness(content)],
        "gate": gate,
    }


def judge(
    found: Sequence[Leak], config: Config, hashes: Collection[str], today: datetime.date | None = None
) -> list[dict[str, Any]]:
    """Return the entries of leaks in ``report.json``: each leak, whether it is accepted, and by which acceptance.

    ``hashes`` are the SHA-256 hashes of the audited files. Acceptances must hold today, by default today in UTC.
    """
    today = today or datetime.datetime.now(datetime.UTC).date()
    entries = []
    for leak in found:
        named = [each for each in config.accepted if each.leak == leak.id and each.sha256 in {None, *hashes}]
        states = [(_status(leak, each, today), each) for each in named]
        status, acceptance = min(states, key=lambda pair: STATUSES.index(pair[0]), default=("open", None))
        known = None if acceptance is None else {**asdict(acceptance), "expires": acceptance.expires.isoformat()}
        entries.append({"id": leak.id, **asdict(leak), "status": status, "acceptance": known})
    return entries


def refused(judged: Sequence[Mapping[str, Any]], gate: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the leaks that fail a gate: not accepted, above their threshold, and counted by the gate.

    The arguments are the fields ``leaks`` and ``gate`` of a decision. Kinds of leaks without a threshold have the
    threshold 0. If ``fail_on`` is ``certified``, unproved inputs do not count. Every leak counts for ``leak``, and also
    for ``never`` and for an empty gate: the result is then what ``leak`` would refuse.
    """
    return [each for each in judged if _why_passed(each, gate) is None]


def _why_passed(leak: Mapping[str, Any], gate: Mapping[str, Any]) -> str | None:
    """Return why a leak does not fail a gate, or None if it does."""
    if leak["status"] == "accepted":
        return describe(leak)
    if gate.get("fail_on") == "certified" and leak["kind"] == "unproved":
        return f"{describe(leak)}, not counted by --fail-on certified"
    limit = _threshold(leak, gate)
    return f"{describe(leak)}, within the threshold of {limit:,}" if leak["count"] <= limit else None


def _threshold(leak: Mapping[str, Any], gate: Mapping[str, Any]) -> int:
    return int(gate.get("thresholds", {}).get(leak["kind"], 0))


def passed(judged: Sequence[Mapping[str, Any]], gate: Mapping[str, Any]) -> list[str]:
    """Return one text for each leak that does not fail a gate: the leak, and why it passes. See ``refused``."""
    return [why for each in judged if (why := _why_passed(each, gate)) is not None]


def why_refused(judged: Sequence[Mapping[str, Any]], gate: Mapping[str, Any]) -> str:
    """Return which leaks fail a gate, and which threshold applied, or an empty string if the gate passes.

    >>> leak = {"id": "inputs/0", "kind": "inputs", "count": 3, "total": 8, "where": "0", "status": "open"}
    >>> why_refused([{**leak, "acceptance": None}], {"thresholds": {"inputs": 2}, "fail_on": "leak"})
    'inputs/0 has 3, the threshold is 2'
    """
    return "; ".join(
        f"{each['id']} has {each['count']:,}, the threshold is {_threshold(each, gate):,}"
        for each in refused(judged, gate)
    )


def _status(leak: Leak, acceptance: Acceptance, today: datetime.date) -> str:
    if today > acceptance.expires:
        return "expired"
    return "accepted" if leak.count <= acceptance.most else "exceeded"


def _severity(content: Mapping[str, Any], found: Sequence[Leak]) -> tuple[Severity, str]:
    """Return the severity, and its cause: a kind of leak, an interrupted audit, or the severity itself."""
    if any(each.kind == "inputs" and each.exact for each in found):
        return "critical", "critical"
    for kind in ("inputs", "features", "vocabulary"):
        if any(each.kind == kind for each in found):
            return "high", kind
    if found:
        return "medium", "unproved"
    if content["interrupted"]:
        return "unknown", "interrupted"
    return ("low", "low") if content["verdict"] == "NOT_FOUND" else ("unknown", "unknown")


def _action(cause: str, judged: Sequence[Mapping[str, Any]], content: Mapping[str, Any]) -> str:
    if judged and all(each["status"] == "accepted" for each in judged):
        until = min(each["acceptance"]["expires"] for each in judged)
        return f"Every leak is accepted until {until}. Remove its cause or renew the acceptance before that day."
    more = cause in ("unproved", "low") and _out_of_time(content)
    return f"{ACTIONS[cause]} {LARGER_BUDGET}" if more else ACTIONS[cause]


def named(leak: Mapping[str, Any]) -> str:
    """Name an entry of the field ``leaks`` in words and by its identifier: "inputs of layer 0 (inputs/0)"."""
    return f"{NOUNS[leak['kind']]} of {_place(leak)} ({leak['id']})"


def _place(leak: Mapping[str, Any]) -> str:
    return f"{'embedding' if leak['kind'] == 'vocabulary' else 'layer'} {leak['where']}"


def describe(leak: Mapping[str, Any]) -> str:
    """Describe an entry of the field ``leaks`` in words.

    >>> describe({"kind": "inputs", "where": "0", "count": 3, "total": 8, "status": "open", "acceptance": None})
    '3 of 8 inputs (layer 0)'
    """
    share = f"{leak['count']:,}" + ("" if leak["total"] is None else f" of {leak['total']:,}")
    text = f"{share} {NOUNS[leak['kind']]} ({_place(leak)})"
    known = leak["acceptance"]
    if known is None:
        return text
    if leak["status"] == "accepted":
        return f"{text}, accepted until {known['expires']}: {known['reason']}"
    if leak["status"] == "expired":
        return f"{text}, no longer accepted, because the acceptance expired on {known['expires']}: {known['reason']}"
    return f"{text}, not accepted, because the acceptance covers at most {known['most']:,}: {known['reason']}"


def _check(kind: str, content: Mapping[str, Any], judged: Sequence[Mapping[str, Any]], limit: int) -> dict[str, str]:
    own = [each for each in judged if each["kind"] == kind]
    text = "; ".join(describe(each) for each in own)
    open_leaks = [each for each in own if each["status"] != "accepted"]
    if own and not open_leaks:
        outcome = "accepted"
    elif any(each["count"] > limit for each in open_leaks):
        outcome = "fail"
    elif own:
        outcome, text = "pass", f"{text}; the threshold is {limit:,}"
    else:
        outcome, text = _nothing_found(kind, content)
    return {"name": CHECK_NAMES[kind], "outcome": outcome, "text": text}


def _nothing_found(kind: str, content: Mapping[str, Any]) -> tuple[str, str]:
    """Return the outcome of a check for leaks if there are none: passed, or not checked and why."""
    tables = len(content.get("vocabulary") or [])
    if kind == "vocabulary" and tables:
        return "pass", f"none in {tables} embedding tables"
    if kind == "vocabulary":
        return "not checked", "no embedding table is known"
    if kind == "features" and content["best_layer"] is not None:
        return "not checked", "the features follow from the recovered inputs"
    searched = [each for each in content["layers"] if each["inversion"] is not None]
    if any(kind != "inputs" or each["sees"] != "features" for each in searched):
        return "pass", "none"
    where = "the model's inputs" if kind == "inputs" else "a sample"
    return "not checked", f"no layer that receives {where} could be searched"


def count_checks(checks: Sequence[Mapping[str, Any]]) -> str:
    """Return how many checks had each outcome, the most serious outcome first.

    >>> count_checks([{"outcome": "pass"}, {"outcome": "fail"}, {"outcome": "pass"}])
    '1 failed, 2 passed'
    """
    outcomes = [each["outcome"] for each in checks]
    words = {"fail": "failed", "accepted": "accepted", "not checked": "not checked", "pass": "passed"}
    return ", ".join(f"{outcomes.count(each)} {word}" for each, word in words.items() if each in outcomes)


def _out_of_time(content: Mapping[str, Any]) -> bool:
    """Return whether the time budget ended a search, or left a layer or a union of rounds untried."""
    outcomes = [each["outcome"] for each in content["layers"]]
    outcomes.append((content.get("history") or {}).get("outcome") or "")
    return any(OUT_OF_TIME in each for each in outcomes)


def _completeness(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the check whether the audit tested everything that it can test, without an end by time or Ctrl-C."""
    layers = content["layers"]
    searched = sum(each["inversion"] is not None for each in layers)
    ended = ["interrupted"] if content["interrupted"] else []
    ended += [OUT_OF_TIME] if _out_of_time(content) else []
    text = "; ".join([*ended, f"{searched} of {len(layers)} Linear layers were searched"])
    if not ended and searched < len(layers):
        text += ", and the table of layers says why the others were not"
    return {"name": "Completeness of the audit", "outcome": "fail" if ended else "pass", "text": text}
