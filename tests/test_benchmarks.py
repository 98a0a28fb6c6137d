"""The check of ``make bench NAME=speed``: more work than the baseline fails, more time only warns."""

from dataclasses import replace

from benchmarks.speed import Row, compare

ROW = Row("cpu", 20, 200, 8, 8, start_steps=6400, operations=1e9, seconds=0.1, svds=1.5, products=3.0)
BASELINE = {ROW.name: {"start_steps": 6400.0, "operations": 1e9, "svds": 1.5}}


def test_as_much_work_as_before_passes() -> None:
    assert compare([ROW], BASELINE) == ([], [])
    assert compare([replace(ROW, start_steps=1.19 * 6400, operations=1.19e9)], BASELINE) == ([], [])


def test_a_fifth_more_work_fails() -> None:
    for worse in (replace(ROW, start_steps=1.21 * 6400), replace(ROW, operations=1.21e9)):
        failed, warned = compare([worse], BASELINE)
        assert len(failed) == 1
        assert not warned


def test_more_time_warns() -> None:
    failed, warned = compare([replace(ROW, svds=2.0)], BASELINE)
    assert not failed
    assert "svds" in warned[0]


def test_a_batch_that_is_lost_fails() -> None:
    failed, _ = compare([replace(ROW, whole=7)], BASELINE)
    assert failed == ["cpu b=20 m=200: 7 of 8 batches recovered"]


def test_a_row_without_a_baseline_is_said() -> None:
    assert compare([replace(ROW, b=21)], BASELINE) == ([], ["cpu b=21 m=200 has no baseline"])
