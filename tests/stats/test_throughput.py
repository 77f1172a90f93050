"""The statistics, against hand-made logs whose answers are known."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runbook.folder.launch.evidence import read_training_csv
from runbook.records.evidence import TrainingLog
from runbook.stats.steady import stall_share, steady
from runbook.stats.throughput import (
    MissingColumn,
    StatisticsError,
    WindowTooShort,
    block_throughputs,
    effective,
    last_window,
    step_times,
    time_lost,
    typical,
    warmup_cut,
)
from runbook.tools.inspect.folder import inspect_path
from tests.folder.files import HEADER, legacy, row


def log_of(folder: Path, *lines: str) -> TrainingLog:
    path = folder / "training.csv"
    path.write_text("\n".join([HEADER, *lines]) + "\n")
    return read_training_csv(path, relative_to=folder)


def steps(*times: float, first: int = 1, **fields: object) -> list[str]:
    return [row(first + i, dt_s=dt, **fields) for i, dt in enumerate(times)]  # type: ignore[arg-type]


def test_last_window_is_the_documented_statistic(tmp_path: Path) -> None:
    times = [0.1 + 0.001 * (i % 7) for i in range(80)]
    got = last_window(log_of(tmp_path, *steps(*times)))
    rates = [512 / t for t in times][-50:]
    assert got.value == pytest.approx(statistics.mean(rates), rel=1e-12)
    assert got.stdev == pytest.approx(statistics.pstdev(rates), rel=1e-9)
    assert (got.n, str(got.window), got.path, got.unit) == (
        50,
        "steps 31-80",
        "training.csv",
        "tok/s",
    )


def test_a_short_run_is_no_shorter_window(tmp_path: Path) -> None:
    with pytest.raises(WindowTooShort) as caught:
        last_window(log_of(tmp_path, *steps(*[0.1] * 49)))
    assert (caught.value.available, caught.value.wanted) == (49, 50)


def test_warm_up_rows_do_not_count(tmp_path: Path) -> None:
    lines = steps(*[9.0] * 3, warmup=1) + steps(*[0.1] * 50, first=4)
    assert last_window(log_of(tmp_path, *lines)).value == pytest.approx(5120)
    with pytest.raises(WindowTooShort):
        last_window(log_of(tmp_path, *lines[:-1]))


def test_a_row_per_20_steps_has_no_50_step_window(tmp_path: Path) -> None:
    """The documented recipe gave 11 rows of a 200-step run, warm-up included, as its last 50."""
    path = tmp_path / "training.csv"
    path.write_text(legacy(80))
    log = read_training_csv(path, relative_to=tmp_path)
    with pytest.raises(WindowTooShort) as caught:
        last_window(log)
    assert caught.value.available == 3
    with pytest.raises(MissingColumn, match="dt_s"):
        typical(log)


def test_typical_effective_and_time_lost(tmp_path: Path) -> None:
    times = [3.0, *[0.1] * 30, 2.0, *[0.1] * 30]
    log = log_of(tmp_path, *steps(*times))
    assert typical(log).value == pytest.approx(5120)
    assert str(typical(log).window) == "steps 2-62"
    assert effective(log).value == pytest.approx(512 * 61 / (60 * 0.1 + 2.0))
    assert time_lost(log).value == pytest.approx(1 - (61 / 8.0) / 10)


def test_time_lost_is_no_stall(tmp_path: Path) -> None:
    """Two numbers had one name: 24 % and 25 % of the same run, 6 % and 0 % of the next."""
    paused = [3.0, *[0.1] * 30, 2.0, *[0.1] * 30]
    lost = time_lost(log_of(tmp_path, *steps(*paused)))
    assert (lost.name, lost.value) == ("time_lost", pytest.approx(0.2375))
    assert stall_share(np.array(paused[1:])) == pytest.approx(2.0 / 8.0)
    limping = [3.0, *([0.1] * 9 + [0.104]) * 6]
    lost = time_lost(log_of(tmp_path, *steps(*limping)))
    assert lost.value == pytest.approx(1 - 1.0 / 1.004)
    assert stall_share(np.array(limping[1:])) == 0


def test_effective_is_not_the_mean_of_rates(tmp_path: Path) -> None:
    """Three windows of report v4's bucket table: 566 is the mean of its rates, 438 is the truth."""
    rates = [297.0, 835.0]
    log = log_of(tmp_path, *[row(i, dt_s=512 / r) for i, r in enumerate(rates, start=1)])
    assert effective(log).value == pytest.approx(438.2, abs=0.1)
    assert statistics.mean(rates) == 566


def test_arms_and_blocks(tmp_path: Path) -> None:
    lines, step = [], 1
    for block, order in enumerate([("a", "b"), ("b", "a")]):
        for arm in order:
            dt = {"a": 0.1, "b": 0.2}[arm] * (1 + block)
            lines += steps(5.0, first=step, arm=arm, block=block, warmup=1)
            lines += steps(*[dt] * 4, first=step + 1, arm=arm, block=block)
            step += 5
    log = log_of(tmp_path, *lines)
    table = block_throughputs(log)
    assert list(table.columns) == ["arm", "block", "value"]
    assert {(a, b): round(v) for a, b, v in table.itertuples(index=False)} == {
        ("a", 0): 5120,
        ("b", 0): 2560,
        ("a", 1): 2560,
        ("b", 1): 1280,
    }
    assert step_times(log, arm="a").tolist() == [0.1] * 4 + [0.2] * 4
    assert last_window(log, n=8, arm="a").n == 8
    assert effective(log, arm="b", block=1).value == pytest.approx(1280)
    assert last_window(log, n=8, arm="a").name == "toks_per_s_last8[a]"


def test_a_block_that_was_cut_short_is_no_sample(tmp_path: Path) -> None:
    lines = steps(*[0.1] * 4, arm="a") + steps(*[0.1] * 3, first=5, arm="b")
    assert block_throughputs(log_of(tmp_path, *lines))["arm"].tolist() == ["a"]


def test_no_row_or_no_time_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(WindowTooShort):
        effective(log_of(tmp_path, *steps(*[1.0] * 3, warmup=1)))
    line = row(1).replace(",0.125,", ",0.0,")
    with pytest.raises(StatisticsError, match="above zero"):
        effective(log_of(tmp_path, line, row(2)))


@pytest.mark.parametrize(
    ("times", "cut"),
    [
        ([0.1] * 3, 0),
        ([0.1] * 4, 1),
        ([5.0] + [0.1] * 40, 1),
        ([5.0, 4.0, 3.0, 1.0] + [0.1] * 40, 4),
        ([0.3] * 10 + [0.1] * 40, 10),
        ([0.1] * 20 + [3.0] + [0.1] * 20, 1),
        ([0.3] * 20 + [0.1] * 20, 10),
        ([0.3] * 40 + [0.1] * 60, 25),
        ([0.05] * 10 + [0.1] * 40, 1),
        ([5.0] * 2 + [1.0] * 10, 2),
    ],
)
def test_warm_up_cut(times: list[float], cut: int) -> None:
    assert warmup_cut(np.array(times)) == cut


@given(st.lists(st.floats(1e-6, 1e3), max_size=60))
def test_the_cut_leaves_at_least_three_quarters(times: list[float]) -> None:
    assert 0 <= warmup_cut(np.array(times)) <= len(times) // 4


def test_rates_and_steady_cut_the_same_warm_up(tmp_path: Path) -> None:
    """Forty slow steps of a hundred were 40 steps of warm-up to one rule and 25 to the other."""
    times = [0.3] * 40 + [0.1] * 60
    decision = steady(times)
    assert decision.details["warmup_steps"] == 25
    window = effective(log_of(tmp_path, *steps(*times))).window
    assert window is not None and window.first_step == 26
    (rows,) = inspect_path(tmp_path).directories
    assert rows.training is not None and rows.training.segments[0].warmup_rows == 25
