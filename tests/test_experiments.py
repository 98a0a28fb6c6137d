"""Settings, tables, intervals, reports and the frontier."""

import base64
import csv
import json
import math
import pickle
import re
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, t

from conftest import present
from spearpp import simulate
from spearpp.cli import main
from spearpp.errors import DataError, OptionError
from spearpp.experiments import (
    TABLES,
    Attack,
    Cell,
    Source,
    Store,
    StoreError,
    Training,
    cells_of,
    frontier_report,
    load,
    rendering,
    reproduce,
)
from spearpp.experiments.attack import pixels_of
from spearpp.experiments.cell import canonical, decode, encode
from spearpp.experiments.defence import AXES, Defence
from spearpp.experiments.frontier import Plan, measure_line, sentence
from spearpp.experiments.intervals import mean, wilson
from spearpp.experiments.rounds import RoundsAttack
from spearpp.plotting import Axis, Point, Series, draw
from spearpp.search import Gated, KernelSampling, ProjectedGradient, RiemannianAdam
from spearpp.search.losses import LogCosh
from spearpp.simulate import DPSGD, Cast, FedAvg, FedSGD, Quantise, SumOfClients, TopK

CPU = torch.device("cpu")
# (b, m, PSNR, accuracy), typed from the paper's LaTeX source.
L1 = [
    *((20, 200, 120.98, 95), (25, 200, 96.02, 77), (30, 200, 41.70, 25)),
    *((65, 1000, 125.18, 100), (100, 1000, 69.31, 41), (150, 1000, 10.42, 0)),
    *((100, 4000, 124.24, 100), (150, 4000, 120.86, 100), (210, 4000, 45.34, 7)),
]
LOGCOSH = [
    *((20, 200, 121.50, 98), (25, 200, 106.50, 86), (30, 200, 30.70, 12)),
    *((65, 1000, 54.98, 27), (100, 1000, 18.76, 0), (150, 1000, 12.24, 0)),
    *((100, 4000, 93.63, 92), (150, 4000, 32.63, 0), (210, 4000, 13.80, 0)),
]
PGD = [
    *((20, 200, 41.53, 25), (25, 200, 19.01, 0), (30, 200, 14.71, 0)),
    *((65, 1000, 93.91, 93), (100, 1000, 23.41, 0), (150, 1000, 12.06, 0)),
    *((100, 4000, 105.61, 100), (150, 4000, 104.46, 100), (210, 4000, 88.36, 77)),
]
L4 = [(15, 200, 83.02, 62), (20, 200, 14.29, 0)]


def rows(name: str, method: str) -> list[tuple[int, int, float, float]]:
    table = load(name, method="paper")
    return [
        (row.setting.b, row.setting.m, row.claim.psnr, row.claim.accuracy)
        for row in table.rows
        if row.name == method and row.claim is not None
    ]


class TestTables:
    def test_hold_every_row_of_the_paper(self) -> None:
        assert rows("table1", "LogCosh + rounding") == LOGCOSH
        assert rows("table1", "ℓ1 + RAdam") == rows("table2", "ℓ1 + RAdam") == L1
        assert rows("table1", "-ℓ4 + rounding") == L4
        assert rows("table2", "ℓ1 + PGD") == PGD
        assert rows("table3", "ℓ1 + RAdam") == [(20, 200, 31.90, 75), (150, 4000, 55.45, 88)]
        assert rows("table4", "ℓ1 + RAdam") == [(20, 200, 67.81, 75), (150, 4000, 63.71, 92)]
        assert rows("figure1", "ℓ1 + RAdam") == [(210, 4000, 45.34, 7)]
        assert [len(load(name, method="paper").rows) for name in TABLES[:4]] == [20, 18, 2, 2]

    def test_say_how_the_paper_measured(self) -> None:
        for name in TABLES[:4]:
            table = load(name, method="paper")
            assert table.batches == 100
            assert {row.setting.search.starts for row in table.rows} == {1_000_000}
            assert {row.setting.threshold for row in table.rows} == {25.0 if name in ("table3", "table4") else 90.0}
        clients = [row.setting.client for name in ("table3", "table4") for row in load(name, method="paper").rows]
        assert clients == [DPSGD(2.0, 1e-4), DPSGD(2.0, 1e-6), FedAvg(3, 5, 1e-2), FedAvg(15, 30, 1e-2)]
        by_width = {row.setting.m: row.setting.search for row in load("table1", method="paper").rows[:9]}
        losses = {m: search.loss for m, search in by_width.items() if isinstance(search, RiemannianAdam)}
        assert losses == {200: LogCosh(1 / 300), 1000: LogCosh(1 / 500), 4000: LogCosh(1 / 500)}
        assert isinstance(load("table2", method="paper").rows[0].setting.search, ProjectedGradient)
        spear = [row.setting for row in load("spear").rows if isinstance(row.setting.search, KernelSampling)]
        assert max(each.b for each in spear) == 12

    def test_set_our_search_beside_the_papers_best_once_for_each_setting(self) -> None:
        ours = [row for row in load("table1").rows if row.ours]
        claims = {(row.setting.b, row.setting.m): row.claim.accuracy for row in ours if row.claim}
        assert len(ours) == len(claims) == 10
        assert claims[20, 200] == 98
        assert claims[30, 200] == 25
        assert claims[210, 4000] == 7

    def test_are_cut_to_what_was_asked_for(self) -> None:
        small = load("table1", scale="small", method="paper", batches=2)
        assert {row.setting.m for row in small.rows} == {200}
        assert small.left_out == 12
        starts = load("table2", method="paper", widths=[200, 4000], starts={200: 7, 0: 9})
        assert {(row.setting.m, row.setting.search.starts) for row in starts.rows} == {(200, 7), (4000, 9)}
        with pytest.raises(OptionError, match="no row of width 7: it has"):
            load("table2", widths=[7])
        with pytest.raises(OptionError, match="table1, table2"):
            load("table9")


class TestIdentity:
    def test_one_setting_has_one_key_and_another_setting_or_seed_another(self) -> None:
        setting = Attack(b=4, m=60, client=DPSGD(2, 0.5))
        same = Attack(b=4, m=60, client=DPSGD(2.0, 0.5))
        moved = replace(setting, data=Source("cifar10", digest="d", path="/a"))
        assert Cell(setting, 1).key == Cell(same, 1).key
        assert Cell(moved, 1).key == Cell(replace(moved, data=replace(moved.data, path="/b")), 1).key
        others = [
            Cell(setting, 2),
            Cell(replace(setting, b=5), 1),
            Cell(replace(setting, search=Gated(starts=5)), 1),
            Cell(replace(setting, client=setting.client | TopK(0.5)), 1),
            Cell(replace(moved, data=replace(moved.data, digest="e")), 1),
        ]
        assert len({cell.key for cell in [Cell(setting, 1), *others]}) == 6

    @pytest.mark.parametrize(
        "setting",
        [
            Attack(b=4, m=60, search=KernelSampling(chunk=5), client=FedSGD() | Quantise(4) | Cast(torch.bfloat16)),
            Attack(b=4, m=60, search=RiemannianAdam(loss=LogCosh(0.1)), client=SumOfClients(FedAvg(1, 2, 0.1), 2)),
            Training(b=4, m=60, data=Source("table", label="x")),
        ],
    )
    def test_settings_survive_json(self, setting: Attack | Training) -> None:
        assert decode(json.loads(json.dumps(encode(setting)))) == setting
        assert pickle.loads(pickle.dumps(Cell(setting, 3))) == Cell(setting, 3)  # noqa: S301

    def test_json_makes_nothing_that_is_not_an_option(self) -> None:
        for text in ('{"type": "Popen"}', '{"type": "Gated", "nothing": 1}', "{}"):
            with pytest.raises(OptionError):
                decode(json.loads(text))
        with pytest.raises(OptionError, match="cannot be written"):
            canonical(Defence())


class TestStore:
    def test_keeps_the_first_result(self, tmp_path: Path) -> None:
        cell = cells_of(Attack(b=4, m=60), 1)[0]
        with Store(tmp_path / "a.sqlite") as one, Store(tmp_path / "a.sqlite") as two:
            assert one.put(cell, {"value": 1}, {})
            assert not two.put(cell, {"value": 2}, {})
            found = present(two.get(cell))
            assert found.result == {"value": 1}
            assert two.missing([cell, cell]) == []

    @pytest.mark.parametrize(
        "content", [b"not a database at all, but long enough to be taken for one" * 20, b"SQLite format 3\0"]
    )
    def test_refuses_what_is_no_store(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "a.sqlite").write_bytes(content)
        with pytest.raises(StoreError, match=r"a\.sqlite cannot be used as a store"):
            Store(tmp_path / "a.sqlite")
        assert (tmp_path / "a.sqlite").read_bytes() == content

    def test_refuses_the_database_of_something_else_and_of_the_future(self, tmp_path: Path) -> None:
        with sqlite3.connect(tmp_path / "a.sqlite") as other:
            other.execute("CREATE TABLE mine (x)")
        with pytest.raises(StoreError, match="something else"):
            Store(tmp_path / "a.sqlite")
        Store(tmp_path / "b.sqlite").close()
        with sqlite3.connect(tmp_path / "b.sqlite") as ours:
            ours.execute("PRAGMA user_version = 99")
        with pytest.raises(StoreError, match="format 99"):
            Store(tmp_path / "b.sqlite")
        with pytest.raises(StoreError, match="cannot be opened"):
            Store(tmp_path / "b.sqlite" / "c.sqlite")

    def test_a_damaged_page_is_one_clear_error(self, tmp_path: Path) -> None:
        path = tmp_path / "a.sqlite"
        with Store(path) as store:
            for cell in cells_of(Attack(b=4, m=60), 40):
                store.put(cell, {"value": "x" * 500}, {})
        content = bytearray(path.read_bytes())
        content[4096:] = b"\xff" * (len(content) - 4096)
        path.write_bytes(bytes(content))
        with pytest.raises(StoreError, match="damaged"), Store(path) as store:
            store.missing(cells_of(Attack(b=4, m=60), 1))


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_shares_have_wilsons_interval(case: tuple[int, int]) -> None:
    """At its ends, the share that was seen is 1.96 standard deviations away from the true share."""
    hits, trials = case
    ours = wilson(hits, trials)
    assert 0 <= ours.low <= ours.value == hits / trials <= ours.high <= 1
    for end in {ours.low, ours.high} - {0.0, 1.0}:
        assert abs(end - ours.value) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / trials), rel=1e-6)


def test_means_have_students_interval() -> None:
    values = [1.0, 2.0, 4.0, 8.0]
    low, high = t.interval(0.95, 3, loc=3.75, scale=torch.tensor(values).std().item() / 2)
    ours = mean(values)
    assert (ours.value, ours.low, ours.high) == pytest.approx((3.75, low, high), rel=1e-6)


class Ran(NamedTuple):
    """What a command printed, and its exit code."""

    exit_code: int
    stdout: str
    stderr: str


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str]) -> "RunCli":
    def run(arguments: list[str]) -> Ran:
        return Ran(main(arguments), *capsys.readouterr())

    return run


RunCli = Callable[[list[str]], Ran]


class TestCommands:
    def test_reproduce_measures_writes_and_resumes(self, tmp_path: Path, run_cli: RunCli) -> None:
        store, out = str(tmp_path / "cells.sqlite"), tmp_path / "out"
        asked = ["reproduce", "figure1", "--scale", "small", "--method", "gated", "--store", store, "--workers", "1"]
        done = run_cli([*asked, "--out", str(out)])
        assert done.exit_code == 0, done.stderr
        assert "figure1: 1 of 1 cells, 0 were already stored" in done.stderr
        assert "\x1b" not in done.stdout + done.stderr
        again = run_cli([*asked, "--out", str(out)])
        assert again.exit_code == 0
        assert "1 of 1 cells" not in again.stderr  # nothing was measured
        read = json.loads((out / "figure1.json").read_text())
        (row,) = read["rows"]
        assert (row["b"], row["m"], row["batches"], row["exact"]["value"]) == (24, 200, 1, 1.0)
        assert read["commits"]
        assert row["wrong"] == 0
        content = (out / "figure1-gated-b24-m200.png").read_bytes()
        assert base64.b64encode(content).decode() in (out / "figure1.html").read_text()
        self.check_picture(out / "figure1-gated-b24-m200.png", store)

    def check_picture(self, file: Path, store: str) -> None:
        """Originals over recoveries: equal up to rounding, and pictures of something."""
        import numpy
        from PIL import Image

        with Image.open(file) as picture:
            pixels = torch.from_numpy(numpy.array(picture)).int()
        assert pixels.shape == (2 * 68, 21 * 34, 3)
        line = pixels[:68]
        assert int((line[1:33] - line[33:65]).abs().max()) <= 1
        assert float(line[1:33].float().std()) > 20
        with Store(store) as opened:
            stored = opened.get(cells_of(load("figure1", scale="small", method="gated").rows[0].setting, 1)[0])
        assert stored is not None
        originals, recovered = pixels_of(stored.result["images"], 24)
        assert float((originals - recovered).abs().max()) <= 1.001 / 255
        first = simulate.photographs(24, generator=torch.Generator().manual_seed(1000))
        assert torch.allclose(originals, first.normalisation.undo(first.inputs).clamp(0, 1), atol=0.51 / 255)

    def test_status_measures_nothing(self, tmp_path: Path, run_cli: RunCli) -> None:
        done = run_cli(["reproduce", "table3", "--status", "--store", str(tmp_path / "new.sqlite")])
        assert done.exit_code == 0, done.stderr
        assert " 0 of " in done.stdout
        assert "400 batches are not measured yet" in done.stdout
        assert "75 %" in done.stdout  # the paper's number is there at once

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["reproduce", "table9"], "the paper's experiments are table1"),
            (["reproduce", "table1", "--data", "nowhere"], "expected photographs"),
            (["reproduce", "table1", "--starts", "many"], "a number, or one per width"),
            (["reproduce", "table1", "--address", "auto"], "add --engine ray"),
            (["reproduce", "table1", "--device", "cuda:77"], "CUDA devices here"),
            (["frontier", "--axis", "colour"], "expected one of batch, width, noise"),
            (["frontier", "--axis", "bits=a"], "comma-separated numbers"),
            (["frontier", "--axis", "steps=1.5"], "positive whole numbers"),
            (["frontier", "--axis", "noise=0"], "noise=0: expected positive numbers"),
            (["frontier", "--axis", "keep=2"], "keep=2: noise must be at least 0, and keep within (0, 1]"),
            (["frontier", "--axis", "noise", "--axis", "bits"], "the second has values"),
            (["frontier", "--axis", "noise", "--steps", "3"], "go with steps=1"),
        ],
    )
    def test_bad_input_is_one_line_and_exit_code_2(
        self, tmp_path: Path, run_cli: RunCli, arguments: list[str], message: str
    ) -> None:
        done = run_cli([*arguments, "--store", str(tmp_path / "cells.sqlite")])
        assert done.exit_code == 2, done.stderr
        assert done.stderr.startswith("error: ")
        assert message in done.stderr
        assert done.stderr.strip().splitlines()[1:] == [f"hint: spearpp {arguments[0]} --help shows examples"]

    def test_rounds_of_one_client_are_an_axis(self) -> None:
        pytest.importorskip("opacus", reason="Opacus is not installed: pip install 'spearpp[dp]'")
        axis = AXES["rounds"]
        once, often = (axis.on(Defence(batch=10, width=24, noise=0.5), rounds) for rounds in (1, 8))
        attack = often.attack(data=Source("digits"))
        assert isinstance(attack, RoundsAttack)
        assert (attack.b, attack.m, attack.rounds) == (10, 24, 8)
        first, composed = once.epsilon(rounds=60, train=100), often.epsilon(rounds=60, train=100)
        assert first is not None
        assert composed is not None
        assert first < composed < 8 * first, "ε grows with the rounds, and by composition slower than their number"
        with pytest.raises(OptionError, match="the rounds of one client"):
            Defence(clients=2, rounds=3)

    def test_frontier_ends_in_a_sentence_and_a_plot(self, tmp_path: Path, run_cli: RunCli) -> None:
        asked = ["frontier", "--axis", "bits=2,16", "--axis", "batch=4,6", "-m", "100"]
        asked += ["--seeds", "3", "--trainings", "1", "--rounds", "20", "--starts", "256", "--workers", "1"]
        done = run_cli([*asked, "--store", str(tmp_path / "c.sqlite"), "--out", str(tmp_path / "out")])
        assert done.exit_code == 0, done.stderr
        assert re.search(r"at b=4, m=100 recovery to 25 dB stops at bits ≤ 2 \(0 of 3 batches", done.stdout)
        assert "not measurable with 1 training run of 20 rounds" in done.stdout
        assert "accuracy without this defence" in (tmp_path / "out" / "frontier-bits-batch-0.svg").read_text()
        assert "| 4 | 100 | none |" in (tmp_path / "out" / "frontier-bits-batch.md").read_text()
        read = json.loads((tmp_path / "out" / "frontier-bits-batch.json").read_text())
        assert [line["stop"] for line in read["lines"]] == [2.0, 2.0]
        assert [point["any"]["value"] for point in read["lines"][0]["points"]] == [1.0, 0.0]
        for name in ("frontier-bits-batch.svg", "frontier-bits-batch-0.svg", "frontier-bits-batch-1.svg"):
            drawn = (tmp_path / "out" / name).read_text()
            assert drawn.startswith("<svg")
            assert drawn.count("<circle") >= 2


def test_a_plot_keeps_its_legend_and_its_intervals_clear_of_each_other() -> None:
    marks = tuple(Point(x, 1.0, 0.7, 1.0) for x in (1.0, 10.0))
    drawn = draw("t", Axis("x"), Axis("share", least=0, most=1), [Series("one", marks), Series("two", marks)])
    names = [float(y) for y in re.findall(r'y="([\d.]+)" fill="#[^"]*">(?:one|two)<', drawn)]
    lowest = float(re.findall(r"M76 ([\d.]+)H", drawn)[0])  # where the share is 0
    assert lowest < min(names) < max(names) < float(re.findall(r'viewBox="0 0 720 (\d+)"', drawn)[0])
    bars = re.findall(r'<path d="M([\d.]+) [\d.]+V[\d.]+" stroke="#(?!e6e6e6)', drawn)
    assert len(bars) == len(set(bars)) == 4


def test_reports_say_what_was_measured_in_every_form(tmp_path: Path) -> None:
    table = load("table3", method="paper", batches=4)
    result = {
        "b": 20,
        "exact": False,
        "with_masks": 33.0,
        "certified": 0,
        "wrongly_certified": 0,
        "starts": 7,
        "seconds": 2.0,
    }
    with Store(tmp_path / "a.sqlite") as store:
        for index, cell in enumerate(cells_of(table.rows[0].setting, 3)):
            store.put(cell, result | {"accurate": index > 0, "mean_psnr": 30.0 + index}, {"device": "cpu: <x>"})
        found = reproduce.collect(table, store)
    assert found.results[0].batches < found.results[0].wanted
    rendered = rendering.page(found)
    line = dict(rendered.sections[0].rows[0])
    low, high = binomtest(2, 3).proportion_ci(0.95, "wilson")
    assert line["accuracy (95 %)"] == f"67 % ({100 * low:.0f} to {100 * high:.0f})"
    assert line["PSNR (95 %)"].startswith("31.0 (28.5 to 33.5)")
    assert [line[name] for name in ("batches", "starts: at most", "median")] == ["3 of 4", "1,000,000", "7"]
    assert line["seconds"] == "2.00"
    text, page = rendered.markdown(), rendered.html()
    for shown in (*line, *line.values(), "5 batches are not measured yet"):
        assert shown in text
        assert shown in page
    assert "cpu: &lt;x&gt;" in page
    assert "<x>" not in page
    plain = reproduce.as_json(found)["rows"][0]
    assert plain["accuracy"]["low"] == pytest.approx(low)
    assert plain["paper"] == {"psnr": 31.9, "accuracy": 75}
    assert plain["each_batch"]["mean_psnr"] == [30.0, 31.0, 32.0]
    json.dumps(plain, allow_nan=False)


class TestDefences:
    def test_each_dial_reaches_the_client(self) -> None:
        def turned(name: str, value: float) -> Attack:
            setting = AXES[name].on(Defence(batch=6, width=60), value).attack(data=Source())
            assert isinstance(setting, Attack)
            return setting

        assert turned("batch", 9).b == 9
        assert turned("width", 33).m == 33
        assert turned("noise", 0.5).client == DPSGD(2.0, 0.5)
        assert turned("clip", 0.5).client == DPSGD(0.5, 0.0)
        assert turned("steps", 3).client == FedAvg(3, 6, 1e-2)
        assert turned("lr", 0.3).client == FedAvg(1, 6, 0.3)
        assert turned("keep", 0.5).client == FedSGD() | TopK(0.5)
        assert turned("bits", 4).client == FedSGD() | Quantise(4)
        assert turned("clients", 3).client == SumOfClients(FedSGD(), 3)
        assert turned("clients", 3).b == 18
        assert len(AXES) == 10  # the tenth is ``rounds``, which another kind of attack measures

    def test_epsilon_is_the_accountants(self) -> None:
        defence = Defence(batch=50, noise=0.04, clip=1.0)  # σ b / C = 2
        theirs = simulate.OpacusDPSGD(1.0, 2.0, 0.05).epsilon(steps=30, delta=1e-3)
        assert defence.epsilon(rounds=30, train=1000) == pytest.approx(theirs)
        assert Defence().epsilon(rounds=30, train=1000) is None

    def test_a_search_finds_the_place_that_was_planted(self, tmp_path: Path) -> None:
        """Results are put into the store by a rule that is known, so the place is."""
        measured: list[int] = []
        device = {"device": "cpu: x"}

        def rule(cells: object) -> None:
            assert isinstance(cells, list)
            for cell in store.missing(cells):
                assert isinstance(cell.setting, Attack)
                client = cell.setting.client
                leaks = not isinstance(client, DPSGD) or client.noise < 3e-4
                store.put(cell, {"b": 8, "recovered": 8 * leaks, "exact": leaks, "mean_psnr": 60.0 * leaks}, device)
                measured.append(cell.seed)

        plan = Plan(seeds=5, trainings=0)
        with Store(tmp_path / "a.sqlite") as store:
            found = measure_line(AXES["noise"], None, Defence(batch=8, width=100), plan, store, rule)
        assert 3e-4 <= present(found.stop).defence.noise < 3e-4 * 1.3
        assert len(measured) < 5 * 20
        noises = [point.defence.noise for point in found.points]
        assert noises == sorted(noises)
        assert re.match(
            r"at b=8, m=100, C=2 recovery to 25 dB stops at σ ≥ 0\.0003\d* \(0 of 5 batches", sentence(found)
        )
        assert "| σ |" in frontier_report.page([found], "a").markdown()
        assert frontier_report.as_json([found])["devices"] == ["cpu: x"]
        assert "on cpu: x." in frontier_report.page([found], "a").markdown()

    def test_a_dial_that_falls_does_not_stop_anything_down_to_its_end(self, tmp_path: Path) -> None:
        def leak(cells: Iterable[Cell]) -> None:
            for cell in cells:
                store.put(cell, {"b": 8, "recovered": 8, "exact": True, "mean_psnr": 60.0}, {})

        with Store(tmp_path / "a.sqlite") as store:
            found = measure_line(
                AXES["keep"], None, Defence(batch=8, width=100), Plan(seeds=2, trainings=0), store, leak
            )
        assert "recovery to 25 dB does not stop down to share kept = 0.001: 100% of 2 batches" in sentence(found)

    def test_noise_costs_accuracy(self) -> None:
        free, noisy = (
            Training(b=16, m=64, depth=1, client=client, data=Source("digits")).measure(0, CPU)["accuracy"]
            for client in (FedSGD(), DPSGD(2.0, 3.0))
        )
        assert free > 0.5 > noisy


class TestFiles:
    def write(self, path: Path, lines: Iterable[Iterable[object]]) -> Path:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(lines)
        return path

    def test_a_table_becomes_numbers_on_their_own_range(self, tmp_path: Path) -> None:
        records: list[list[object]] = [["age", "town", "sick"], [20, "A", "no"], [40, "B", "yes"], [30, "A", "no"]]
        loaded = simulate.table(self.write(tmp_path / "a.csv", records))
        assert loaded.feature_names == ("age", "town=A", "town=B")
        assert torch.equal(loaded.unit, torch.tensor([[0.0, 1, 0], [1, 0, 1], [0.5, 1, 0]]))
        assert loaded.labels.tolist() == [0, 1, 0]
        other = simulate.table(tmp_path / "a.csv", label="town")
        assert other.labels.tolist() == [0, 1, 0]
        assert other.feature_names == ("age", "sick=no", "sick=yes")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "holds 0 columns"),
            ("a,b\n1\n", "record 2 of .* has 1 fields"),
            ("a,a\n1,2\n", "two columns with the same name"),
            ("a\n1\n", "at least one more"),
            ("a,b\n", "and a record"),
            ("a,b\n" + "".join(f"x{i},0\n" for i in range(101)), "has 101 different values"),
            ('a,b\n"1,2\n', "not a readable CSV"),
        ],
    )
    def test_a_bad_table_is_one_error(self, tmp_path: Path, text: str, message: str) -> None:
        (tmp_path / "a.csv").write_text(text)
        with pytest.raises(DataError, match=message):
            simulate.table(tmp_path / "a.csv")

    def test_a_folder_of_images_is_read_by_class(self, tmp_path: Path) -> None:
        from PIL import Image

        for name, colour in (("cat", (255, 0, 0)), ("dog", (0, 0, 255))):
            (tmp_path / "set" / name).mkdir(parents=True)
            for index in range(3):
                Image.new("RGB", (40 + index, 50), colour).save(tmp_path / "set" / name / f"{index}.png")
        source = Source.parse(str(tmp_path / "set"))
        assert (source.kind, len(source.digest)) == ("folder", 16)
        batch = source.draw(6, torch.Generator().manual_seed(0))
        unit = batch.normalisation.undo(batch.inputs).reshape(6, 3, 32, 32)
        assert torch.allclose(unit[batch.labels == 1].mean((0, 2, 3)), torch.tensor([0.0, 0.0, 1.0]), atol=1e-6)
        (tmp_path / "set" / "dog" / "3.png").write_bytes(b"no picture")
        simulate.image_folder.cache_clear()
        with pytest.raises(DataError, match=r"3\.png is not a readable image"):
            simulate.image_folder(tmp_path / "set")

    def test_a_file_that_changed_is_not_taken_for_the_one_planned_with(self, tmp_path: Path) -> None:
        path = self.write(tmp_path / "a.csv", [["x", "y"], *([index, index % 2] for index in range(20))])
        source = Source.parse(str(path))
        assert source.draw(5, torch.Generator().manual_seed(0)).inputs.shape == (5, 1)
        with pytest.raises(DataError, match="not the data this experiment was planned with"):
            replace(source, digest="0" * 16).draw(5, torch.Generator().manual_seed(0))

    def test_cifar_is_known_by_its_images(self, cifar_path: Path) -> None:
        source = Source.parse(str(cifar_path))
        assert source.kind == "cifar10"
        ours = source.draw(3, torch.Generator().manual_seed(5))
        theirs = simulate.cifar10(3, path=cifar_path, generator=torch.Generator().manual_seed(5))
        assert torch.equal(ours.inputs, theirs.inputs)
