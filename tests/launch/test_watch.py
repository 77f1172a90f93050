"""Following ranks: what a growing file says and costs, and when a line came, by which clock."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from runbook.accounts.clocks import ARRIVAL_S
from runbook.accounts.tables import written_account
from runbook.launch.end import rank_exits
from runbook.launch.nodes.files import Job
from runbook.launch.nodes.running import RanksOnNodes
from runbook.launch.observer import Observer
from runbook.launch.watch import LOOKS_PER_S, RankWatch
from runbook.launch.watch.live_status import LiveStatus
from runbook.launch.watch.rank_state import Leeway, WallGap
from tests.factory import files
from tests.factory.files import HEADER, record, row, say
from tests.factory.tables import table
from tests.launch.helpers import trainer

TOKEN = "ab12"
RANKS = 256


def test_more_ranks_are_not_more_looks_in_a_second(tmp_path: Path) -> None:
    """In heartbeat files that are opened, by the interpreter's own word."""
    opened: list[str] = []

    def note(event: str, words: tuple[Any, ...]) -> None:
        if event == "open" and str(words[0]).startswith(str(tmp_path)):
            opened.append(str(words[0]))

    for number in range(RANKS):
        files.say(tmp_path, number, files.record("step_end", rank=number, step=1, pid=None))
    watch = RankWatch(tmp_path, TOKEN, time.monotonic())
    watch.wait(0.0)
    sys.addaudithook(note)
    began = time.monotonic()
    while time.monotonic() < began + 0.6:
        watch.wait(0.001)
    # The look in whose interval the time ended counts too.
    assert RANKS <= len(opened) <= LOOKS_PER_S * (time.monotonic() - began) + RANKS


def beat(event: str, step: int, **more: object) -> str:
    return files.beat(event, step=step, **{"pid": None, **more})


def test_a_line_counts_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat_rank0.jsonl"
    watch = RankWatch(tmp_path, TOKEN, time.monotonic())
    path.write_text(beat("step_start", 1) + beat("step_end", 1)[:20])
    watch.update()
    assert (watch.ranks[0].event, watch.ranks[0].step) == ("step_start", 1)
    path.write_text(beat("step_start", 1) + beat("step_end", 1) + beat("step_start", 2, token="x"))
    watch.update()
    assert (watch.ranks[0].event, watch.ranks[0].step) == ("step_end", 1)
    assert len(watch.ranks[0].recent) == 2


class Written:
    """A run directory that grows step by step, and who looks at it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.watch = RankWatch(folder, TOKEN, time.monotonic())
        self.live_status = LiveStatus(trainer(), folder, steps=9, observer=Observer(), enough=None)

    def grow(self, name: str, text: str) -> None:
        with (self.folder / name).open("a") as stream:
            stream.write(text)

    def say(self, event: str, step: int) -> None:
        self.grow(
            "heartbeat_rank0.jsonl", files.beat(event, step=step, token=TOKEN, mono=float(step))
        )

    def look(self) -> None:
        self.watch.update()
        self.live_status.tell_step(self.watch.ranks)

    def account(self) -> list[str]:
        return written_account(rank_exits(list(self.watch.ranks.values()), 0, []))


def test_rows_that_are_written_as_they_come(tmp_path: Path) -> None:
    """Looked at after each line; a header that lacks its rows is nothing yet."""
    run = Written(tmp_path)
    run.grow("training.csv", HEADER + "\n")
    run.grow("val.csv", "step,loss\n")
    for step in range(1, 6):
        run.say("step_start", step)
        run.look()
        run.grow("training.csv", row(step) + "\n")
        run.look()
        run.say("progress", step)
        run.look()
        if step == 4:
            run.grow("val.csv", "4,5.5\n")
            run.say("eval", step)
            run.look()
    assert run.account() == []


@pytest.mark.parametrize("header", [True, False])
def test_rows_that_are_kept_in_memory(tmp_path: Path, header: bool) -> None:
    run = Written(tmp_path)
    if header:
        run.grow("training.csv", HEADER + "\n")
    for step in range(1, 6):
        run.say("progress", step)
        run.look()
    head = "" if header else HEADER + "\n"
    run.grow("training.csv", head + "".join(f"{row(step)}\n" for step in range(1, 6)))
    run.say("progress", 6)
    run.look()
    assert run.account() == [
        "training.csv was up to 5 steps behind what rank 0 said of itself while it ran: its rows "
        "were not written as they came"
    ]


# Looks a tenth of a second apart, steps of 30 ms with four lines each.
LOOK_S, STEP_S, LINES = 0.1, 0.03, 4


def apart(told: Callable[[float], float], *, seconds: float = 5.0, seed: int = 0) -> float:
    """What a launch of so many seconds shows of a rank that bears `told` in place of the time.

    A twentieth of its lines is written up to a second late, while it waits to run, and a tenth of
    the looks comes up to three seconds late.
    """
    random, leeway = Random(seed), Leeway()
    now, written = 700.0, list[tuple[float, float]]()
    while now < 700.0 + seconds:
        for _ in range(LINES):
            said = now
            now += random.random() if random.random() < 0.05 else 1e-4
            written.append((now, said))
        now += STEP_S * random.uniform(0.5, 1.5)
    look, before, seen = 700.0, None, 0
    while seen < len(written):
        look += LOOK_S * (random.uniform(1, 30) if random.random() < 0.1 else 1)
        begun = look
        while seen < len(written) and written[seen][0] <= begun:
            leeway.take(told(written[seen][1]))
            seen += 1
        look += 1e-4
        leeway.looked(before, look)
        before = begun
    found = leeway.apart_s
    assert found is not None
    return found


@pytest.mark.parametrize("seed", range(50))
def test_a_busy_machine_is_no_fraud_however_late_lines_and_looks_are(seed: int) -> None:
    assert apart(lambda mono: mono, seed=seed) <= 0
    assert apart(lambda mono: mono - 12345.6, seed=seed) <= 1e-9, "where a clock begins is its own"


@pytest.mark.parametrize("rate", [0.92, 0.97, 1.03, 1.08])
def test_a_clock_of_another_rate_is_seen_within_five_seconds(rate: float) -> None:
    assert apart(lambda mono: rate * mono) > 0.05


@pytest.mark.parametrize("jump_s", [-0.04, 0.04])
def test_a_clock_that_jumps_once_is_seen(jump_s: float) -> None:
    assert apart(lambda mono: mono + jump_s * (mono > 702.5)) > 0.005


def followed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rate: float, *, ours: bool = True
) -> dict[str, float]:
    """What a watch tells of a rank whose clocks go at this rate; `ours`: its process is here."""
    monkeypatch.setenv("RUNBOOK_RUN_TOKEN", TOKEN)
    watch = RankWatch(folder, TOKEN, 0.0)
    pid = os.getpid() if ours else 2**22 + 1
    for step in range(1, 9):
        for event in ("step_start", "step_end"):
            told = {"mono": rate * time.monotonic(), "cpu_s": rate * time.process_time()}
            say(folder, 0, record(event, step=step, pid=pid, **told))
        watch.update()
        over = time.process_time() + 0.03
        while time.process_time() < over:
            time.sleep(0.001)
            sum(range(20_000))
        watch.update()
    return watch.ranks[0].clocks()


def test_a_rank_of_this_machine_is_held_against_its_clocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A watch finds its ranks' token in their environment, as they were started with it.
    monkeypatch.setattr("runbook.launch.watch.environment_holds", lambda *_: True)
    for name, rate, ours in (("a", 1.0, True), ("b", 0.5, True), ("c", 0.5, False)):
        (tmp_path / name).mkdir()
        found = followed(tmp_path / name, monkeypatch, rate, ours=ours)
        assert ("apart_s" in found, "cpu_apart_s" in found) == (ours, ours)
        if ours:
            assert (found["apart_s"] > 0.05, found["cpu_apart_s"] > 0.05) == (rate < 1, rate < 1)


@table(__file__, "arrivals")
def test_the_nearest_of_some_arrivals_counts(
    gaps: list[tuple[float, int]], wanted: float | None
) -> None:
    """Arrivals every tenth of a second of lines that bear so many seconds less."""
    found = WallGap()
    for number, gap in enumerate(gap for gap, times in gaps for _ in range(times)):
        found.arrived(1.7e9 + number / 10 - gap, 1.7e9 + number / 10)
    assert (None if found.seconds is None else round(found.seconds, 3)) == wanted


def watched(watch: RankWatch, folder: Path, gap_s: float) -> dict[str, float]:
    """What is known of a rank whose times of day are so many seconds behind."""
    for step in range(1, 11):
        say(folder, 0, record("step_end", mono=step / 10, step=step, pid=1, ts=time.time() - gap_s))
        watch.update()
    return watch.ranks[0].clocks()


def test_a_rank_on_another_machine_is_held_against_that_ones_clock(tmp_path: Path) -> None:
    """The machines' clocks are an hour apart, which is no fault of the trainer."""
    (tmp_path / "here").mkdir()
    behind = watched(RankWatch(tmp_path / "here", TOKEN, 0.0), tmp_path / "here", 3600.0)
    assert behind["wall_gap_s"] >= 3600
    job = Job(run_token=TOKEN, nodes=1, nproc=1, argv=())
    watch = RanksOnNodes(tmp_path, job, 0.0)
    assert "wall_gap_s" not in watched(watch, tmp_path, 3600.0)


@pytest.mark.parametrize(("late_s", "counts"), [(0.5, True), (4.0, False)])
def test_steps_that_a_late_look_finds_have_no_time_of_arrival(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late_s: float, counts: bool
) -> None:
    """A harness at a low priority on a busy machine reads the last steps seconds after they end."""
    now = 700.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watch = RankWatch(tmp_path, TOKEN, now)
    for step in range(1, 21):
        say(tmp_path, 0, record("step_end", step=step, mono=now))
        now += late_s if step == 20 else 0.2
        watch.update()
    found = watch.ranks[0].clocks()
    said = 19 * 0.2 if counts else 18 * 0.2
    # The first look finds a rank that nobody had looked at: when that line came nobody knows.
    assert found["said_s"] == pytest.approx(said - 0.2)
    assert abs(found["watched_s"] - found["said_s"]) <= ARRIVAL_S
