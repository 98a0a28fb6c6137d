"""Convert a report to SARIF 2.1.0, the format of code-scanning tools."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from spearpp.report.data import data
from spearpp.report.decision import passed

LEAK_RULE, UNPROVED_RULE = "spearpp/recoverable-training-data", "spearpp/unproved-inputs"
FEATURES_RULE, VOCABULARY_RULE = "spearpp/features", "spearpp/vocabulary"


def sarif_log(content: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the content of ``report.json`` to a SARIF log.

    Returns:
        A log with an error if training data or a vocabulary was recovered, or with a warning if inputs fit the gradient
        but are not proved to be samples. The result is suppressed, with the reasons, if the gate of the audit lets
        every leak pass. If nothing was found, the log contains no result.
    """
    source = content.get("source") or ["update"]
    names = ("batch_size", "exact", "approximate", "fitting", "best_layer")
    results = []
    if content["verdict"] == "LEAKS" or content["fitting"]:
        leaks = content["verdict"] == "LEAKS"
        sees = next((each["sees"] for each in content["layers"] if each["name"] == content["best_layer"]), None)
        leak_rule = {None: VOCABULARY_RULE, "features": FEATURES_RULE}.get(sees, LEAK_RULE)
        uri = quote(str(source[-1]).replace("\\", "/"))
        result: dict[str, Any] = {
            "ruleId": leak_rule if leaks else UNPROVED_RULE,
            "level": "error" if leaks else "warning",
            "message": {"text": content["summary"]},
            "locations": [{"physicalLocation": {"artifactLocation": {"uri": uri}}}],
            "properties": {name: content[name] for name in names} | {"sees": sees},
        }
        known = content.get("leaks") or []
        reasons = passed(known, content.get("gate") or {})
        if known and len(reasons) == len(known):
            justification = "; ".join(reasons)
            result["suppressions"] = [{"kind": "external", "status": "accepted", "justification": justification}]
        results.append(result)
    notifications = [
        {"level": each["level"], "message": {"text": f"{each['about']}: {each['message']}"}}
        for each in content["findings"]
    ]
    driver = {
        "name": "spearpp",
        "version": str(content.get("versions", {}).get("spearpp", "")),
        "rules": data("sarif_rules.json"),
    }
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": driver},
                "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": notifications}],
                "results": results,
                "properties": {"verdict": content["verdict"], "caveats": content["caveats"]},
            }
        ],
    }
