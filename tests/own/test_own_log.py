"""Rows of logs that are not ours: what is a row, what is none, and when it came."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from nsa.contract import Phase
from runbook.errors import UsageError
from runbook.folder import OWN_FOLDER
from runbook.folder.launch.own_log import RowReader, last_steps, read_own_log
from runbook.launch.foreign import ForeignWatch, classify_foreign
from runbook.launch.observer import Observer, Pulse
from runbook.launch.watch.live_status import LiveStatus, held_mib
from runbook.records import Kind, Launch, LaunchStatus
from runbook.records.own_trainer import HeartbeatMap, LogMap, OwnTrainer
from runbook.tools.own_profile import guess, is_running_mean, templated
from tests.factory import records
from tests.factory.tables import table

TABLE = LogMap(path="{out}/m.csv", columns={"step": "step", "loss": "train/loss"})
ROWS = LogMap(path="{out}/m.jsonl", columns={"step": "step", "loss": "loss"})
LOGS = {
    "DICTS": LogMap(columns={"loss": "loss", "lr": "learning_rate"}, every=10),
    "TABLE": TABLE,
    "ROWS": ROWS,
    "LINES": LogMap(pattern=r"iter (?P<step>\d+): loss (?P<loss>\S+), time (?P<dt_ms>[\d.]+)ms"),
}


@table(__file__, "log_lines")
def test_what_is_a_row(log: str, lines: list[str], expected: list[list[float]]) -> None:
    told = [line.replace("BRACES", "{" * 9000).encode() for line in lines]
    rows = RowReader(LOGS[log]).take_all(told)
    found = [[int(row["step"]), row["loss"]] for row in rows]
    assert str(found) == str(expected)  # NaN is not itself


@table(__file__, "damaged_steps")
def test_steps_that_are_none_or_go_back_are_damage(
    tmp_path: Path, text: str, arrivals: str, steps: list[int], said: str
) -> None:
    log, _ = _read(tmp_path, f"step,train/loss\n{text}", arrivals)
    assert log is not None and log.damaged and log.frame["step"].tolist() == steps
    assert said in log.problems[0]


@pytest.mark.parametrize(
    ("steps", "missing"),
    [
        ([s for s in range(1, 101) if s % 7], 14),
        ([s for s in range(1, 101) if not 40 <= s < 60], 20),
        ([1, *range(10, 101, 10)], 0),  # the first step, and then every tenth
        ([1, 4, 8, 11, 16, 18, 25, 27], 0),  # by the clock
    ],
)
def test_rows_that_a_cadence_lacks_are_counted(
    tmp_path: Path, steps: list[int], missing: int
) -> None:
    """Loggers write a loss that is NaN as nothing, too."""
    rows = "".join(f"{step},4\n" for step in steps)
    times = f"0,1,1\n{len(steps) - 1},2,2\n{len(steps)},3,3\n"
    log, _ = _read(tmp_path, f"step,train/loss\n{rows}", times)
    assert log is not None and int(log.frame["missing"].sum()) == missing


def _trainer(log: LogMap) -> OwnTrainer:
    return OwnTrainer(
        name="t", command="t {steps} {ranks}", tokens_per_rank=50, log=log, source="test"
    )


def _read(folder: Path, text: str, arrivals: str, columns=TABLE.columns):  # type: ignore[no-untyped-def]
    (folder / "own").mkdir()
    (folder / "own" / "m.csv").write_text(text)
    (folder / "arrivals.csv").write_text(f"rows,mono,ts\n{arrivals}")
    trainer = _trainer(TABLE.model_copy(update={"columns": columns}))
    return read_own_log(folder, trainer, ranks=2, relative_to=folder)


def test_rows_that_come_together_are_one_reading(tmp_path: Path) -> None:
    text = "step,train/loss\n1,4\n2,3\n3,2\n4,1\n9,to"  # the last line is not whole
    log, (clock,) = _read(tmp_path, text, "0,10,100\n1,11,101\n4,13,103\n")
    assert log is not None and not log.damaged
    last = log.frame.iloc[-1]
    assert (last["step"], last["steps"], last["tokens"], last["dt_s"]) == (4, 3, 300, 2.0)
    assert last["loss"] == 2.0 and last["toks_per_s"] == 150.0
    assert clock.steps is not None and clock.steps["ts"].tolist() == [101, 103]


# When rows of five steps each came, by this program's clock.
CAME = (774.5448, 774.7568, 774.9848, 775.1848, 775.4108, 775.6088)


@table(__file__, "means")
def test_a_mean_since_the_start_is_none_of_the_steps_of_a_row(
    tmp_path: Path, told_ms: list[float], is_mean: bool
) -> None:
    rows = "".join(f"{5 * row},4,{ms}\n" for row, ms in enumerate(told_ms, start=1))
    times = "".join(f"{row},{at},{at}\n" for row, at in enumerate(CAME, start=1))
    columns = {**TABLE.columns, "dt_ms": "ms"}
    log, _ = _read(tmp_path, f"step,train/loss,ms\n{rows}", f"0,774,774\n{times}", columns)
    assert log is not None and is_running_mean(log.frame) is is_mean
    told = log.frame["told_s"].iloc[1:].sum()
    assert abs(told / (CAME[-1] - CAME[0]) - 1) < 0.01  # together they agree


@table(__file__, "ends")
def test_what_an_end_means(
    code: int, oom: tuple[int, int], console: list[str], status: str, said: str
) -> None:
    end = classify_foreign(code, oom=oom, console=console, step=0, steps=60)
    assert end.status == status and said in end.cause


@pytest.mark.parametrize(("code", "signal"), [(-6, "SIGABRT"), (-11, "SIGSEGV")])
def test_an_abort_while_python_ends_is_none_of_a_step(code: int, signal: str) -> None:
    said = ["step 60", "terminate called without an active exception"]
    failed = [f"E1 failed (exitcode: {code}) local_rank: 1 (pid: 7) of binary: python"]
    after = classify_foreign(1, oom=(0, 0), console=[*said, *failed], step=60, steps=60)
    assert (after.status, after.kind) == (LaunchStatus.CRASHED, Kind.AT_EXIT)
    assert after.culprit_rank == 1 and f"{signal} while Python ended" in after.cause
    before = classify_foreign(1, oom=(0, 0), console=[*said, *failed], step=40, steps=60)
    assert before.kind is Kind.NONE and signal in before.cause
    other = classify_foreign(1, oom=(0, 0), console=["step 60", *failed], step=60, steps=60)
    assert other.kind is Kind.NONE


@pytest.mark.parametrize(("heartbeats", "wanted"), [
    (None, 0), (HeartbeatMap(path="{out}/{rank}.jsonl", step="step"), 2),
])  # fmt: skip
def test_how_many_ranks_live_is_told_where_each_tells_of_itself(
    tmp_path: Path, heartbeats: HeartbeatMap | None, wanted: int
) -> None:
    """It said `ranks 1/1` of two ranks."""
    own = _trainer(TABLE).model_copy(update={"heartbeats": heartbeats})
    launch = records.launch(*own.argv(ranks=2, steps=3), kind="own", own=own, steps=3, nproc=2)
    watch = ForeignWatch(tmp_path, "no such token", time.monotonic(), launch)

    class Seen(Observer):
        def launch_ranks(self, launch: Launch, pulse: Pulse) -> None:
            assert pulse.wanted == wanted

    live = LiveStatus(launch, tmp_path, steps=3, observer=Seen(), enough=None)
    live.look(watch.ranks, now=time.monotonic())


@table(__file__, "marked_commands")
def test_marks_take_the_place_of_the_usual_flags(typed: str, marked: str) -> None:
    assert templated(typed).replace("'", "") == marked


def test_a_line_says_that_it_is_ready_and_a_row_that_it_trains(tmp_path: Path) -> None:
    own = _trainer(TABLE).model_copy(update={"ready": "^ready"})
    launch = records.launch(*own.argv(ranks=2, steps=3), kind="own", own=own, steps=3)
    watch = ForeignWatch(tmp_path, "no such token", time.monotonic(), launch)
    console, log = tmp_path / "console.log", tmp_path / "own" / "m.csv"
    phases = []
    for text, path in (("not ready\n", console), ("ready\n", console),
                       ("step,train/loss\n1,4\n", log), ("2,3\n3,2\n", log)):  # fmt: skip
        with path.open("a") as stream:
            stream.write(text)
        watch.update()
        phases.append(watch.ranks[0].phase)
    assert phases == [Phase.INIT, Phase.FIRST_STEP, Phase.STEP, Phase.CHECKPOINT]
    counts = [line.split(",")[0] for line in (tmp_path / "arrivals.csv").read_text().split()]
    assert counts == ["rows", "0", "1", "3"]


@table(__file__, "tables_not_taken")
def test_a_table_that_is_not_taken_is_named_with_the_reason(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / name).write_text(text)
    (tmp_path / "console.log").write_text("")
    with pytest.raises(UsageError) as error:
        guess(tmp_path, steps=9)
    assert f"{name}: " in str(error.value) and said in str(error.value)
    assert str(error.value).count("console: 0 rows") == 1


def test_a_rank_whose_own_heartbeats_are_not_there_has_no_last_step(tmp_path: Path) -> None:
    beats = HeartbeatMap(path="{out}/alive_{rank}.jsonl", step="at")
    trainer = _trainer(ROWS).model_copy(update={"heartbeats": beats})
    (tmp_path / OWN_FOLDER).mkdir()
    told = '{"at": 3}\n{"at": 7}\n{"at": null}\n'
    (tmp_path / OWN_FOLDER / "alive_0.jsonl").write_text(told)
    assert last_steps(tmp_path, trainer, 2) == {0: 7, 1: None}


def test_pages_of_a_mapped_file_are_not_held(tmp_path: Path) -> None:
    """As a trainer has them that reads its tokens by np.memmap; 64 MiB of its own it holds."""
    (data := tmp_path / "train.bin").write_bytes(bytes(64 * 2**20))
    script = (
        "import mmap, sys; file = open(sys.argv[1], 'rb')\n"
        "pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
        "read, own = sum(pages[::4096]), b'x' * (64 * 2**20)\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    words = [sys.executable, "-c", script, str(data)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, text=True, **pipes) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        resident = psutil.Process(process.pid).memory_info().rss / 2**20
        held = held_mib(process.pid)
        process.communicate()
    assert resident > 128 and held is not None and 65 < held < 104
    assert held_mib(2**22 + 1) is None
