"""Runs of experiments that are killed, resumed, shared or distributed lose no result and mix no versions."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import typer

from processes import python
from spearpp.cli.running import open_session
from spearpp.errors import OptionError
from spearpp.experiments import Attack, Cell, Failed, Local, Ray, Source, Store, cells_of, run
from spearpp.experiments.engine import Done, Outcome
from spearpp.search import Gated

SETTING = Attack(b=4, m=60, data=Source("digits"))
SLOWER = Attack(b=12, m=120, data=Source("digits"))
ROOT = Path(__file__).parents[1]
SCRIPT = """
    import sys
    from spearpp.experiments import Attack, Local, Source, Store, cells_of, run
    if __name__ == "__main__":
        cells = cells_of(Attack(b={b}, m={m}, data=Source("digits")), int(sys.argv[2]))
        with Store(sys.argv[1]) as store:
            print(len(store.missing(cells)), store.stale(cells), flush=True)
            assert run(cells, store, Local(workers=1)) == []
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A run in a process of its own; spawned workers read it again, so it is a file."""
    file = tmp_path / "experiment.py"
    file.write_text(textwrap.dedent(SCRIPT.format(b=SLOWER.b, m=SLOWER.m)))
    return file


def start(script: Path, store: Path, count: int, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(  # noqa: S603
        [sys.executable, str(script), str(store), str(count)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def finished(process: "subprocess.Popen[str]") -> str:
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return out


def timeless(result: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name not in ("seconds", "decompose")}


def held(store: Store, cells: list[Cell]) -> dict[int, dict[str, Any]]:
    """What a store has, by seed, without times."""
    return {cell.seed: timeless(found.result) for cell in cells if (found := store.get(cell)) is not None}


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, dict[str, Any]]:
    """The same cells, measured one after the other in this process."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    measured = {cell.seed: timeless(cell.measure(torch.device("cpu"))) for cell in cells_of(SLOWER, 6)}
    torch.set_num_threads(threads)
    return measured


def test_a_run_killed_at_any_moment_keeps_what_was_done_and_two_processes_at_once_go_on(
    tmp_path: Path, script: Path, undisturbed: dict[int, dict[str, Any]]
) -> None:
    path = tmp_path / "cells.sqlite"
    process = start(script, path, 500)
    try:
        wait_until(lambda: path.exists() and count(path) >= 3)
        workers = children(process.pid)
        assert workers
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    wait_until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))  # none is left behind
    before = count(path)
    assert 3 <= before < 500
    with sqlite3.connect(path) as raw:
        assert raw.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert raw.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    wanted = max(before + 2, 6)
    for process in [start(script, path, wanted), start(script, path, wanted)]:
        missing, stale = map(int, finished(process).split())
        assert 0 <= missing <= wanted - before  # only the rest was measured
        assert stale == 0
    cells = cells_of(SLOWER, 6)
    with Store(path) as store:
        assert count(path) == wanted
        assert held(store, cells) == undisturbed


def test_a_new_store_may_be_opened_by_several_at_the_same_moment(tmp_path: Path) -> None:
    together = threading.Barrier(4)

    def open_all(_: int) -> int:
        for index in range(40):
            together.wait(60)
            Store(tmp_path / f"{index}.sqlite").close()
        return 40

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(open_all, range(4))) == [40] * 4


def test_results_of_other_code_are_stale_and_not_mixed(tmp_path: Path) -> None:
    path, cells = tmp_path / "cells.sqlite", cells_of(SETTING, 2)
    with Store(path) as store:
        assert all(store.put(cell, {"b": 4}, {}) for cell in cells)
    shutil.copytree(ROOT / "src" / "spearpp", tmp_path / "other" / "spearpp")
    look = """
        import sys
        from spearpp.experiments import Attack, Source, Store, cells_of
        cells = cells_of(Attack(b=4, m=60, data=Source("digits")), 2)
        with Store(sys.argv[1]) as store:
            print(len(store.missing(cells)), store.stale(cells))
            print([store.put(cell, {"b": 5}, {}) for cell in cells])
    """
    expected = {"experiments/rendering.py": "0 0 [False, False]", "auditing/rounds/joined.py": "2 2 [True, True]"}
    for name, told in expected.items():
        changed = tmp_path / "other" / "spearpp" / name
        changed.write_text(changed.read_text() + "\n# changed\n")
        printed = python("-c", textwrap.dedent(look), path, PYTHONPATH=str(tmp_path / "other"))
        assert " ".join(printed.split()) == told
    with Store(path) as store:
        assert count(path) == 4  # both are kept
        assert store.missing(cells) == []
        assert store.stale(cells) == 2
        assert [found.result for cell in cells if (found := store.get(cell))] == [{"b": 4}, {"b": 4}]


@pytest.fixture(scope="module")
def engine() -> Iterator[Local]:
    """One process, which takes seconds to start, for several tests."""
    made = Local()
    yield made
    made.close()


class TestLocal:
    def test_a_second_run_measures_nothing_and_a_longer_one_the_rest(self, tmp_path: Path, engine: Local) -> None:
        steps: list[tuple[int, int, int]] = []
        with Store(tmp_path / "cells.sqlite") as store:
            for wanted in (3, 3, 5):
                failed = run(
                    cells_of(SETTING, wanted), store, engine, lambda p: steps.append((p.done, p.total, p.stored))
                )
                assert failed == []
            stored = store.get(cells_of(SETTING, 1)[0])
        assert steps == [(0, 3, 0), (1, 3, 0), (2, 3, 0), (3, 3, 0), (0, 0, 3), (0, 2, 3), (1, 2, 3), (2, 2, 3)]
        assert stored is not None
        assert stored.result["exact"] is True
        assert stored.versions["device"].startswith("cpu")
        assert len(stored.commit) >= 7

    def test_a_cell_that_fails_is_named_and_not_stored(self, tmp_path: Path, engine: Local) -> None:
        impossible = Cell(Attack(b=5000, m=60, data=Source("digits")), 1)
        with Store(tmp_path / "cells.sqlite") as store:
            (failed,) = run([impossible], store, engine)
            why = "DataError: samples=5000: must be within 1 to 1797, the size of the data set"
            assert failed == Failed(impossible, why)
        assert count(tmp_path / "cells.sqlite") == 0

    def test_a_worker_that_dies_costs_its_cell_a_second_try(self, engine: Local) -> None:
        outcomes = engine.run(cells_of(SLOWER, 4))
        first = next(outcomes)
        assert isinstance(first, Done)
        (worker,) = [pid for pid in children(os.getpid()) if "spawn_main" in command(pid)]
        os.kill(worker, signal.SIGKILL)
        rest = list(outcomes)
        assert {each.cell.seed for each in [first, *rest]} == {1000, 1001, 1002, 1003}
        assert all(isinstance(each, Done) for each in rest)

    def test_leaving_early_ends_the_processes(self, engine: Local) -> None:
        outcomes = engine.run(cells_of(Attack(b=60, m=130, data=Source("digits"), search=Gated(starts=10**6)), 2))
        threading.Timer(4.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            list(outcomes)
        assert [pid for pid in children(os.getpid()) if "spawn_main" in command(pid)] == []


class Terminated:
    """An engine that gets SIGTERM at a moment that Python's locks do not bear, and once more while it ends."""

    ended = False

    def run(self, cells: Sequence[Cell]) -> Generator[Outcome, None, None]:
        del cells
        event = threading.Event()
        condition: Any = vars(event)["_cond"]
        release = condition._release_save

        def released() -> None:
            release()
            os.kill(os.getpid(), signal.SIGTERM)

        condition._release_save = released
        event.wait(60)
        yield from ()

    def close(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        self.ended = True


def test_sigterm_ends_a_run_as_ctrl_c_does_whenever_and_however_often_it_comes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    engine = Terminated()
    with pytest.raises(typer.Exit) as left, open_session(tmp_path / "cells.sqlite", engine) as opened:
        opened.measure(cells_of(SETTING, 3))
    assert "interrupted: 3 cells are missing. Run the same command to continue" in capsys.readouterr().err
    assert left.value.exit_code == 130
    assert engine.ended
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


class OtherVersion:
    """An engine whose worker runs another version of the code."""

    def run(self, cells: Sequence[Cell]) -> Generator[Outcome, None, None]:
        return (Done(cell, {"exact": True}, {}, code="0+other") for cell in cells)

    def close(self) -> None: ...


def test_results_of_another_code_version_are_not_stored(tmp_path: Path) -> None:
    with Store(tmp_path / "cells.sqlite") as store:
        failed = run(cells_of(SETTING, 2), store, OtherVersion())
    assert ["install the same version" in each.why for each in failed] == [True, True]
    assert count(tmp_path / "cells.sqlite") == 0


@pytest.fixture
def two_nodes() -> Iterator[Any]:
    """A head and another node, each with one CPU, as processes of this machine."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'spearpp[ray]'")
    import ray
    from ray.cluster_utils import Cluster

    # Ray checks its nodes more often than by default, and so notices sooner that one is gone.
    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": quick}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_ray_gives_what_local_gives_though_a_node_dies(
    two_nodes: Any, tmp_path: Path, undisturbed: dict[int, dict[str, Any]]
) -> None:
    import ray

    cells = cells_of(SLOWER, 6)
    engine = Ray()
    done = []
    assert ray.cluster_resources()["CPU"] == 2
    with Store(tmp_path / "cells.sqlite") as store:
        for outcome in engine.run(cells):
            assert isinstance(outcome, Done), outcome
            store.put(outcome.cell, outcome.result, outcome.versions)
            done.append(outcome.cell.seed)
            if len(done) == 3:  # in mid-run: the node dies with what it is doing
                (other,) = [node for node in two_nodes.list_all_nodes() if node is not two_nodes.head_node]
                two_nodes.remove_node(other, allow_graceful=False)
        wait_until(lambda: ray.cluster_resources()["CPU"] == 1)
        assert sorted(done) == [cell.seed for cell in cells]
        assert held(store, cells) == undisturbed


def test_a_cluster_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'spearpp[ray]'")
    with Store(tmp_path / "cells.sqlite") as store, pytest.raises(OptionError, match=r"no Ray at 127\.0\.0\.1:1"):
        run(cells_of(SETTING, 1), store, Ray("127.0.0.1:1"))


def wait_until(reached: Any, seconds: float = 60.0) -> None:
    """A bound for what cannot be waited on otherwise; not a measurement."""
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


def count(path: Path) -> int:
    try:
        with sqlite3.connect(path) as raw:
            return int(raw.execute("SELECT count(*) FROM cells").fetchone()[0])
    except sqlite3.OperationalError:
        return 0


def children(parent: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(status.parent.name))
    return found


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_a_store_tells_what_it_is_made_of(tmp_path: Path) -> None:
    cell = Cell(SETTING, 1)
    with Store(tmp_path / "new" / "cells.sqlite") as store:
        store.put(cell, {"exact": True}, {"torch": "1"})
        found = store.get(cell)
    assert found is not None
    with sqlite3.connect(tmp_path / "new" / "cells.sqlite") as raw:
        (setting,) = raw.execute("SELECT setting FROM cells").fetchone()
    assert json.loads(setting)["b"] == 4
    assert "path" not in json.loads(setting)["data"]
