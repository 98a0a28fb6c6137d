"""Audits outside of a terminal: GitHub Actions, pre-commit, CI servers and containers."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import spearpp
from conftest import present
from spearpp import simulate
from spearpp.dp import StatedDP, compare
from spearpp.report.junit import junit_xml

ROOT = Path(__file__).parents[1]
yaml = pytest.importorskip("yaml")
ACTION = yaml.safe_load((ROOT / "action" / "action.yml").read_text())
RUN_KEYS = {"name", "id", "if", "shell", "env", "run", "working-directory", "continue-on-error"}
USES_KEYS = {"name", "id", "if", "uses", "with", "env", "continue-on-error"}
"""The keys that GitHub documents for the two kinds of steps of a composite action."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with an update that leaks, a model, and the programs ``spearpp`` and ``python``."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, arguments in (("spearpp", "-m spearpp "), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments}"$@"\n')
        (programs / name).chmod(0o755)
    model, batch = simulate.mlp(30, [60, 60], 10), simulate.random_batch(4, features=30)
    simulate.FedSGD()(model, batch).save(tmp_path / "update.safetensors")
    (tmp_path / "net.py").write_text(
        "from spearpp import simulate\n\n\ndef Net():\n    return simulate.mlp(30, [60], 10)\n"
    )
    return tmp_path


def run(place: Path, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
    path = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
    paths = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **more}
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)  # noqa: S603


def run_action(place: Path, **given: str) -> tuple[int, dict[str, str], str]:
    """Run the shell steps of the action as a runner does, and return the exit status, the outputs and the output."""
    inputs = {name: each.get("default", "") for name, each in ACTION["inputs"].items()}
    inputs |= {name.replace("_", "-"): value for name, value in given.items()}
    outputs: dict[str, str] = {}

    def value(match: re.Match[str]) -> str:
        kind, name = match[1].rsplit(".", 1)
        return inputs[name] if kind == "inputs" else {"steps.audit.outputs": outputs}[kind].get(name, "")

    said = ""
    for step in ACTION["runs"]["steps"]:
        if "run" not in step or step["name"] == "Install spearpp":
            continue
        named = {name: re.sub(r"\$\{\{ ([\w.-]+) \}\}", value, text) for name, text in step["env"].items()}
        (place / "output").write_text("")
        runner = {"GITHUB_ACTION_PATH": str(ROOT / "action"), "GITHUB_OUTPUT": str(place / "output")}
        summary = {"GITHUB_STEP_SUMMARY": str(place / "summary.md")}
        done = run(place, "bash", "-e", "-o", "pipefail", "-c", step["run"], **named, **runner, **summary)
        said += done.stdout + done.stderr
        outputs |= dict(line.split("=", 1) for line in (place / "output").read_text().splitlines())
        if done.returncode:
            return done.returncode, outputs, said
    return 0, outputs, said


def test_the_action_is_a_composite_action_as_github_documents_it() -> None:
    assert (
        {"name", "description", "runs"}
        <= set(ACTION)
        <= {"name", "author", "description", "branding", "inputs", "outputs", "runs"}
    )
    assert ACTION["runs"]["using"] == "composite"
    for step in ACTION["runs"]["steps"]:
        assert set(step) <= (RUN_KEYS if "run" in step else USES_KEYS), step
        assert "run" not in step or step["shell"] == "bash"
        assert "${{" not in step.get("run", ""), "an input would be executed as code"
        assert "uses" not in step or re.fullmatch(r"[\w-]+/[\w/-]+@v\d+", step["uses"])
    for each in ACTION["inputs"].values():
        assert set(each) == {"description", "required", "default"}
        assert isinstance(each["default"], str)
    assert all(set(each) == {"description", "value"} for each in ACTION["outputs"].values())
    used = set(re.findall(r"inputs\.([\w-]+)", (ROOT / "action" / "action.yml").read_text()))
    assert used == set(ACTION["inputs"])


def test_the_action_audits_an_update_and_fails_the_job_after_the_upload(place: Path) -> None:
    code, outputs, said = run_action(place, update="update.safetensors", model="mlp", batch_size="4", args="--seed 3")
    assert (code, outputs) == (1, {"exit-code": "1", "verdict": "LEAKS"}), said
    assert "::error title=spearpp::Training data can be recovered" in said
    log = json.loads((place / "spearpp-audit" / "report.sarif").read_text())
    assert log["runs"][0]["results"][0]["level"] == "error"
    content = json.loads((place / "spearpp-audit" / "report.json").read_text())
    assert content["redacted"] == "omit"
    assert "LEAKS: 4 of 4" in (place / "summary.md").read_text()
    names = [each.get("name") for each in ACTION["runs"]["steps"]]
    assert names.index("Audit the update") < names.index("Upload SARIF") < names.index("Decide")


def test_the_action_never_takes_an_old_report_for_a_new_one(place: Path) -> None:
    (place / "spearpp-audit").mkdir()
    (place / "spearpp-audit" / "report.json").write_text('{"verdict": "NOT_FOUND", "summary": "old"}')
    (place / "bin" / "spearpp").write_text("#!/bin/sh\nexit 2\n")
    code, outputs, said = run_action(place, update="absent.safetensors; touch injected")
    assert (code, outputs) == (2, {"exit-code": "2", "verdict": ""}), said
    assert not (place / "injected").exists()


@pytest.mark.parametrize(
    ("code", "rule", "result"),
    [("0", "fail", 0), ("3", "fail", 3), ("3", "pass", 0), ("4", "pass", 4), ("", "pass", 4)],
)
def test_an_exit_code_decides_about_the_job(place: Path, code: str, rule: str, result: int) -> None:
    done = run(place, "bash", str(ROOT / "action" / "decide.sh"), CODE=code, NOT_APPLICABLE=rule)
    assert done.returncode == result
    assert result == 0 or "::error" in done.stdout


def test_pre_commit_runs_the_hook_if_a_python_file_changes(place: Path) -> None:
    pytest.importorskip("pre_commit.clientlib").load_manifest(ROOT / ".pre-commit-hooks.yaml")
    tool = (sys.executable, "-m", "pre_commit")
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    # A hook of language python would install PyTorch here. Everything else is as in the manifest.
    hook |= {"language": "system", "args": ["net.py:Net", "--input", "30", "--batch", "4"]}
    (place / ".pre-commit-config.yaml").write_text(yaml.safe_dump({"repos": [{"repo": "local", "hooks": [hook]}]}))
    for command in (("git", "init", "-q"), ("git", "add", "net.py", ".pre-commit-config.yaml")):
        assert run(place, *command).returncode == 0
    home = {"PRE_COMMIT_HOME": str(place / "home")}
    done = run(place, *tool, "run", **home)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "exit code: 1" in done.stdout
    assert "LEAKS: 4 of 4" in done.stdout
    other = run(place, *tool, "run", "--files", "update.safetensors", **home)
    assert other.returncode == 0
    assert "no files to check" in other.stdout


def content_of(client: simulate.Client) -> dict[str, Any]:
    """The report of an audit, with a statement about DP-SGD."""
    model, batch = simulate.mlp(30, [60, 60], 10), simulate.random_batch(4, features=30)
    update = client(model, batch)
    result = spearpp.audit(update, model, batch_size=4, search=spearpp.search.Gated(starts=512))
    return {**result.to_dict(), "dp": compare(StatedDP(2.0, 0.5), update, result, 4).to_dict()}


def test_junit_has_a_failure_for_every_layer_that_leaks() -> None:
    content = content_of(simulate.FedSGD())
    content["layers"][1]["name"] = "block\x1b[31m\x00 & <1>"
    root = ElementTree.fromstring(junit_xml(content))  # noqa: S314
    (suite,) = root.findall("testsuite")
    assert set(root.attrib) == {"name", "tests", "failures", "errors", "time"}  # all that Jenkins' schema allows
    assert re.fullmatch(r"\d+\.\d{3}", root.get("time", ""))
    cases = suite.findall("testcase")
    assert int(suite.get("tests", "")) == len(cases) == len(content["layers"]) + 1
    failed = [case for case in cases if case.find("failure") is not None]
    assert int(suite.get("failures", "")) == int(root.get("failures", "")) == len(failed)
    leaking = [each for each in content["layers"] if each["exact"] + each["approximate"] + each["fitting"]]
    assert len(failed) == len(leaking) + 1  # and the statement, which no noise supports
    skipped = [case for case in cases if case.find("skipped") is not None]
    assert int(suite.get("skipped", "")) == len(skipped) == sum(each["inversion"] is None for each in content["layers"])
    assert cases[1].get("name") == "layer block?[31m? & <1> (60 x 60) reveals no training data"
    assert next(child.tag for child in suite) == "properties"
    values = {each.get("name"): each.get("value") for each in suite.iter("property")}
    assert values["verdict"] == "LEAKS"


def test_junit_skips_a_leak_that_was_accepted_and_fails_once_it_expired() -> None:
    content = content_of(simulate.FedSGD())
    acceptance = {"leak": "inputs/0", "most": 4, "reason": "test data", "expires": "2030-01-01", "sha256": None}
    leak = {
        "id": "inputs/0",
        "kind": "inputs",
        "where": "0",
        "count": 4,
        "exact": 4,
        "total": 4,
        "acceptance": acceptance,
    }
    for status, tag in (("accepted", "skipped"), ("expired", "failure"), ("exceeded", "failure")):
        root = ElementTree.fromstring(junit_xml({**content, "leaks": [{**leak, "status": status}]}))  # noqa: S314
        found = present(root.find(f"./testsuite/testcase/{tag}"))
        assert "test data" in found.get("message", "")


def test_junit_does_not_fail_and_does_not_reassure_where_nothing_was_found() -> None:
    content = content_of(simulate.DPSGD(0.5, 0.25))
    assert content["verdict"] != "LEAKS"
    suite = present(ElementTree.fromstring(junit_xml(content)).find("testsuite"))  # noqa: S314
    assert suite.get("failures") == "0"
    assert int(suite.get("skipped", "")) == sum(each["inversion"] is None for each in content["layers"])


def test_the_docker_file_needs_no_network_and_no_root() -> None:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split(None, 1) for line in text.splitlines() if line and not line.startswith("#")]
    assert [name for name, _ in lines] == ["ARG", "FROM", "COPY", "RUN", "USER", "WORKDIR", "ENTRYPOINT", "CMD"]
    instructions = dict(lines)
    pip = shlex.split(instructions["RUN"].split("&&")[0])
    assert pip[:4] == ["python", "-m", "pip", "install"]
    assert {"--no-index", "--find-links"} <= set(pip)
    source, target = instructions["COPY"].split()
    assert pip[pip.index("--find-links") + 1] == target
    assert f"!{source}" in (ROOT / ".dockerignore").read_text().splitlines()
    assert instructions["USER"] != "root"
    assert json.loads(instructions["ENTRYPOINT"]) == ["spearpp"]
    assert isinstance(json.loads(instructions["CMD"]), list)
