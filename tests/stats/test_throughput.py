"""The statistics, against hand-made logs whose answers are known."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runbook
from runbook.errors import UsageError
from runbook.folder.launch.evidence import read_training_csv
from runbook.records.evidence import TrainingLog
from runbook.stats import FUSED_PLAN, Decided
from runbook.stats.arms import complete_rounds, non_inferiority
from runbook.stats.launches import scaling
from runbook.stats.series import memory_plateau, steady
from runbook.stats.throughput import (
    StatisticsError,
    WindowTooShort,
    block_step_times,
    block_throughputs,
    cadence,
    effective,
    last_window,
    measured_rows,
    step_times,
    typical,
    warmup_cut,
)
from tests.factory.files import HEADER, row
from tests.factory.tables import table


def log_of(folder: Path, *lines: str) -> TrainingLog:
    path = folder / "training.csv"
    path.write_text("\n".join([HEADER, *lines]) + "\n")
    return read_training_csv(path, relative_to=folder)


def steps(*times: float, first: int = 1, **fields: object) -> list[str]:
    return [row(first + i, dt_s=dt, **fields) for i, dt in enumerate(times)]  # type: ignore[arg-type]


def test_warm_up_rows_do_not_count(tmp_path: Path) -> None:
    lines = steps(*[9.0] * 3, warmup=1) + steps(*[0.1] * 50, first=4)
    assert last_window(log_of(tmp_path, *lines)).value == pytest.approx(5120)
    with pytest.raises(WindowTooShort):
        last_window(log_of(tmp_path, *lines[:-1]))


def test_a_block_that_was_cut_short_is_no_sample(tmp_path: Path) -> None:
    lines = steps(*[0.1] * 4, arm="a") + steps(*[0.1] * 3, first=5, arm="b")
    assert block_throughputs(log_of(tmp_path, *lines))["arm"].tolist() == ["a"]


@table(__file__, "warm_up")
def test_warm_up_cut(times: str, cut: int) -> None:
    runs = [word.partition("*") for word in times.split()]
    long = [float(one) for some, _, often in runs for one in some.split(",") * int(often or 1)]
    assert warmup_cut(0.25 * np.array(long)) == cut


def test_rates_and_steady_cut_the_same_warm_up(tmp_path: Path) -> None:
    """Forty slow steps of a hundred were 40 steps of warm-up to one rule and 25 to the other."""
    times = [0.3] * 40 + [0.1] * 60
    decision = steady(times)
    assert "75 steps after warm-up" in decision.reason
    window = effective(log_of(tmp_path, *steps(*times))).window
    assert window is not None and window.first_step == 26


# Which rows a statistic counts: the last window, warm-up, arms and blocks, at their limits.


def every(folder: Path, k: int, rows: int) -> TrainingLog:
    """A row per k steps, the rates 1, 2, 3, ..."""
    lines = [row(k * at, dt_s=512 / at) for at in range(1, rows + 1)]
    return log_of(folder, *lines)


@pytest.mark.parametrize("rows", [50, 60])
def test_a_window_ends_with_the_last_row(tmp_path: Path, rows: int) -> None:
    found = last_window(every(tmp_path, 1, rows))
    rates = np.arange(rows - 49, rows + 1)
    assert (found.n, found.value) == (50, pytest.approx(rates.mean()))
    assert found.stdev == pytest.approx(rates.std())
    assert str(found.window) == f"steps {rows - 49}-{rows}"


@pytest.mark.parametrize(("k", "rows", "available"), [(1, 49, 49), (20, 60, 3)])
def test_a_window_is_counted_in_steps(tmp_path: Path, k: int, rows: int, available: int) -> None:
    """The documented recipe gave 11 rows of a 200-step run, warm-up included, as its last 50."""
    with pytest.raises(WindowTooShort) as caught:
        last_window(every(tmp_path, k, rows))
    assert caught.value.available == available


def test_the_cadence_of_a_log(tmp_path: Path) -> None:
    frames = [log_of(tmp_path, *[row(s) for s in at]).frame for at in ([7], [1, 3], [1, 2, 3, 9])]
    assert [cadence(frame) for frame in frames] == [1, 2, 1]
    assert cadence(frames[0][:0]) == 1
    assert cadence(frames[1][::-1]) == 1


def test_an_arm_of_several(tmp_path: Path) -> None:
    lines = [*steps(9.0, arm="a", warmup=1), *steps(0.1, 0.2, first=2, arm="a")]
    lines += [*steps(0.4, first=4, arm="b"), *steps(0.5, first=5, arm="a", block=1)]
    log = log_of(tmp_path, *lines)
    for arm, found in ((None, [2, 3, 4, 5]), ("a", [2, 3, 5]), ("c", [])):
        assert measured_rows(log, arm=arm)["step"].tolist() == found
    assert step_times(log).tolist() == [0.1, 0.2, 0.4, 0.5]
    assert effective(log, arm="a").value == pytest.approx(1536 / 0.8)
    assert effective(log, arm="a").name == "toks_per_s_effective[a]"
    window = effective(log).window
    assert window is not None and (window.first_step, window.last_step) == (2, 5)


def test_the_typical_pace_has_no_pauses(tmp_path: Path) -> None:
    """Of eight steps after warm-up seven take 1 s and one takes 3 s."""
    log = log_of(tmp_path, *steps(9.0, *[1.0] * 5, 3.0, 1.0, 1.0))
    assert (typical(log).value, typical(log).n) == (pytest.approx(512.0), 8)
    assert effective(log).value == pytest.approx(512 * 8 / 10)


def test_a_step_takes_time(tmp_path: Path) -> None:
    lines = [row(1), row(2), row(3).replace(",0.125,", ",0.0,"), row(4)]
    with pytest.raises(StatisticsError, match="step times that are not above zero"):
        effective(log_of(tmp_path, *lines))


def test_columns_that_are_missing_are_named(tmp_path: Path) -> None:
    log = log_of(tmp_path, row(1))
    log = replace(log, frame=log.frame.drop(columns=["arm", "block"]))
    with pytest.raises(StatisticsError, match="no column arm;"):
        measured_rows(log, arm="a")


def test_the_step_times_of_whole_rounds(tmp_path: Path) -> None:
    lines, step = [], 1
    for block, order in ((1, "ba"), (0, "ab"), (2, "a")):
        for arm in order:
            dt = 0.1 * (1 + block) + (0.01 if arm == "b" else 0.0)
            lines += [*steps(9.0, first=step, arm=arm, block=block, warmup=1)]
            lines += [*steps(dt, 2 * dt, first=step + 1, arm=arm, block=block)]
            step += 3
    log = log_of(tmp_path, *lines)
    whole, left_out = complete_rounds(block_throughputs(log))
    times = block_step_times(log, whole)
    assert left_out == 1
    assert times == pytest.approx(
        np.array([[[0.1, 0.2], [0.11, 0.22]], [[0.2, 0.4], [0.21, 0.42]]])
    )
    assert block_throughputs(log_of(tmp_path)).empty


# What a caller may set, and what a decision says to code; its reason is for people.

TIMES = np.full(400, 0.01)
PAIR = ([1.0, 1.1, 1.2], [1.0, 1.1, 1.2])

# The least value above which, and the greatest below which, each is allowed.
RANGES: list[tuple[str, Callable[[float], Any], float, float]] = [
    ("limit", lambda x: scaling(*PAIR, 2, limit=x), 0.0, 1.05),
    ("margin", lambda x: non_inferiority(*PAIR, margin=x, plan=FUSED_PLAN), 0.0, 0.5),
    ("tolerance", lambda x: steady(TIMES, tolerance=x), 0.0, 1.0),
    ("stall_limit", lambda x: steady(TIMES, stall_limit=x), 0.0, 1.0),
]


@pytest.mark.parametrize(("name", "call", "low", "high"), RANGES)
def test_a_number_has_to_lie_inside_its_range(
    name: str, call: Callable[[float], Any], low: float, high: float
) -> None:
    for value in (low + 1e-6, high - 1e-6):
        call(value)
    for value in (low, high, math.nan):
        with pytest.raises(UsageError, match=f"{name} is "):
            call(value)


def test_nobody_reads_an_outcome_out_of_a_reason() -> None:
    """An optimizer setting was exported if a sentence began with KEEP."""
    parsed = re.compile(r"reason\.(startswith|partition|split|find|index)\(|in \w+\.reason\b")
    root = Path(runbook.__file__).parents[1]
    # The launcher reads the reason that a trainer of any make gives for its end: that is text.
    inside = ("stats", "tools", "engine", "records", "cli")
    rooms = ("phases", "reports", *(f"runbook/{name}" for name in inside))
    files = [path for room in rooms for path in (root / room).rglob("*.py")]
    assert [path for path in files if parsed.search(path.read_text("utf-8"))] == []


# memory_plateau: a decision about one run's series.


def staircase(rate: float, rise: float, rows: int = 400) -> np.ndarray:
    """Memory of a healthy process on a CPU: it settles, and takes a few pages now and then."""
    random = np.random.default_rng(11)
    settled = 430 + 12 * (1 - np.exp(-np.arange(rows) / 60))
    steps = np.cumsum(random.random(rows) < rate / rise) * rise
    return np.asarray(settled + steps + random.choice([0.0, 0.1], rows))


def test_a_leak_that_goes_on_is_one_whatever_the_headroom() -> None:
    """The logits of a step kept: 7.5 GiB by step 50,000, of 8 that are allowed."""
    steps = np.arange(1, 401)
    healthy = staircase(0.01, 0.6)
    assert memory_plateau(steps, healthy, 50_000, 8_192).outcome is Decided.PASS
    leak = memory_plateau(steps, healthy + 0.149 * steps, 50_000, 16_384)
    assert leak.outcome is Decided.FAIL
    # What has stopped growing is none, however steeply it grew.
    stopped = healthy + 0.149 * np.minimum(steps, 200)
    assert memory_plateau(steps, stopped, 50_000, 16_384).outcome is Decided.PASS
    # To the end of a short run it is little.
    assert memory_plateau(steps, healthy + 0.149 * steps, 1200, 16_384).outcome is Decided.PASS


def test_a_projection_that_may_or_may_not_pass_the_limit_is_inconclusive() -> None:
    wild = 8000 + np.random.default_rng(0).normal(0, 20, 1200)
    decision = memory_plateau(np.arange(1200), wild, 50_000, 8_300)
    assert decision.outcome is Decided.INCONCLUSIVE
    assert decision.interval[0] < 8_300 < decision.interval[1]
