"""Real programs as stages: passed, failed, over their time, killed in the middle, and gone on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.shared import crowded
from tests.tools.acceptance.made import (
    DEVICE,
    accept,
    alive,
    fake_smi,
    handed_over,
    says,
    stage,
    statuses,
    words,
    write_stages,
)

SLEEPS = (
    "import os, pathlib, subprocess, sys, time; "
    "out = pathlib.Path(r'{out}'); "
    "child = subprocess.Popen(['sleep', '300'], start_new_session=True); "
    "(out / 'pids').write_text(f'{{os.getpid()}} {{child.pid}}'); "
    "(out / 'partial.txt').write_text('what there is so far'); time.sleep(300)"
)
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPS
# Counts its starts; done at the third.
CONTINUES = (
    "import pathlib, sys; path = pathlib.Path(r'{out}') / 'starts'; "
    "starts = (int(path.read_text()) if path.exists() else 0) + 1; "
    "path.write_text(str(starts)); sys.exit(0 if starts == 3 else 75)"
)


def pids(folder: Path, name: str) -> list[int]:
    text = (folder / "work" / DEVICE / name / "pids").read_text()
    return [int(part) for part in text.split()]


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def start(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "runbook", *words(folder, *more)]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE)


def test_all_passed(tmp_path: Path) -> None:
    write_stages(tmp_path, stage("one", says("first")), stage("two", says("second")))
    ended = accept(tmp_path)
    assert ended.code == 0, ended.err
    document = handed_over(tmp_path)
    assert [s["status"] for s in document["stages"].values()] == ["PASS", "PASS"]
    assert document["stages"]["one"]["reason"] == "first"
    out = tmp_path / "out" / DEVICE
    assert "| first |" in (out / "tables.md").read_text()
    assert "Every stage has ended." in (out / "summary.md").read_text()
    # A rehearsal says so wherever somebody may look.
    for name in ("summary.md", "tables.md", "progress.log"):
        assert "STAND-IN" in (out / name).read_text()
    assert document["stand_in"] is True
    assert ended.out.startswith("STAND-IN: no GPU.")
    # Nothing is repeated by asking again.
    again = accept(tmp_path)
    assert again.code == 0 and "one: PASS already" in again.err


@pytest.mark.parametrize(
    ("code", "status", "exit_code"),
    [(1, "FAIL", 1), (3, "UNDECIDED", 3), (75, "CUT OFF", 3), (2, "FAIL", 1), (70, "FAIL", 1)],
)
def test_what_a_program_ends_with(tmp_path: Path, code: int, status: str, exit_code: int) -> None:
    write_stages(tmp_path, stage("bad", says("it says", code)), stage("after", says("fine")))
    ended = accept(tmp_path)
    assert ended.code == exit_code
    assert statuses(tmp_path) == {"bad": status, "after": "PASS"}
    reason = handed_over(tmp_path)["stages"]["bad"]["reason"]
    assert ("it says" in reason) == (code in (1, 3, 75)), reason


@pytest.mark.slow
def test_a_program_that_is_killed_is_a_failure_with_its_last_line(tmp_path: Path) -> None:
    write_stages(
        tmp_path, stage("dies", "import os; print('almost', flush=True); os.kill(os.getpid(), 9)")
    )
    assert accept(tmp_path).code == 1
    reason = handed_over(tmp_path)["stages"]["dies"]["reason"]
    assert reason == "program was ended by SIGKILL: almost"


@pytest.mark.slow
def test_only_some_were_asked_for(tmp_path: Path) -> None:
    write_stages(
        tmp_path,
        stage("one", says("1")),
        stage("two", says("2")),
        stage("three", says("3", 1)),
    )
    ended = accept(tmp_path, "--stage", "two")
    assert ended.code == 4, ended.err
    assert statuses(tmp_path) == {"one": "NOT RUN", "two": "PASS", "three": "NOT RUN"}
    assert "--work" in handed_over(tmp_path)["continue"]
    # What failed in one call is not forgotten by the next.
    assert accept(tmp_path, "--stage", "three").code == 1
    assert accept(tmp_path, "--stage", "one").code == 1


@pytest.mark.parametrize(
    "code",
    [pytest.param(SLEEPS, id="ends"), pytest.param(DEAF, id="deaf", marks=pytest.mark.slow)],
)
def test_over_its_budget(tmp_path: Path, code: str) -> None:
    deaf = code is DEAF
    write_stages(tmp_path, stage("slow", code, budget_s=2), stage("after", says("goes on")))
    began = time.monotonic()
    ended = accept(tmp_path)
    assert time.monotonic() - began < crowded(40 if deaf else 20)
    assert ended.code == 3
    assert statuses(tmp_path) == {"slow": "CUT OFF", "after": "PASS"}
    assert not any(alive(pid) for pid in pids(tmp_path, "slow"))
    assert "ended after its 2 s" in handed_over(tmp_path)["stages"]["slow"]["reason"]


@pytest.mark.slow
def test_parts(tmp_path: Path) -> None:
    """Two parts are planned, the third is run when asked for again: the same folder goes on."""
    write_stages(tmp_path, stage("long", CONTINUES, parts=2))
    assert accept(tmp_path).code == 3
    assert statuses(tmp_path) == {"long": "CUT OFF"}
    assert accept(tmp_path).code == 0
    document = handed_over(tmp_path)["stages"]["long"]
    assert (document["status"], document["parts"]) == ("PASS", 3)


@pytest.mark.slow
def test_finished_commands_of_a_cut_stage_are_not_repeated(tmp_path: Path) -> None:
    code = "import pathlib; p = pathlib.Path(r'{out}') / 'runs'; p.open('a').write('x')"
    argv = [sys.executable, "-c"]
    commands = [
        {"name": "first", "argv": [*argv, code]},
        {"name": "second", "argv": [*argv, CONTINUES]},
    ]
    write_stages(tmp_path, stage("both", "", commands=commands))
    for wanted in (3, 3, 0):
        assert accept(tmp_path).code == wanted
    assert (tmp_path / "work" / DEVICE / "both" / "runs").read_text() == "x"


@pytest.mark.slow
def test_again_keeps_what_was(tmp_path: Path) -> None:
    write_stages(tmp_path, stage("one", says("old", 1)))
    assert accept(tmp_path).code == 1
    write_stages(tmp_path, stage("one", says("new")))
    assert accept(tmp_path).code == 1
    assert accept(tmp_path, "--again").code == 0
    kept = tmp_path / "work" / DEVICE / "one.earlier1" / "table.md"
    assert kept.read_text() == "| old |"


def test_sigkill_in_the_middle(tmp_path: Path) -> None:
    """Nothing is lost but the part that ran; nothing is left alive; the next call goes on."""
    write_stages(
        tmp_path, stage("first", says("done before")), stage("slow", SLEEPS),
        stage("last", says("comes later")),
    )  # fmt: skip
    harness = start(tmp_path)
    wait_for(tmp_path / "work" / DEVICE / "slow" / "pids")
    harness.kill()
    harness.wait()
    assert harness.stderr is not None
    harness.stderr.close()
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids(tmp_path, "slow")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids(tmp_path, "slow"))
    document = handed_over(tmp_path)
    found = {name: one["status"] for name, one in document["stages"].items()}
    assert found == {"first": "PASS", "slow": "CUT OFF", "last": "NOT RUN"}
    assert "ended from outside" in document["stages"]["slow"]["reason"]
    write_stages(
        tmp_path, stage("first", says("again", 1)), stage("slow", says("went on")),
        stage("last", says("comes later")),
    )  # fmt: skip
    assert accept(tmp_path).code == 0
    document = handed_over(tmp_path)
    assert document["stages"]["first"]["reason"] == "done before"
    assert document["stages"]["slow"]["parts"] == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.slow
def test_a_signal_ends_and_hands_over(tmp_path: Path, number: int, code: int) -> None:
    write_stages(tmp_path, stage("slow", SLEEPS), stage("last", says("later")))
    harness = start(tmp_path)
    wait_for(tmp_path / "work" / DEVICE / "slow" / "pids")
    harness.send_signal(number)
    assert harness.wait(timeout=30) == code
    assert harness.stderr is not None
    harness.stderr.close()
    assert not any(alive(pid) for pid in pids(tmp_path, "slow"))
    document = handed_over(tmp_path)
    assert statuses(tmp_path) == {"slow": "CUT OFF", "last": "NOT RUN"}
    assert signal.Signals(number).name in document["stages"]["slow"]["reason"]


@pytest.mark.slow
def test_the_time_of_a_call(tmp_path: Path) -> None:
    write_stages(
        tmp_path, stage("slow", SLEEPS, budget_s=60), stage("after", says("later"), least_s=15)
    )
    began = time.monotonic()
    ended = accept(tmp_path, "--until-s", "4")
    assert ended.code == 3 and time.monotonic() - began < crowded(25)
    found = handed_over(tmp_path)["stages"]
    assert found["slow"]["status"] == "CUT OFF"
    assert found["after"]["status"] == "NOT RUN" and "it needs 15" in found["after"]["reason"]


def test_what_a_stage_needs_and_is_not_there(tmp_path: Path) -> None:
    write_stages(
        tmp_path,
        stage("module", says("x"), needs=["module:no.such.module"]),
        stage("program", says("x"), needs=["program:no-such-program"]),
    )
    assert accept(tmp_path).code == 3
    reasons = [one["reason"] for one in handed_over(tmp_path)["stages"].values()]
    assert reasons[0].startswith("no module no.such.module")
    assert reasons[1].startswith("no program no-such-program")


@pytest.mark.slow
def test_work_that_is_gone_is_taken_up_from_what_was_handed_over(tmp_path: Path) -> None:
    write_stages(tmp_path, stage("one", says("first")), stage("two", says("second")))
    assert accept(tmp_path, "--stage", "one").code == 4
    (tmp_path / "work").rename(tmp_path / "lost")
    ended = accept(tmp_path)
    assert ended.code == 0 and "going on from what was handed over" in ended.err
    assert "one: PASS already" in ended.err
    assert (tmp_path / "work" / DEVICE / "one" / "table.md").read_text() == "| first |"


def test_progress_shows_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a short interval: the stage, the seconds, and the last line of its program."""
    from runbook.launch import StopRequest
    from runbook.tools.acceptance import runner
    from runbook.tools.acceptance.stages import Place, load_stages
    from runbook.tools.acceptance.state import State

    monkeypatch.setattr(runner, "_TELL_EVERY_S", 0.5)
    code = "import time; print('at the pump', flush=True); time.sleep(2)"
    stages = load_stages(write_stages(tmp_path, stage("one", code)))
    work = tmp_path / "w"
    work.mkdir()
    lines: list[str] = []
    runner.Runner(
        stages=stages,
        place=Place(checkout=None, profile="cpu", stand_in=False),
        state=State.new("X", "cpu", stages, stand_in=False),
        work=work,
        out=tmp_path / "o",
        again="again",
        tell=lines.append,
        stop=StopRequest(),
    ).run(stages)
    assert any("of 20 s: at the pump" in line for line in lines), lines


@pytest.mark.slow
def test_two_at_once(tmp_path: Path) -> None:
    write_stages(tmp_path, stage("slow", SLEEPS))
    harness = start(tmp_path)
    wait_for(tmp_path / "work" / DEVICE / "slow" / "pids")
    second = accept(tmp_path)
    harness.terminate()
    harness.wait(timeout=30)
    assert harness.stderr is not None
    harness.stderr.close()
    assert second.code == 2 and "another acceptance is running there" in second.err


@pytest.mark.parametrize("flag", ["--out", "--work"])
def test_a_folder_that_cannot_be_written(tmp_path: Path, flag: str) -> None:
    write_stages(tmp_path, stage("one", says("x")))
    (tmp_path / "file").write_text("")
    ended = accept(tmp_path, flag, str(tmp_path / "file" / "x"))
    assert ended.code == 2
    assert f"{flag} {tmp_path}/file/x/{DEVICE}: cannot be written" in ended.err


def test_folders_in_each_other(tmp_path: Path) -> None:
    write_stages(tmp_path, stage("one", says("x")))
    ended = accept(tmp_path, "--out", str(tmp_path / "work"))
    assert ended.code == 2 and "lie in each other" in ended.err


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, which needs root")
@pytest.mark.slow
def test_a_disk_that_is_full_for_what_is_handed_over(tmp_path: Path) -> None:
    """The work is kept, the console says where, and the exit code is not that of a success."""
    noise = (
        "import os, pathlib; (pathlib.Path(r'{out}') / 'noise').write_bytes(os.urandom(1 << 20)); "
    )
    write_stages(tmp_path, stage("one", noise + says("done")))
    script = (
        f'mkdir -p {tmp_path}/out && mount -t tmpfs -o size=256k none {tmp_path}/out && exec "$@"'
    )
    command = ["unshare", "--mount", "sh", "-c", script, "sh"]
    probe = subprocess.run([*command, "true"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"no mounts here: {probe.stderr.decode().strip()}")
    done = subprocess.run(
        [*command, sys.executable, "-P", "-m", "runbook", *words(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "cannot be handed over" in done.stderr and "No space left" in done.stderr
    assert "NOT HANDED OVER" in done.stdout
    assert (tmp_path / "work" / DEVICE / "one" / "noise").stat().st_size == 1 << 20


def test_no_gpu_is_a_refusal(tmp_path: Path) -> None:
    write_stages(tmp_path, stage("one", says("x")))
    without = [word for word in words(tmp_path) if word != "--stand-in"]
    from tests.cli.shell import runbook

    failing = fake_smi(tmp_path, "No devices were found\\n", code=6)
    for variables in ({"PATH": str(tmp_path)}, failing):
        ended = runbook(*without, cwd=tmp_path, **variables)
        assert ended.code == 2
        assert "runbook: error: no GPU" in ended.err and "--stand-in" in ended.err
    assert not (tmp_path / "out").exists() and not (tmp_path / "work").exists()


def test_the_folder_has_the_devices_name(tmp_path: Path) -> None:
    write_stages(tmp_path, stage("one", says("x") + "  # {profile}"))
    without = [word for word in words(tmp_path) if word != "--stand-in"]
    from tests.cli.shell import runbook

    ended = runbook(*without, cwd=tmp_path, **fake_smi(tmp_path, "NVIDIA H200\\n"))
    assert ended.code == 0, ended.err
    document = handed_over(tmp_path, "NVIDIA-H200")
    assert (document["device"], document["profile"]) == ("NVIDIA-H200", "h200x1")
    assert document["stand_in"] is False
    assert "STAND-IN" not in ended.out + ended.err


def test_a_profile_of_the_other_kind(tmp_path: Path) -> None:
    write_stages(tmp_path, stage("one", says("x")))
    ended = accept(tmp_path, "--profile", "h200x1")
    assert ended.code == 2 and "--stand-in is for a CPU only" in ended.err
