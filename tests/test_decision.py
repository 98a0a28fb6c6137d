"""What a decision needs: severity, checks, accepted leaks and their end, and what changed between two audits."""

import datetime
import json
from collections.abc import Callable
from copy import deepcopy
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import spearpp
from conftest import batch_and_model
from spearpp import AuditResult, report, simulate
from spearpp.auditing.folder import DOCUMENT
from spearpp.cli import main
from spearpp.cli.audit import exit_code
from spearpp.config import FAIL_ON, Acceptance, Config
from spearpp.errors import DataError
from spearpp.report import pdf
from spearpp.report.changes import changes
from spearpp.report.decision import decide
from spearpp.report.glossary import anchor
from spearpp.report.junit import junit_xml
from spearpp.report.leaks import leaks
from spearpp.report.sarif import sarif_log
from spearpp.report.wording import LABELS

TODAY = datetime.date(2026, 11, 18)


@pytest.fixture(scope="module")
def leak() -> AuditResult:
    batch, model = batch_and_model(5, 30, [60, 60], seed=4)
    return spearpp.audit(simulate.FedSGD()(model, batch), model, batch_size=5)


def accepting(most: int = 5, until: datetime.date = TODAY, sha256: str | None = None, leak: str = "inputs/0") -> Config:
    return Config(path="spearpp.toml", accepted=(Acceptance(leak, most, "test data", until, sha256),))


def test_the_gate_agrees_with_the_verdict_if_nothing_is_accepted(leak: AuditResult, nothing: AuditResult) -> None:
    for result in (leak, nothing):
        leaking = result.verdict is spearpp.Verdict.LEAKS
        expected = {"leak": leaking or result.fitting > 0, "certified": leaking, "never": False}
        for fail_on in FAIL_ON:
            assert (exit_code(result, fail_on) == 1) == expected[fail_on]


@pytest.mark.parametrize(
    ("config", "status", "passed"),
    [
        (None, "open", False),
        (accepting(), "accepted", True),
        (accepting(until=TODAY - datetime.timedelta(days=1)), "expired", False),
        (accepting(most=4), "exceeded", False),
        (accepting(leak="inputs/1"), "open", False),
        (accepting(leak="features/0"), "open", False),
        (accepting(sha256="0" * 64), "open", False),
        (accepting(sha256="a" * 64), "accepted", True),
        (Config(thresholds={"inputs": 4}), "open", False),
        (Config(thresholds={"inputs": 5}), "open", True),
        (Config(thresholds={"features": 5, "unproved": 5, "vocabulary": 5}), "open", False),
    ],
)
def test_only_a_valid_acceptance_or_threshold_opens_the_gate(
    leak: AuditResult, config: Config | None, status: str, passed: bool
) -> None:
    content = {**leak.to_dict(), "files": [{"name": "x", "bytes": 1, "sha256": "a" * 64}]}
    decided = decide(content, config, "leak", TODAY)
    assert [each["status"] for each in decided["leaks"]] == [status]
    assert decided["gate"]["passed"] is passed
    assert decided["severity"] == "critical", "an acceptance hides nothing"
    assert {each["name"]: each["outcome"] for each in decided["checks"]}["Recovered inputs of the model"] == (
        "accepted" if status == "accepted" else "pass" if passed else "fail"
    )
    assert decide(content, config, "never", TODAY)["gate"]["passed"] is None


def test_an_expired_acceptance_is_named_everywhere(tmp_path: Path, leak: AuditResult) -> None:
    page = report.write(tmp_path, leak, config=accepting(until=datetime.date(2020, 1, 2)), fail_on="leak")
    content = json.loads((tmp_path / DOCUMENT).read_text())
    for text in (page.read_text(), json.dumps(content["checks"])):
        assert "the acceptance expired on 2020-01-02: test data" in text
    assert "<failure" in junit_xml(content)
    assert "suppressions" not in sarif_log(content)["runs"][0]["results"][0]
    far = datetime.date(9999, 1, 1)
    report.write(tmp_path, leak, config=accepting(until=far), fail_on="leak")
    content = json.loads((tmp_path / DOCUMENT).read_text())
    (result,) = sarif_log(content)["runs"][0]["results"]
    assert result["level"] == "error"
    assert "test data" in result["suppressions"][0]["justification"]
    assert "accepted until 9999-01-01: test data" in page.read_text()
    assert "<failure" not in junit_xml(content)
    assert "accepted until 9999-01-01: test data" in junit_xml(content)


@pytest.mark.parametrize("fail_on", FAIL_ON)
@pytest.mark.parametrize("most", [None, 2, 3])
@pytest.mark.parametrize("kind", ["inputs", "unproved"])
def test_junit_and_sarif_agree_with_the_gate(leak: AuditResult, kind: str, most: int | None, fail_on: str) -> None:
    content = leak.to_dict()
    if kind == "unproved":
        content |= {"verdict": "NOT_FOUND", "fitting": 3, "best_layer": None}
    content["layers"][0] |= {"exact": 0, "fitting": 3} if kind == "unproved" else {"exact": 3}
    content |= decide(content, Config(thresholds={} if most is None else {kind: most}), fail_on, TODAY)
    passes = content["gate"]["passed"] if fail_on != "never" else most == 3
    assert ("<failure" not in junit_xml(content)) is passes
    (result,) = sarif_log(content)["runs"][0]["results"]
    assert ("suppressions" in result) is passes
    assert passes is (most == 3 or (kind == "unproved" and fail_on == "certified"))
    if passes:
        assert ("within the threshold of 3" in junit_xml(content)) is not (
            fail_on == "certified" and kind == "unproved"
        )


def test_the_audit_is_complete_if_no_time_limit_and_no_interruption_ended_it(leak: AuditResult) -> None:
    def completeness(content: dict[str, Any]) -> tuple[str, str]:
        (check,) = [each for each in decide(content)["checks"] if each["name"] == "Completeness of the audit"]
        return check["outcome"], check["text"]

    whole = leak.to_dict()
    assert completeness(whole)[0] == "pass"
    assert completeness({**whole, "layers": []}) == ("pass", "0 of 0 Linear layers were searched")
    assert completeness({**whole, "interrupted": True})[0] == "fail"
    assert completeness({**whole, "history": {"outcome": "the time budget was spent"}})[0] == "fail"
    for outcome in ("not tried: the time budget was spent", "a ReLU follows; the time budget was spent with 2 of 3"):
        late = deepcopy(whole)
        late["layers"][-1]["outcome"] = outcome
        assert completeness(late)[0] == "fail"
        late["layers"][0]["exact"] = 0
        assert "larger budget" in decide({**late, "verdict": "NOT_FOUND"})["action"]
    whole["layers"][0]["exact"] = 0
    assert "budget" not in decide({**whole, "verdict": "NOT_FOUND"})["action"]


def test_each_severity_has_its_reason(leak: AuditResult, nothing: AuditResult) -> None:
    whole = leak.to_dict()

    def changed(**layer: Any) -> dict[str, Any]:
        content = deepcopy(whole)
        content["layers"][0] |= layer
        return content

    table = {"table": "words", "count": 3, "rows": 9, "positions": False}
    cases = {
        "critical": whole,
        "high": changed(exact=0, approximate=2),
        "medium": changed(exact=0, fitting=3),
        "low": {**changed(exact=0), "verdict": "NOT_FOUND"},
        "unknown": {**changed(exact=0), "verdict": "NOT_FOUND", "interrupted": True},
    }
    assert {name: decide(content)["severity"] for name, content in cases.items()} == {name: name for name in cases}
    assert "interrupted" in decide(cases["unknown"])["risk"]
    assert decide(changed(sees="features"))["severity"] == "high"
    assert decide({**changed(exact=0), "vocabulary": [table]})["severity"] == "high"
    assert decide({**changed(exact=0), "vocabulary": [{**table, "positions": True}]})["severity"] == "unknown"
    decided = decide(nothing.to_dict())
    assert decided["severity"] in ("low", "unknown")
    assert not any("safe" in each for each in (decided["risk"], decided["action"]))


FAULTS: list[tuple[str, str]] = [
    ("a = [", "not valid TOML"),
    ("a = " + "[" * 20_000, "not valid TOML"),
    ("a = " + "9" * 10_000, "not valid TOML"),
    ("#" * 2**15 + "#", "larger than"),
    ("colour = 1", "unknown table or key 'colour'"),
    ("audit = 3", "audit is not a table"),
    ("accept = 3", "accept is not a list of tables"),
    ("[audit]\nbudget = 60", "expected a time limit in quotes"),
    ("[audit]\nbudget = '0s'", "expected a time limit in quotes"),
    ("[audit]\nfail_on = 'always'", "expected one of leak, certified, never"),
    ("[audit]\nloss = 'hinge'", "expected one of cross-entropy, mse, bce, unknown"),
    ("[audit]\nbatch_size = true", "expected a whole number of 1 or more"),
    ("[audit]\nmodle = 'mlp'", "unknown key 'modle'"),
    ("[thresholds]\ninputs = -1", "expected a whole number of 0 or more"),
    ("[[accept]]\nleak = 'inputs/0'", "has no most and no reason and no expires"),
    ("[[accept]]\nleak = '0'\nmost = 1\nreason = 'x'\nexpires = 2027-01-01", "leak is '0': expected a kind"),
    ("[[accept]]\nleak = 'inputs/0'\nmost = 1\nreason = ' '\nexpires = 2027-01-01", "a text that is not empty"),
    ("[[accept]]\nleak = 'inputs/0'\nmost = 1\nreason = 'x'\nexpires = '2027-01-01'", "a date without quotes"),
    ("[[accept]]\nleak = 'inputs/0'\nmost = 1\nreason = 'x'\nexpires = 2027-01-01T00:00:00", "a date without quotes"),
    (2 * "[[accept]]\nleak = 'inputs/0'\nmost = 1\nreason = 'x'\nexpires = 2027-01-01\n", "a second time"),
]


@pytest.mark.parametrize(("text", "message"), FAULTS)
def test_a_faulty_file_is_one_clear_error(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "spearpp.toml"
    file.write_text(text)
    with pytest.raises(DataError) as caught:
        Config.read(file)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_fault_is_named_at_once(tmp_path: Path) -> None:
    file = tmp_path / "spearpp.toml"
    file.write_text("colour = 1\n[audit]\nbudget = 1\n[thresholds]\ninputs = 'many'\n[[accept]]\nmost = 0\n")
    with pytest.raises(DataError) as caught:
        Config.read(file)
    assert len(str(caught.value).splitlines()) == 1 + 5
    file.write_text("[[accept]]\n" * 500)
    with pytest.raises(DataError, match="and 480 more"):
        Config.read(file)


def test_the_command_line_reads_the_file_and_wins_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", "--data", "digits", "--samples", "4", "--hidden", "60,60", "--out", "mine"]) == 0
    accept = "[[accept]]\nleak = 'inputs/0'\nmost = 4\nreason = '[red]public[/] digits'\nexpires = 9999-12-31\n"
    Path("spearpp.toml").write_text("[audit]\nmodel = 'mlp'\nbatch_size = 4\nfail_on = 'leak'\n" + accept)
    audit = ["audit", "mine/update.safetensors", "--out", "found", "-q"]
    assert main([*audit, "--fail-on", "leak"]) == 1
    printed = capsys.readouterr()
    assert "gate: failed: inputs/0 has 4, the threshold is 0 (--fail-on leak)" in printed.out
    assert "spearpp.toml is not used" in printed.err
    assert main([*audit, "--fail-on", "leak", "--json"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["gate"]["passed"] is False
    assert "gate: failed: inputs/0 has 4" in printed.err
    assert main([*audit, "--config", "spearpp.toml", "--client", "clinic 7"]) == 0
    assert "accepted until 9999-12-31: [red]public[/] digits" in capsys.readouterr().out
    content = json.loads(Path("found", DOCUMENT).read_text())
    assert (content["client"], content["model"][:3], content["gate"]["passed"]) == ("clinic 7", "mlp", True)
    assert [Path(each["name"]).name for each in content["files"]] == ["update.safetensors"]
    Path("spearpp.toml").write_text("[audit]\nfail_on = 'leak'\n")
    assert main([*audit, "--config", "spearpp.toml"]) == 1
    assert main([*audit, "--config", "spearpp.toml", "--fail-on", "never"]) == 0


Edit = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("edit", "direction", "text"),
    [
        (lambda c: dict(c), "same", ""),
        (lambda c: c["layers"][0].update(exact=6), "worse", "leak inputs/0: 5 of 5, 5 exact -> 6 of 5, 6 exact"),
        (lambda c: c["layers"][0].update(exact=4), "better", "layer 0 exact: 5 -> 4"),
        (lambda c: c["layers"][0].update(exact=4, approximate=2), "mixed", "6 of 5, 4 exact"),
        (lambda c: c["layers"][1].update(fitting=1), "worse", "leak unproved/2: new (1 of ?, 0 exact)"),
        (lambda c: c["layers"].pop(), "different", "layer 4: gone (present)"),
        (lambda c: c["layers"][0]["inversion"]["samples"].pop(), "different", "claims 0, one sample: 5 -> 4"),
        (lambda c: c.update(budget=7.0), "different", "settings budget: new (7.0)"),
        (lambda c: c["files"].append({"name": "b", "bytes": 1, "sha256": "f"}), "different", "file b: new (f)"),
        (lambda c: c["versions"].update(torch="0"), "different", "settings version of torch: "),
    ],
)
def test_changes_are_named(tmp_path: Path, leak: AuditResult, edit: Edit, direction: str, text: str) -> None:
    report.write(tmp_path, leak)
    before = json.loads((tmp_path / DOCUMENT).read_text())
    after = deepcopy(before)
    edit(after)
    found = changes(before, after)
    assert found.direction == direction
    assert text in "\n".join(map(str, found.changes))
    opposite = {"worse": "better", "better": "worse"}
    assert changes(after, before).direction == opposite.get(direction, direction)


def test_compare_has_exit_codes_and_reads_redacted_and_earlier_reports(
    tmp_path: Path, leak: AuditResult, nothing: AuditResult, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("full", "omitted", "earlier", "nothing")
    full, omitted, earlier, none = (str(tmp_path / name) for name in names)
    report.write(full, leak)
    report.write(omitted, leak, redact="omit")
    report.write(none, nothing)
    leak.save(earlier)  # as an earlier release wrote it, without severity, leaks and files
    for other in (omitted, earlier):
        assert main(["compare", full, other, "--fail-on", "worse"]) == 0
    assert main(["compare", full, full, "--fail-on", "changed"]) == 0
    assert main(["compare", full, omitted, "--fail-on", "changed"]) == 1
    assert main(["compare", none, full]) == 0
    assert main(["compare", full, none, "--fail-on", "worse"]) == 0
    capsys.readouterr()
    assert main(["compare", none, full, "--fail-on", "worse", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["direction"] == "worse"
    assert main(["compare", full, full, "--fail-on", "sometimes"]) == 2
    assert main(["compare", full, str(tmp_path)]) == 2
    damages: list[dict[str, Any]] = [
        {"version": 2},
        {"layers": 3},
        {"layers": [{}]},
        {"gate": 7},
        {"leaks": [1]},
        {"files": "x"},
    ]
    for damage in damages:
        content = json.loads((tmp_path / "full" / DOCUMENT).read_text()) | damage
        (tmp_path / "nothing" / DOCUMENT).write_text(json.dumps(content))
        capsys.readouterr()
        assert main(["compare", full, none]) == 2, damage
        assert len(capsys.readouterr().err.splitlines()) == 2, "one error and one hint"


class Links(HTMLParser):
    """The identifiers of a page and where its links lead."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.tags: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.targets += [value for name, value in attrs if name == "href" and value]


def test_every_number_of_the_evidence_leads_to_its_explanation(tmp_path: Path, leak: AuditResult) -> None:
    page = report.write(tmp_path, leak)
    links = Links(page)
    inside = [each[1:] for each in links.targets if each.startswith("#")]
    assert set(inside) <= set(links.ids)
    assert len(links.ids) == len(set(links.ids))
    sample = json.loads((tmp_path / DOCUMENT).read_text())["layers"][0]["inversion"]["samples"][0]
    numbers = set(sample) - {"claim", "certified", "label", "why"}
    for name in (*(LABELS.get(each, each) for each in numbers), sample["claim"]):
        assert inside.count(anchor(name)) == 5, f"{name} is explained for each of the 5 samples"
    assert {"term-dB", "term-certified", "term-ε-(epsilon)"} <= set(links.ids)


def test_names_of_strangers_stay_text_and_short(tmp_path: Path, leak: AuditResult) -> None:
    hostile = '"><script>alert(1)</script>' + "A" * 100_000
    file = tmp_path / "<img src=x onerror=alert(1)>"
    file.write_bytes(b"update")
    config = Config(path=hostile, accepted=(Acceptance("inputs/0", 9, hostile, datetime.date(9999, 1, 1)),))
    page = report.write(
        tmp_path / "out", leak, source=[str(file)], about={"client": hostile, "model": hostile}, config=config
    )
    assert Links(page).tags.count("script") == 1
    assert "<img src=x" not in page.read_text()
    assert max(map(len, page.read_text().splitlines())) < 20_000


@pytest.mark.parametrize("field", ["severity", "checks", "gate", "files", "versions"])
def test_a_damaged_decision_is_no_defect(tmp_path: Path, leak: AuditResult, field: str) -> None:
    report.write(tmp_path, leak)
    content = json.loads((tmp_path / DOCUMENT).read_text())
    (tmp_path / DOCUMENT).write_text(json.dumps({**content, field: 7}))
    if field == "severity":
        assert "Severity: 7" in report.rerender(tmp_path).read_text()
    else:
        with pytest.raises(DataError, match="damaged"):
            report.rerender(tmp_path)


def test_an_earlier_report_is_rendered_with_what_it_has(tmp_path: Path, leak: AuditResult) -> None:
    leak.save(tmp_path)
    page = report.rerender(tmp_path).read_text()
    assert "Severity: critical" in page
    assert "not recorded" in page
    assert len(leaks(json.loads((tmp_path / DOCUMENT).read_text()))) == 1


def test_a_pdf_needs_a_browser_and_says_so(
    tmp_path: Path, leak: AuditResult, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report.write(tmp_path, leak)
    monkeypatch.setattr(pdf, "BROWSERS", ("no-such-browser",))
    assert main(["report", str(tmp_path), "--pdf"]) == 2
    assert "no browser was found" in capsys.readouterr().err
    broken = tmp_path / "browser"
    broken.write_text("#!/bin/sh\necho it crashed >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(pdf, "BROWSERS", (str(broken),))
    assert main(["report", str(tmp_path), "--pdf"]) == 2
    assert "(exit code 3): it crashed" in capsys.readouterr().err
    assert not (tmp_path / "report.pdf").exists()
