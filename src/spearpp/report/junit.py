"""Convert a report to JUnit XML, which continuous-integration servers show as test results."""

import re
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from spearpp.report.decision import describe

NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 does not allow. Names of layers come from files and may contain them."""
NOT_SAFE = "Finding nothing does not prove that the update is safe."


def junit(content: Mapping[str, Any]) -> str:
    """Convert the content of ``report.json`` to JUnit XML.

    Every Linear layer and every embedding table is a test case. The case fails if training data or a vocabulary was
    recovered, or if inputs fit without proof. It is skipped if the layer could not be inverted, or if all of its leaks
    are accepted. If the client states DP-SGD, one more case fails if the update contradicts the statement. The file
    contains no recovered data.

    Returns:
        The XML document, with one test suite.
    """
    known = content.get("leaks") or []
    in_tables = [each for each in known if each["kind"] == "vocabulary"]
    in_layers = [each for each in known if each["kind"] != "vocabulary"]
    cases = [_layer(each, _acceptances(each["name"], in_layers)) for each in content["layers"]]
    cases += [_table(each, _acceptances(each["table"], in_tables)) for each in content.get("vocabulary", [])]
    if content.get("dp"):
        cases.append(
            _case("stated DP-SGD", failure=" ".join(content["dp"]["warnings"]), text=content["dp"]["sentence"])
        )
    counts = {
        "tests": str(len(cases)),
        "failures": str(sum(each.find("failure") is not None for each in cases)),
        "errors": "0",
        "time": f"{content['seconds']:.3f}",
    }
    skipped = str(sum(each.find("skipped") is not None for each in cases))
    root = ElementTree.Element("testsuites", {"name": "spearpp", **counts})
    suite = ElementTree.SubElement(root, "testsuite", {"name": "spearpp audit", **counts, "skipped": skipped})
    properties = ElementTree.SubElement(suite, "properties")
    source = " and ".join(str(each) for each in content.get("source") or [])
    for name, value in (("verdict", content["verdict"]), ("summary", content["summary"]), ("source", source)):
        ElementTree.SubElement(properties, "property", {"name": name, "value": _clean(value)})
    suite.extend(cases)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _acceptances(where: str, known: Sequence[Mapping[str, Any]]) -> str:
    """Describe the leaks of a layer or table if there are some and all of them are accepted. Else return ""."""
    own = [each for each in known if each["where"] == where]
    return "; ".join(map(describe, own)) if all(each["status"] == "accepted" for each in own) else ""


def _layer(layer: Mapping[str, Any], accepted: str) -> ElementTree.Element:
    """Return the test case of one layer."""
    name = f"layer {layer['name']} ({layer['neurons']} x {layer['features']}) reveals no training data"
    found = layer["recovered"] + layer["approximate"]
    if accepted:
        return _case(name, skipped=accepted)
    if found:
        failure = f"{found} of {layer['batch_size']} samples were recovered, {layer['recovered']} of them exactly"
        return _case(name, failure=failure, text=layer["outcome"])
    if layer["fitting"]:
        failure = f"{layer['fitting']} inputs fit the update, without proof that they are training samples"
        return _case(name, failure=failure, text=layer["outcome"])
    if layer["inversion"] is None:
        return _case(name, skipped=layer["outcome"])
    return _case(name, text=f"{layer['outcome']}. {NOT_SAFE}")


def _table(table: Mapping[str, Any], accepted: str) -> ElementTree.Element:
    """Return the test case of one embedding table."""
    name = f"embedding {table['table']} reveals no vocabulary"
    if accepted:
        return _case(name, skipped=accepted)
    if table["count"] and not table["positions"]:
        return _case(name, failure=f"{table['count']} of {table['rows']} rows were looked up", text=table["reason"])
    return _case(name, text=f"{table['reason']}. {NOT_SAFE}")


def _case(name: str, *, failure: str = "", skipped: str = "", text: str = "") -> ElementTree.Element:
    """Return a test case that failed, was skipped, or passed."""
    case = ElementTree.Element("testcase", {"classname": "spearpp.audit", "name": _clean(name), "time": "0"})
    if failure:
        ElementTree.SubElement(case, "failure", {"message": _clean(failure), "type": "leak"}).text = _clean(text)
    elif skipped:
        ElementTree.SubElement(case, "skipped", {"message": _clean(skipped)})
    elif text:
        ElementTree.SubElement(case, "system-out").text = _clean(text)
    return case


def _clean(text: object) -> str:
    return NOT_XML.sub("?", str(text))
