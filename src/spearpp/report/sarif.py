"""A verdict as SARIF 2.1.0, for gates that scan code."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

RULE, UNPROVED = "spearpp/recoverable-training-data", "spearpp/unproved-inputs"


def sarif(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of ``report.json`` as a SARIF log.

    It has an error where training data was recovered, a warning where inputs fit the gradient without being proved to
    be samples, and no result where neither is so.
    """
    source = content.get("source") or ["update"]
    names = ("batch_size", "recovered", "approximate", "fitting", "best_layer")
    results = []
    if content["verdict"] == "LEAKS" or content["fitting"]:
        leaks = content["verdict"] == "LEAKS"
        results.append(
            {
                "ruleId": RULE if leaks else UNPROVED,
                "level": "error" if leaks else "warning",
                "message": {"text": content["summary"]},
                "locations": [{"physicalLocation": {"artifactLocation": {"uri": _uri(str(source[-1]))}}}],
                "properties": {name: content[name] for name in names},
            }
        )
    levels = {"error": "error", "warning": "warning", "note": "note"}
    notices = [
        {"level": levels[each["level"]], "message": {"text": f"{each['about']}: {each['message']}"}}
        for each in content["findings"]
    ]
    driver = {
        "name": "spearpp",
        "version": str(content.get("versions", {}).get("spearpp", "")),
        "rules": [
            {
                "id": RULE,
                "shortDescription": {"text": "A client's update gives its training data away"},
                "fullDescription": {
                    "text": "Training inputs can be computed from this update and the weights of its round."
                },
                "defaultConfiguration": {"level": "error"},
                "help": {
                    "text": "Add noise (DP-SGD), or sum the updates of more clients, before the server sees them."
                },
            },
            {
                "id": UNPROVED,
                "shortDescription": {"text": "Inputs fit a client's update, but are not proved to be training data"},
                "fullDescription": {
                    "text": "Inputs were computed that fit this update. They may be training samples, or means of them."
                },
                "defaultConfiguration": {"level": "warning"},
                "help": {
                    "text": "Look at the report: it says why they are not certified. Treat them as a likely leak."
                },
            },
        ],
    }
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": driver},
                "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": notices}],
                "results": results,
                "properties": {"verdict": content["verdict"], "caveats": content["caveats"]},
            }
        ],
    }


def _uri(path: str) -> str:
    return quote(path.replace("\\", "/"))
