"""A watched folder: every update is audited once, even if files, runs or disks fail."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from conftest import present
from spearpp import AuditResult, ClientUpdate, simulate
from spearpp.auditing.folder import DOCUMENT
from spearpp.cli import main
from spearpp.errors import DataError
from spearpp.integrations.common.job import SCRATCH, Settings
from spearpp.integrations.watch import MEMORY, TRIES, Watch
from spearpp.report import timeline


def update(seed: int = 0) -> ClientUpdate:
    generator = torch.Generator().manual_seed(seed)
    model = simulate.mlp(30, [60, 60], 10, generator=generator)
    return simulate.FedSGD()(model, simulate.random_batch(4, features=30, generator=generator))


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "in").mkdir()
    return tmp_path / "in", tmp_path / "out"


def watching(places: tuple[Path, Path]) -> Watch:
    return Watch(places[0], Settings(out=places[1], redact="none"))


def once(places: tuple[Path, Path], *options: str) -> list[str]:
    """A command that audits every file of the folder and ends."""
    return ["watch", str(places[0]), "--out", str(places[1]), "--once", "--interval", "0.01", *options]


def reports(out: Path) -> list[str]:
    return sorted(each.parent.name for each in out.glob(f"*/{DOCUMENT}"))


def test_a_file_is_audited_once_it_has_stopped_to_change(places: tuple[Path, Path]) -> None:
    watch = watching(places)
    assert watch.look() == []
    update().save(places[0] / "a.safetensors")
    assert watch.look() == [], "it may still be written to"
    (outcome,) = watch.look()
    assert outcome.leaks
    assert len(AuditResult.load(present(outcome.folder)).inputs) == 4
    assert watch.look() == []
    assert watch.settled()


def test_a_half_written_file_is_waited_for(places: tuple[Path, Path]) -> None:
    watch, file = watching(places), places[0] / "a.safetensors"
    update().save(file)
    whole = file.read_bytes()
    for share in (0, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:share])
        assert watch.look() == watch.look() == []
    file.write_bytes(whole)
    assert [each.leaks for each in watch.look() + watch.look()] == [True]


def test_a_file_that_stays_broken_is_said_so_once_and_mended_later(places: tuple[Path, Path]) -> None:
    watch, file = watching(places), places[0] / "a.safetensors"
    file.write_bytes(b"garbage")
    said = [each for _ in range(TRIES + 5) for each in watch.look()]
    assert [each.verdict for each in said] == [None]
    assert "cannot read" in said[0].summary
    assert watch.settled()
    again = watching(places)
    assert [each.verdict for _ in range(TRIES + 1) for each in again.look()] == [None]
    assert len(timeline.read(places[1])[0]) == 1, "a restart does not list the same file again"
    update().save(file)
    assert [each.leaks for each in watch.look() + watch.look()] == [True]


def test_a_restart_goes_on_and_copies_are_known(places: tuple[Path, Path]) -> None:
    first = watching(places)
    update().save(places[0] / "a.safetensors")
    assert len(first.look() + first.look()) == 1
    (places[0] / "copy.safetensors").write_bytes((places[0] / "a.safetensors").read_bytes())
    update(1).save(places[0] / "b.safetensors")
    (places[1] / ".partial-c").mkdir()  # of a run that was killed
    second = watching(places)
    assert [each.name[:2] for each in second.look() + second.look()] == ["b-"]
    assert len(reports(places[1])) == 2
    assert not (places[1] / ".partial-c").exists()
    (places[1] / MEMORY).write_text("{")
    with pytest.raises(DataError, match="Delete the file to audit all updates again"):
        watching(places)


def test_a_watch_killed_over_a_report_leaves_none_half_written(places: tuple[Path, Path]) -> None:
    for seed in range(8):
        update(seed).save(places[0] / f"{seed}.safetensors")
    command = [sys.executable, "-m", "spearpp", "watch", str(places[0]), "--out", str(places[1]), "--interval", "0.01"]
    watch = subprocess.Popen(  # noqa: S603
        command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, stdout=subprocess.DEVNULL
    )
    limit = time.monotonic() + 60
    while not list(places[1].glob(f"{SCRATCH}*")) and time.monotonic() < limit:
        time.sleep(0.001)
        if list(places[1].glob(f"{SCRATCH}*")):
            watch.send_signal(signal.SIGSTOP)
            time.sleep(0.05)
            if not list(places[1].glob(f"{SCRATCH}*")):  # it was whole a moment before: wait for the next
                watch.send_signal(signal.SIGCONT)
    watch.kill()
    watch.wait()
    assert list(places[1].glob(f"{SCRATCH}*")), "killed while it wrote"
    before = reports(places[1])
    for name in before:
        if not name.startswith(SCRATCH):
            AuditResult.load(places[1] / name)
    assert main(once(places)) == 0
    assert len(reports(places[1])) == 8
    assert not list(places[1].glob(f"{SCRATCH}*"))
    assert [len(AuditResult.load(places[1] / name).inputs) for name in reports(places[1])] == [4] * 8


def test_reports_inside_the_folder_are_not_taken_for_updates(tmp_path: Path) -> None:
    update().save(tmp_path / "a.safetensors")
    watch = Watch(tmp_path, Settings(out=tmp_path / "audits"))
    assert len([each for _ in range(4) for each in watch.look()]) == 1
    assert watch.settled()


def test_a_report_that_cannot_be_written_is_tried_again(places: tuple[Path, Path]) -> None:
    watch = watching(places)
    update().save(places[0] / "a.safetensors")
    places[1].write_text("a file where the folder should be")
    assert watch.look() == watch.look() == []
    places[1].unlink()
    assert [each.leaks for each in watch.look()] == [True]
    assert len(reports(places[1])) == 1


def test_files_without_weights_take_those_sent(places: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    sent = update()
    torch.save(sent.weights, places[0].parent / "round.pt")
    after = {name: each - 0.1 * sent.gradients[name] for name, each in sent.weights.items()}
    torch.save(after, places[0] / "client.pt")
    before = str(places[0].parent / "round.pt")
    command = once(places, "--model", "mlp", "--before", before, "--lr", "0.1", "--fail-on", "leak")
    assert main(command) == 1
    assert "LEAKS: 4 of 4" in capsys.readouterr().out
    assert main(command) == 1, "what is known to leak still does"
    assert "LEAKS" not in capsys.readouterr().out
    (name,) = reports(places[1])
    document = json.loads((places[1] / name / DOCUMENT).read_text())
    assert document["replay"]["scale"] == pytest.approx(1.0, abs=1e-3)


def test_the_command_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path / "nowhere")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert main(["watch", str(tmp_path), "--kind", "other"]) == 2


def test_the_timeline_shows_every_update_and_survives_damage(places: tuple[Path, Path]) -> None:
    update().save(places[0] / "a.safetensors")
    (places[0] / "b.safetensors").write_bytes(b"garbage")
    watch = watching(places)
    for _ in range(TRIES + 2):
        watch.look()
    entries, damaged = timeline.read(places[1])
    assert [(each.verdict, each.recovered, each.samples) for each in entries] == [("LEAKS", 4, 4), (None, 0, 0)]
    assert damaged == 0
    page = (places[1] / timeline.PAGE).read_text()
    assert "1 of 1 audited updates leak training data." in page
    assert f'href="{entries[0].report}/report.html"' in page
    assert (places[1] / str(entries[0].report) / "report.html").is_file()
    with (places[1] / timeline.ENTRIES).open("a") as file:
        file.write('{"damaged": 1}\nnull\n{"date": "x", "name": "x", "verdict": "SAFE", "summary": "x"}\n{"half')
    hostile = '"><script>alert(1)</script>'
    timeline.add(
        places[1],
        [timeline.Entry("2026-11-18T00:00:00", hostile, "NOT_FOUND", hostile, report="javascript:alert(1)")],
    )
    entries, damaged = timeline.read(places[1])
    assert (len(entries), damaged) == (3, 4)
    page = (places[1] / timeline.PAGE).read_text()
    assert "<script" not in page
    assert 'href="javascript:' not in page
    assert "4 lines of" in page


def test_a_restart_of_the_gate_counts_an_expired_acceptance_again(
    places: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    update().save(places[0] / "a.safetensors")
    config = places[0].parent / "spearpp.toml"
    command = once(places, "--config", str(config))
    accept = "[audit]\nfail_on = 'leak'\n[[accept]]\nleak = 'inputs/0'\nmost = 4\nreason = 'test'\nexpires = "
    config.write_text(accept + "9999-01-01")
    assert main(command) == 0
    assert "accepted until 9999-01-01: test" in capsys.readouterr().out
    assert timeline.read(places[1])[0][0].accepted
    assert main(command) == 0
    config.write_text(accept + "2020-01-01")
    assert main(command) == 1
    stored = json.loads((places[1] / MEMORY).read_text())
    for entry in stored.values():
        del entry["leaks"]
    (places[1] / MEMORY).write_text(json.dumps(stored))
    config.write_text(accept + "9999-01-01")
    assert main(command) == 2, "a list that does not say what leaked passes no gate"


def test_a_gate_passes_neither_an_empty_folder_nor_an_update_that_cannot_be_tested(
    places: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    command = once(places, "--fail-on")
    assert main([*command, "leak"]) == 2
    assert "no update file was found in" in capsys.readouterr().err
    assert main([*command, "never"]) == 0
    sent = update()
    still = ClientUpdate.from_gradients(sent.weights, {name: 0 * each for name, each in sent.gradients.items()})
    still.save(places[0] / "still.safetensors")
    for _ in range(2):  # the second run knows the update from the first
        assert main([*command, "certified"]) == 3
    assert main([*command, "never"]) == 0
    (places[0] / "broken.safetensors").write_bytes(b"garbage")
    assert main([*command, "leak"]) == 2
    update(1).save(places[0] / "leak.safetensors")
    for _ in range(2):
        capsys.readouterr()
        assert main([*command, "leak"]) == 1
        assert ": inputs/0 has 4, the threshold is 0 (--fail-on leak)" in " ".join(capsys.readouterr().out.split())


def test_the_command_uses_the_batch_size_and_prints_each_line_once(
    places: tuple[Path, Path], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    update().save(places[0] / "a.safetensors")
    config = places[0].parent / "spearpp.toml"
    config.write_text("[audit]\nmodel = 'mlp'\nbatch_size = 4\nloss = 'mse'\n")
    other = (places[0], places[1] / "other")
    assert main(once(other, "--config", str(config), "--loss", "unknown")) == 0
    assert "The loss is unknown" in next((places[1] / "other").rglob(DOCUMENT)).read_text()
    capsys.readouterr()
    assert main(once(places, "--config", str(config))) == 0
    assert "The audit used the given loss, mse" in next(places[1].glob(f"*/{DOCUMENT}")).read_text()
    printed = capsys.readouterr().out
    assert printed.count("LEAKS") == 1
    assert caplog.messages == [], "Python prints a warning to the terminal if no handler is configured"
    assert "4 of 4 training inputs were recovered exactly from" in " ".join(printed.split())
