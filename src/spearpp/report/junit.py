"""Convert a report to JUnit XML, which continuous-integration servers show as test results."""

import re
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from spearpp.config import Config
from spearpp.report.decision import describe, judge, passed, refused
from spearpp.report.leaks import leaks

NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 does not allow. Names of layers come from files and may contain them."""


def junit_xml(content: Mapping[str, Any]) -> str:
    """Convert the content of ``report.json`` to JUnit XML.

    Every Linear layer and every embedding table is a test case. The case fails if a leak of this layer or table fails
    the gate of the audit. It is skipped if the layer could not be inverted, or if the gate lets its leaks pass. Without
    a gate, the case fails for every leak that ``--fail-on leak`` would refuse. If the client states DP-SGD, one more
    case fails if the update contradicts the statement, whatever the gate says. The file contains no recovered data.

    Returns:
        The XML document, with one test suite.
    """
    found = content["leaks"] if "leaks" in content else judge(leaks(content), Config(), ())
    gate = content.get("gate") or {}
    cases = [_layer(each, _at(found, each["name"]), gate) for each in content["layers"]]
    for each in content.get("vocabulary", []):
        name, leaking = f"embedding {each['table']} reveals no vocabulary", _at(found, each["table"], vocabulary=True)
        cases.append(_searched(name, leaking, each["reason"], gate))
    if content.get("dp"):
        stated = content["dp"]
        cases.append(_case("stated DP-SGD", failure=" ".join(stated["warnings"]), text=stated["sentence"]))
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
    described = {name: content.get(name) or "" for name in ("verdict", "summary", "client", "model")}
    described["source"] = " and ".join(str(each) for each in content.get("source") or [])
    for name, value in described.items():
        ElementTree.SubElement(properties, "property", {"name": name, "value": _clean(value)})
    suite.extend(cases)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _at(found: list[dict[str, Any]], where: str, *, vocabulary: bool = False) -> list[dict[str, Any]]:
    """Return the leaks of one layer or of one embedding table."""
    return [each for each in found if each["where"] == where and (each["kind"] == "vocabulary") is vocabulary]


def _layer(layer: Mapping[str, Any], found: list[dict[str, Any]], gate: Mapping[str, Any]) -> ElementTree.Element:
    name = f"layer {layer['name']} ({layer['neurons']} x {layer['features']}) reveals no training data"
    if layer["inversion"] is None:
        return _case(name, skipped=layer["outcome"])
    seconds = sum(layer["inversion"]["stats"]["seconds"].values())
    return _searched(name, found, layer["outcome"], gate, seconds)


def _searched(
    name: str, found: list[dict[str, Any]], text: str, gate: Mapping[str, Any], seconds: float = 0.0
) -> ElementTree.Element:
    """Return a test case that fails if there are leaks. It is skipped if the gate lets all of them pass."""
    if failures := refused(found, gate):
        return _case(name, failure="; ".join(describe(each) for each in failures), text=text, seconds=seconds)
    if found:
        return _case(name, skipped="; ".join(passed(found, gate)), seconds=seconds)
    return _case(name, text=f"{text}. Finding nothing does not prove that the update is safe.", seconds=seconds)


def _case(
    name: str, *, failure: str = "", skipped: str = "", text: str = "", seconds: float = 0.0
) -> ElementTree.Element:
    attributes = {"classname": "spearpp.audit", "name": _clean(name), "time": f"{seconds:.3f}"}
    case = ElementTree.Element("testcase", attributes)
    if failure:
        ElementTree.SubElement(case, "failure", {"message": _clean(failure), "type": "leak"}).text = _clean(text)
    elif skipped:
        ElementTree.SubElement(case, "skipped", {"message": _clean(skipped)})
    elif text:
        ElementTree.SubElement(case, "system-out").text = _clean(text)
    return case


def _clean(text: object) -> str:
    return NOT_XML.sub("?", str(text))
