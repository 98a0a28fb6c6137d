"""The command line, as people and CI jobs use it."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from tools.pictures import terminal
from torch import nn

from clients import train
from conftest import batch_and_model, present
from spearpp import AuditResult, ClientUpdate, audit, invert, score, simulate
from spearpp.cli import main
from spearpp.cli.models import chain
from spearpp.cli.options import seconds
from spearpp.errors import OptionError
from spearpp.experiments.source import Source
from spearpp.inversion.result import Progress
from spearpp.simulate import Batch

SIMULATED = ["simulate", "--samples", "8", "--hidden", "80,80", "--data", "digits"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def simulated(folder: Path) -> Path:
    assert main([*SIMULATED, "--out", "mine"]) == 0
    return folder / "mine"


def test_the_demo_recovers_its_photographs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--samples", "8", "--out", "new/folder"]) == 0
    printed = capsys.readouterr().out
    assert "LEAKS: 8 of 8 training inputs were recovered exactly" in printed
    assert "compared with the true batch: 8 of 8 samples above 90 dB" in printed
    assert "report: new/folder/report.html" in printed
    for name in ("report.html", "report.json", "report.sarif", "recovered.safetensors", "update.safetensors"):
        assert (folder / "new" / "folder" / name).stat().st_size > 100


def test_simulate_audit_score_and_report_again(simulated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    update, truth = str(simulated / "update.safetensors"), str(simulated / "truth.safetensors")
    assert main(["audit", update, "--model", "mlp", "--truth", truth, "--out", "found"]) == 0
    printed = capsys.readouterr().out
    assert "LEAKS: 8 of 8 training inputs were recovered (each is exactly one sample, or the exact mean of" in printed
    assert "the update differs by" in printed
    content = json.loads(Path("found/report.json").read_text())
    assert content["truth"]["exact"] == 8
    assert content["presentation"]["shape"] == [1, 8, 8]
    page = Path("found/report.html").read_text()
    assert page.count("data:image/png") == 16
    assert main(["score", "found", truth, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["exact"] == 8
    assert main(["score", "found", truth]) == 0
    assert "8 of 8 samples above 90 dB" in capsys.readouterr().out
    assert main(["report", "found"]) == 0
    assert Path("found/report.html").read_text() == page
    assert main(["report", "found", "--redact", "omit"]) == 0
    assert "still contains the inputs" in capsys.readouterr().out
    assert "data:image/png" not in Path("found/report.html").read_text()
    assert main(["report", "found", "--shape", "none"]) == 0
    assert 'class="records"' in Path("found/report.html").read_text()


def trained(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> None:
    """Write before.pt and after.pt of one step of SGD."""
    torch.save(model.state_dict(), "before.pt")
    torch.save(train(model, inputs, labels), "after.pt")


def trained_on_digits() -> Batch:
    """Write both checkpoints of a client with six digits, and return the digits."""
    generator = torch.Generator().manual_seed(4)
    batch = simulate.digits(6, generator=generator)
    trained(simulate.mlp(64, [90, 90], 10, generator=generator), batch.inputs, batch.labels)
    return batch


def test_two_checkpoints_without_a_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = trained_on_digits()
    assert main(["audit", "before.pt", "after.pt", "--lr", "0.1"]) == 0
    assert "LEAKS: 6 of 6 training inputs" in capsys.readouterr().out
    recovered = AuditResult.load(folder / "audit-after").inputs
    assert score(recovered, batch.inputs, normalisation=batch.normalisation, threshold=60).exact
    Path("net.py").write_text(
        "from spearpp import simulate\n\ndef build():\n    return simulate.mlp(64, [90, 90], 10)\n"
    )
    for model in ("net:build", "net.py:build", "mlp"):
        assert main(["audit", "before.pt", "after.pt", "--lr", "0.1", "--model", model, "-q"]) == 0
        content = json.loads(Path("audit-after/report.json").read_text())
        assert content["replay"]["difference"] < 1e-2, model


def test_records_get_their_names() -> None:
    assert main(["simulate", "--data", "breast-cancer", "--samples", "5", "--hidden", "80,80", "--out", "t"]) == 0
    names = ",".join(f"column {i}" for i in range(29)) + ',"age, years"'
    Path("names.csv").write_text(names + "\n1,2\n")
    for columns in (names, "names.csv"):
        assert main(["audit", "t/update.safetensors", "--columns", columns, "-q", "--out", "found"]) == 0
        page = Path("found/report.html").read_text()
        assert '<th scope="col">column 7</th>' in page
        assert '<th scope="col">age, years</th>' in page


@pytest.mark.parametrize(
    ("extra", "code", "verdict"),
    [([], 0, "LEAKS"), (["--fail-on", "leak"], 1, "LEAKS")],
)
def test_exit_codes_for_gates(simulated: Path, extra: list[str], code: int, verdict: str) -> None:
    assert main(["audit", str(simulated / "update.safetensors"), "--out", "found", *extra]) == code
    assert json.loads(Path("found/report.json").read_text())["verdict"] == verdict


def test_nothing_found_and_not_applicable_have_codes_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    noisy = [*SIMULATED, "--client", "dpsgd", "--noise", "1e-2", "--out", "noisy"]
    assert main(noisy) == 0
    code = main(["audit", "noisy/update.safetensors", "--budget", "2s", "--fail-on", "leak", "--out", "found"])
    verdict = json.loads(Path("found/report.json").read_text())["verdict"]
    assert (code, verdict) in ((0, "NOT_FOUND"), (3, "NOT_APPLICABLE"))
    model = nn.Sequential(nn.Linear(64, 80), nn.GELU(), nn.Dropout(0.5), nn.Linear(80, 10))
    simulate.FedSGD()(model, simulate.digits(8)).save("gelu.safetensors")
    Path("gelu.py").write_text(
        "from torch import nn\n\n"
        "def build():\n    return nn.Sequential(nn.Linear(64, 80), nn.GELU(), nn.Dropout(), nn.Linear(80, 10))\n"
    )
    capsys.readouterr()
    assert main(["audit", "gelu.safetensors", "--model", "gelu.py:build", "--json", "--out", "found"]) == 3
    assert json.loads(capsys.readouterr().out)["verdict"] == "NOT_APPLICABLE"


def test_json_and_sarif_are_all_that_is_printed(simulated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    update = str(simulated / "update.safetensors")
    assert main(["audit", update, "--json", "--out", "found"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(Path("found/report.json").read_text())
    assert main(["audit", update, "--sarif", "--out", "found"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(Path("found/report.sarif").read_text())
    assert main(["audit", update, "-q", "--out", "found"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_layers_names_what_qualifies(simulated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["layers", str(simulated / "update.safetensors"), "--model", "mlp", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [layer["qualifies"] for layer in found["layers"]] == [True, True, True]
    assert main(["layers", str(simulated / "update.safetensors")]) == 0
    assert "ReLU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["audit", "nowhere.safetensors"], "nowhere.safetensors"),
        (["audit", "broken.safetensors"], "broken.safetensors"),
        (["audit", "code.pt", "code.pt"], "code.pt"),
        (["audit", "one.npz"], "give both files"),
        (["audit", "one.txt"], "ending in"),
        (["audit", "mine/update.safetensors", "one.npz"], "the same model"),
        (["audit", "mine/update.safetensors", "--model", "nowhere:net"], "--model nowhere:net"),
        (["audit", "mine/update.safetensors", "--model", "json:loads"], "--model json:loads"),
        (["audit", "mine/update.safetensors", "--model", "net"], "pkg.mod:factory"),
        (["audit", "mine/update.safetensors", "--budget", "soon"], "--budget soon"),
        (["audit", "mine/update.safetensors", "--budget", "0"], "--budget 0"),
        (["audit", "mine/update.safetensors", "--device", "tpu"], "--device tpu"),
        (["audit", "mine/update.safetensors", "--redact", "some"], "for '--redact': 'some' is not one of"),
        (["audit", "mine/update.safetensors", "--shape", "3x5"], "15 numbers, but the model"),
        (["audit", "mine/update.safetensors", "--shape", "-1x2x3"], "--shape -1x2x3"),
        (["audit", "mine/update.safetensors", "--mean", "0.5"], "must be given together"),
        (["audit", "mine/update.safetensors", "--mean", "a", "--std", "1"], "--mean a"),
        (["audit", "mine/update.safetensors", "--columns", "a,b"], "2 numbers, but the model"),
        (["audit", "mine/update.safetensors", "--truth", "one.npz"], "one.npz"),
        (["audit", "mine/update.safetensors", "--fail-on", "x"], "for '--fail-on': 'x' is not one of"),
        (["audit", "mine/update.safetensors", "--json", "--sarif"], "cannot be combined"),
        (["audit", "mine/update.safetensors", "--lr", "0.1"], "says what is known about lr"),
        (["audit", "mine/update.safetensors", "--out", "one.txt/folder"], "one.txt"),
        (["report", "mine"], "is mine a folder of an audit"),
        (["score", "mine", "mine/truth.safetensors"], "is mine a folder of an audit"),
        (["simulate", "--samples", "0"], "samples=0"),
        (["simulate", "--hidden", "a"], "--hidden a"),
        (["simulate", "--client", "x"], "for '--client': 'x' is not one of"),
        (["simulate", "--data", "x"], "--data x"),
        (["simulate", "--wire", "int2"], "for '--wire': 'int2' is not one of"),
        (["simulate", "--client", "opacus", "--noise", "1"], "only --client dpsgd has this option"),
        (["simulate", "--noise-multiplier", "1"], "only --client opacus has this option"),
        (["simulate", "--epochs", "3"], "only --client fedavg has this option"),
        (["audit", "mine/truth.safetensors"], "is not an update that spearpp wrote"),
        (["audit"], "pass either an update or --rounds"),
        (["layers"], "Missing argument '[BEFORE] UPDATE'"),
        (["nothing"], "No such command"),
    ],
)
def test_bad_input_is_one_line_with_a_hint_and_code_two(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main([*SIMULATED, "--out", "mine"]) == 0
    Path("broken.safetensors").write_bytes(Path("mine/update.safetensors").read_bytes()[:5000])
    Path("one.txt").write_text("x")
    numpy.savez("one.npz", a=numpy.ones(3))
    torch.save({"f": os.system}, "code.pt")
    before = sorted(str(path) for path in folder.rglob("*"))
    capsys.readouterr()
    assert main(arguments) == 2
    caught = capsys.readouterr()
    assert says in caught.err
    assert "Traceback" not in caught.err
    assert len([line for line in caught.err.splitlines() if line.startswith("error:")]) <= 1
    assert sorted(str(path) for path in folder.rglob("*")) == before  # nothing was written


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["audit", "mine/update.safetensors", "--lr", "0.1"], "leave out --lr and --steps"),
        (["audit", "one.pt", "mine/update.safetensors"], "pass this file alone"),
        (["audit", "one.pt"], "give both files: spearpp audit BEFORE UPDATE"),
        (["audit", "code.pt", "one.pt"], "save only the state dict"),
        (["audit", "nowhere.pt", "one.pt"], "check the path"),
        (["audit", "mine/update.safetensors", "--shape", "3x3"], "omit --shape"),
        (["score", "mine", "mine/truth.safetensors"], "spearpp audit --out DIR"),
        (["layers", "one.txt"], "save the update as .safetensors"),
        (["audit", "mine/update.safetensors", "--budget", "x"], "spearpp audit --help"),
    ],
)
def test_a_hint_answers_the_mistake(capsys: pytest.CaptureFixture[str], arguments: list[str], advice: str) -> None:
    assert main([*SIMULATED, "--out", "mine"]) == 0
    torch.save({"weight": torch.ones(3, 3)}, "one.pt")
    torch.save({"f": os.system}, "code.pt")
    Path("one.txt").write_text("x")
    capsys.readouterr()
    assert main(arguments) == 2
    assert advice in capsys.readouterr().err.splitlines()[-1]


def test_the_traceback_is_there_for_who_wants_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "nowhere.safetensors", "--traceback"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_defect_does_not_look_like_a_verdict(
    simulated: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("spearpp.report.write", broken)
    assert main(["audit", str(simulated / "update.safetensors")]) == 4
    assert "defect" in capsys.readouterr().err


def test_a_pipe_gets_no_colours_and_no_progress(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "spearpp", "demo", "--samples", "6", "--out", str(folder / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout
    assert main(["demo", "--out", os.devnull + "/not-a-folder", "--samples", "4"]) == 2
    failed = capsys.readouterr()
    assert failed.err.startswith("error:")
    assert "\x1b" not in failed.err


def test_the_seed_decides() -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert main([*SIMULATED, "--seed", seed, "--out", name]) == 0
    first, second, third = (ClientUpdate.load(f"{name}/update.safetensors") for name in "abc")
    assert torch.equal(first.gradients["0.weight"], second.gradients["0.weight"])
    assert not torch.equal(first.gradients["0.weight"], third.gradients["0.weight"])
    for name in ("x", "y"):
        assert main(["audit", "a/update.safetensors", "--seed", "5", "--out", name, "-q"]) == 0
    assert torch.equal(AuditResult.load("x").inputs, AuditResult.load("y").inputs)


def test_every_client_can_be_played() -> None:
    for extra in (
        ["--client", "fedavg", "--epochs", "2", "--mini-batch", "4"],
        ["--client", "opacus", "--noise-multiplier", "1e-4"],
        ["--clients", "2"],
        ["--wire", "int8", "--keep", "0.5"],
    ):
        assert main([*SIMULATED, *extra, "--out", "mine"]) == 0
        assert len(Batch.load("mine/truth.safetensors").inputs) == 8
        ClientUpdate.load("mine/update.safetensors")


def test_ctrl_c_keeps_what_was_certified(folder: Path) -> None:
    """On a terminal of its own: a search that would take minutes is ended after its first finds."""
    batch, model = batch_and_model(97, 150, [200, 200])
    simulate.FedSGD()(model, batch).save("update.safetensors")
    command = "spearpp audit update.safetensors --budget 10m --out found"
    text, code = terminal(folder, command, interrupt_at=b"round ")
    assert code == 130, text
    assert "interrupted: the report contains the inputs certified so far" in text
    assert "found " in text  # the live line
    assert " s left" in text
    content = json.loads(Path("found/report.json").read_text())
    assert content["interrupted"]
    assert any("interrupted" in caveat for caveat in content["caveats"])
    found = AuditResult.load("found").inputs
    if len(found):  # how far the search came depends on the machine; the next test always finds something
        assert score(found, batch.inputs, normalisation=batch.normalisation).recovered == len(found)


def test_an_interrupt_during_a_search_keeps_its_finds() -> None:
    batch, model = batch_and_model(80, 120, [200, 200], seed=3)
    first, following, _ = simulate.fedsgd(model, batch)

    def stop(state: Progress) -> None:
        if state.found:
            raise KeyboardInterrupt

    result = invert(*first, next_grad_weight=following.grad_weight, next_weight=following.weight, progress=stop)
    assert result.stats.interrupted
    assert "interrupted" in result.stats.stopped
    assert 0 < int(result.certified.sum()) <= 80
    found = score(result.inputs[result.certified], batch.inputs, normalisation=batch.normalisation)
    assert found.recovered == int(result.certified.sum())


def test_times_are_read_as_people_write_them() -> None:
    assert [seconds(text) for text in ("60", "90s", "2m", "0.5h", "1 min")] == [60, 90, 120, 1800, 60]
    for text in ("", "s", "-3s", "3d", "nan", "inf"):
        with pytest.raises(OptionError):
            seconds(text)


def test_an_mlp_is_read_off_its_weights_under_any_names() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.ModuleList([nn.Linear(6, 6) for _ in range(11)])
            self.head = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.body:
                x = torch.relu(layer(x))
            return self.head(x)

    net = Net()
    update = ClientUpdate.from_gradients(net, list(net.parameters()))
    made = chain(update)
    made.load_state_dict(net.state_dict())
    x = torch.randn(4, 6)
    assert torch.equal(made(x), net(x))
    conv = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    with pytest.raises(OptionError, match="do not form a chain"):
        chain(ClientUpdate.from_gradients(conv, list(conv.parameters())))


def test_help_has_examples_and_completion_is_offered(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    for arguments, says in (
        (["audit", "--help"], "spearpp audit round3.pt client7.pt"),
        (["--help"], "--install-comp"),
    ):
        assert main(arguments) == 0
        assert says in capsys.readouterr().out
    installed = present(shutil.which("spearpp", path=str(Path(sys.executable).parent)))
    done = subprocess.run([installed, "--version"], capture_output=True, text=True, check=False)  # noqa: S603
    assert done.stdout.startswith("spearpp ")
    assert done.returncode == 0


def test_swapped_and_equal_checkpoints_are_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    trained_on_digits()
    assert main(["audit", "before.pt", "after.pt", "--model", "mlp"]) == 0
    assert "swapped" not in capsys.readouterr().out
    assert main(["audit", "after.pt", "before.pt", "--model", "mlp"]) == 0
    assert "swapped" in capsys.readouterr().out
    assert main(["audit", "before.pt", "before.pt"]) == 3
    assert "the same file was given twice" in capsys.readouterr().out


def test_a_batch_that_cannot_be_found_still_gets_its_report(capsys: pytest.CaptureFixture[str]) -> None:
    """A user who checks a defence passes the true batch, and nothing is recovered."""
    assert main([*SIMULATED, "--client", "dpsgd", "--noise", "0.1", "--out", "n"]) == 0
    arguments = ["audit", "n/update.safetensors", "--budget", "2s", "--out", "found", "--truth", "n/truth.safetensors"]
    for extra in ([], ["--shape", "8x8"], ["--columns", ",".join(f"c{i}" for i in range(64))]):
        assert main([*arguments, *extra]) in (0, 3)
        assert json.loads(Path("found/report.json").read_text())["verdict"] != "LEAKS"
    assert "error:" not in capsys.readouterr().err


def test_names_from_strangers_reach_the_terminal_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    generator = torch.Generator().manual_seed(0)
    model = simulate.mlp(20, [60, 60], 10, generator=generator)
    update = simulate.FedSGD()(model, simulate.random_batch(4, features=20, generator=generator))
    evil = {"0.weight": "[bold red]x[/]\x1b[31m.weight", "0.bias": "[bold red]x[/]\x1b[31m.bias"}
    renamed = ClientUpdate(
        {evil.get(name, name): each for name, each in update.weights.items()},
        {evil.get(name, name): each for name, each in update.gradients.items()},
    )
    renamed.save("evil.safetensors")
    capsys.readouterr()
    for command in ("layers", "audit"):
        assert main([command, "evil.safetensors"]) == 0
        caught = capsys.readouterr()
        assert "\x1b" not in caught.out
        assert "[bold red]x[/]?[31m" in caught.out


def test_a_page_that_omits_omits_labels_too(simulated: Path) -> None:
    assert main(["audit", str(simulated / "update.safetensors"), "--model", "mlp", "--out", "found", "-q"]) == 0
    assert 'id="label"' in Path("found/report.html").read_text()
    assert main(["report", "found", "--redact", "omit"]) == 0
    page = Path("found/report.html").read_text()
    assert 'id="label"' not in page
    assert not re.findall(r'data-label="\d', page)


def test_small_pictures_are_left_out_rather_than_blurred(simulated: Path) -> None:
    arguments = ["audit", str(simulated / "update.safetensors"), "--redact", "blur", "--out", "found", "-q"]
    assert main(arguments) == 0
    assert AuditResult.load("found").inputs.shape == (8, 0)


def test_an_interrupt_where_nothing_is_kept_is_said(
    simulated: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("spearpp.cli.audit.read_update", stop)
    assert main(["audit", str(simulated / "update.safetensors")]) == 130
    assert "interrupted: nothing was written" in capsys.readouterr().err


def test_an_interrupt_after_the_search_costs_labels_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    batch, model = batch_and_model(5, 20, [60, 60])
    monkeypatch.setattr(sys.modules["spearpp.auditing.judge"], "replay_alone", stop)
    result = audit(simulate.FedSGD()(model, batch), model)
    assert result.interrupted
    assert result.layers[0].exact == 5
    assert result.layers[0].labels is None


def _convolution() -> nn.Module:
    """A network whose Linear layers receive features, not the model's inputs."""
    front = nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*front, nn.Linear(128, 60), nn.ReLU(), nn.Linear(60, 4))


class _Tokens(nn.Module):
    """A network that acts on every token of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(40, 90)
        self.out = nn.Linear(90, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.hidden(x).relu()).mean(1)


@pytest.mark.parametrize("network", [_convolution, _Tokens])
def test_a_truth_of_features_or_tokens_does_not_end_the_audit(
    network: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    inputs = torch.rand(3, 1, 8, 8) if network is _convolution else torch.randn(3, 2, 40)
    trained(network(), inputs, torch.arange(3))
    torch.save({"inputs": inputs}, "truth.pt")
    monkeypatch.setitem(sys.modules, "nets", sys.modules[__name__])
    command = ["audit", "before.pt", "after.pt", "--model", f"nets:{network.__name__}", "--truth", "truth.pt"]
    assert main([*command, "--out", "found", "--budget", "20"]) == 0
    printed = capsys.readouterr()
    assert json.loads(Path("found/report.json").read_text())["verdict"] == "LEAKS"
    if network is _convolution:
        assert "Not compared with the true batch: features were recovered" in printed.err
        assert main(["score", "found", "truth.pt"]) == 2
        assert "cannot be compared" in capsys.readouterr().err
    else:
        assert "compared with the true batch: 6 of 6 samples" in printed.out
    assert main(["report", "found", "--truth", "truth.pt"]) == 0


def test_a_tensor_without_a_name_is_the_truth(simulated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    truth = Batch.load(simulated / "truth.safetensors")
    torch.save(truth.inputs, "bare.pt")
    numpy.savez("bare.npz", truth.inputs.numpy(), truth.labels.numpy())
    assert torch.equal(Batch.load("bare.npz").labels, truth.labels)
    update = str(simulated / "update.safetensors")
    assert main(["audit", update, "--model", "mlp", "--truth", "bare.pt", "--mean", "1,2", "--std", "1,2"]) == 0
    printed = capsys.readouterr()
    assert "8 of 8 samples above 90 dB" in printed.out
    assert "note: the display options were not used: 2 means" in printed.err
    torch.save({"weights": truth.inputs}, "odd.pt")
    assert main(["audit", update, "--model", "mlp", "--truth", "odd.pt"]) == 2
    assert '{"inputs": x}' in capsys.readouterr().err


def test_tables_fit_into_a_hundred_columns_of_a_pipe(simulated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    update = ClientUpdate.load(simulated / "update.safetensors").read()
    long = {name: f"{'block.' * 12}{name}" for name in update.weights}
    weights = {long[name]: each for name, each in update.weights.items()}
    gradients = {long[name]: each for name, each in update.gradients.items()}
    renamed = ClientUpdate(weights, gradients)
    renamed.save("long.safetensors")
    capsys.readouterr()
    for name in ("mine/update.safetensors", "long.safetensors"):
        assert main(["layers", name]) == 0
        printed = capsys.readouterr().out.splitlines()
        table = [line for line in printed if not line.startswith(("ClientUpdate", "note", "warning"))]
        assert len(table) > 3
        assert max(len(line.rstrip()) for line in table) <= 100


def test_hints_name_the_command_and_data_sets_have_both_spellings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "a.pt", "b.pt", "--lr", "0"]) == 2
    assert main(["layers", "a.zip"]) == 2
    assert main(["simulate", "--budget", "0"]) == 2
    said = capsys.readouterr().err
    assert "COMMAND" not in said
    assert main(["simulate", "--samples", "2", "--data", "breast-cancer", "--out", "t"]) == 0
    assert Source.parse("breast-cancer") == Source.parse("breast_cancer")
