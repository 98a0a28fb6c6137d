"""A verdict as SARIF 2.1.0, for gates that scan code."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

RULE = "spearpp/recoverable-training-data"


def sarif(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of ``report.json`` as a SARIF log: one result where training data came back, none where not."""
    source = content.get("source") or ["update"]
    results = []
    if content["verdict"] == "LEAKS":
        results.append(
            {
                "ruleId": RULE,
                "level": "error",
                "message": {"text": content["summary"]},
                "locations": [{"physicalLocation": {"artifactLocation": {"uri": _uri(str(source[-1]))}}}],
                "properties": {
                    name: content[name] for name in ("batch_size", "recovered", "approximate", "best_layer")
                },
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
            }
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
