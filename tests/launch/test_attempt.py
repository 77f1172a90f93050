"""An attempt: what its end means; its harness is gone, or stands still for a while."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from runbook.accounts import clocks
from runbook.folder import LAUNCH_JSON, RESULT_JSON
from runbook.folder.launch.evidence import read_launch
from runbook.launch import adopt_launch
from runbook.launch.launcher_api import Running, Start
from runbook.launch.local import Host, Local, LocalRun
from runbook.launch.observer import Observer
from runbook.launch.supervision import LaunchOptions
from runbook.launch.watch import Presence
from runbook.process import carriers
from runbook.records import Begun, Launch, LaunchResult, LaunchStatus, Stop
from tests.launch.helpers import At, fake_launch, harness, run, trainer


@pytest.mark.parametrize("body", ["def test_a(): pass", "import os; os._exit(0)"])
def test_pytest_is_completed_if_its_report_can_say_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    # A configuration of the current folder that no pytest could work with must not matter.
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    monkeypatch.chdir(tmp_path)
    test = tmp_path / "test_one.py"
    test.write_text(body + "\n")
    launch = trainer("python", "-m", "pytest", "-q", str(test), kind="pytest", timeout_s=60)
    root = tmp_path / "a $HOME 'of' runs"
    result = run(launch, root)
    junit = read_launch(root, launch, result).junit
    told = None if junit is None else [case.status for case in junit.cases]
    ends = (LaunchStatus.CRASHED, 0, None)  # before its report
    if "test_a" in body:
        ends = (LaunchStatus.COMPLETED, 0, ["passed"])
    assert (result.status, result.exit_code, told) == ends


class Outlived(Local):
    """A place where commands outlive their harness: one is there for whoever asks."""

    def adopt(self, start: Start) -> Running | None:
        """The same command in the same folder, with the token that its launch.json names."""
        return LocalRun(start)


def test_what_is_adopted_says_from_which_checkpoint_it_went_on(tmp_path: Path) -> None:
    launch = fake_launch(name="leg2", steps=8).model_copy(update={"resumes": "leg1", "after": 5})
    begun = Begun(
        path="baseline/leg1/checkpoints/step_4", step=4, sha256="ab" * 32, refused=("step_5: torn",)
    )
    (tmp_path / begun.path).mkdir(parents=True)
    first = run(launch, tmp_path, begun=begun)
    assert (first.status, first.begun) == (LaunchStatus.COMPLETED, begun)
    folder = tmp_path / launch.run_dir
    for path in folder.iterdir():  # as the killed harness left it, before the command wrote
        if path.name != LAUNCH_JSON:
            path.unlink()
    document = json.loads((folder / LAUNCH_JSON).read_text())
    assert document["argv"][-2:] == ["--resume", str(tmp_path / begun.path)]
    how = LaunchOptions(run_root=tmp_path, observer=Observer(), retry=False, launcher=Outlived())
    adopted = adopt_launch(launch, how)
    assert adopted is not None and adopted.status is LaunchStatus.COMPLETED, adopted
    assert (adopted.begun, adopted.run_token) == (begun, first.run_token)
    assert LaunchResult.model_validate_json((folder / RESULT_JSON).read_text()) == adopted
    assert read_launch(tmp_path, launch, adopted).after == 4


@pytest.mark.parametrize("words", [(), ("--deaf",)], ids=["it ends", "it is deaf"])
def test_a_launch_that_its_plan_stops_is_told_to_end_and_that_is_its_good_end(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    """Whether its ranks did so at once is judged from their exit codes, and not here."""
    launch = fake_launch(*words, nproc=1, steps=40).model_copy(
        update={"stop": Stop(by="SIGTERM", steps=2)}
    )
    result = run(launch, tmp_path)
    assert result.status is LaunchStatus.COMPLETED, result
    assert result.stopped is not None and 2 <= result.stopped.step < 40
    (rank,) = result.ranks
    assert rank.steps_done is not None
    assert (rank.code, rank.steps_done < 40) == ((0, False) if words else (13, True))


def test_an_end_before_the_planned_one_is_no_good_end(tmp_path: Path) -> None:
    launch = fake_launch("--fault", "sigkill", "--on-rank", "0", nproc=1, steps=20)
    late = launch.model_copy(update={"stop": Stop(by="SIGTERM", steps=19)})
    result = run(late, tmp_path)
    assert (result.stopped, result.ok) == (None, False), result


def test_sigusr1_killed_torchrun_and_the_ranks_went_on_as_orphans(tmp_path: Path) -> None:
    """The signals that killed the origin's launcher are sent to everything but the ranks."""
    prodded: list[int] = []

    def prod(launch: Launch) -> None:
        folder = tmp_path / launch.run_dir
        token = json.loads((folder / "launch.json").read_text())["run_token"]
        ranks = {
            json.loads(path.read_text().splitlines()[0])["pid"]
            for path in folder.glob("heartbeat_rank*.jsonl")
        }
        prodded.extend(set(carriers(token)) - ranks)
        for pid in prodded:
            os.kill(pid, signal.SIGUSR1)
            os.kill(pid, signal.SIGUSR2)

    result = run(fake_launch(steps=20), tmp_path, observer=At(3, prod))
    assert prodded
    assert (result.status, result.cause) == (LaunchStatus.COMPLETED, "")


def test_the_folder_that_torch_makes_for_nothing_goes(tmp_path: Path) -> None:
    (place := tmp_path / "temporary").mkdir()
    (folder := tmp_path / "launch").mkdir()
    (place / "torchinductor_you").mkdir()
    host = Host(folder, dict(os.environ, TMPDIR=str(place)), token="ab" * 16)
    host.start(["mkdir", "-p", "torchinductor_me", "torchinductor_used/cache", "mine"], cwd=place)
    host.child.wait()
    host.stop()
    left = {path.name for path in place.iterdir()}
    assert left == {"mine", "torchinductor_used", "torchinductor_you"}


# Longer than a harness that looks ten times a second is ever late.
STOPPED_S = 8.0


def when(there: Path, text: str) -> None:
    """Wait until the file has the text."""
    until = time.monotonic() + 60
    while not there.is_file() or text not in there.read_text():
        assert time.monotonic() < until, f"{there} never has {text}"
        time.sleep(0.02)


def stopped(launch: Launch, root: Path, *, at: str, with_trainer: bool) -> LaunchResult:
    """Run it in a harness that is stopped once rank 0 has said `at`, alone or as a container is."""
    started = harness(launch, root)
    folder = root / launch.run_dir
    try:
        when(folder / "heartbeat_rank0.jsonl", at)
        token = json.loads((folder / "launch.json").read_text())["run_token"]
        trainer = carriers(token) if with_trainer else []
        send([started.pid, *trainer], signal.SIGSTOP)
        time.sleep(STOPPED_S)
        send([started.pid], signal.SIGCONT)
        time.sleep(0.5 if trainer else 0.0)  # on a busy machine the ranks wake up later
        send(trainer, signal.SIGCONT)
        assert started.wait(60) == 0
    finally:
        started.kill()
        started.wait()
    return LaunchResult.model_validate_json((folder / "result.json").read_text())


def send(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def times_off(root: Path, launch: Launch, result: LaunchResult) -> list[str]:
    """What of the time of this launch does not balance by the clocks of ranks and launcher."""
    found = read_launch(root, launch, result)
    assert found.training is not None and len(found.ranks) == launch.nproc
    told = clocks.time_account(
        found.training.frame, found.ranks, result.duration_s, exits=result.ranks
    )
    return [text for text in told if "launch" in text or "(ts)" in text]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What may lie beside the ranks' own time, here less than the stop."""
    monkeypatch.setattr(clocks, "OVERHEAD_S", STOPPED_S / 2)


def test_a_trainer_that_ended_while_the_harness_was_stopped(tmp_path: Path) -> None:
    launch = fake_launch("--dt", "0.1", steps=20)
    result = stopped(launch, tmp_path, at='"step": 8', with_trainer=False)
    assert result.ok, result.cause
    assert times_off(tmp_path, launch, result) == []
    assert all(STOPPED_S / 2 < one.away_s <= STOPPED_S + 1 for one in result.ranks)
    (note,) = result.notes
    assert "the harness itself stood still for " in note
    # The same times without a stop: then the trainer hides them.
    present = tuple(one.model_copy(update={"away_s": 0.0}) for one in result.ranks)
    hidden = times_off(tmp_path, launch, result.model_copy(update={"ranks": present}))
    assert len(hidden) == 2 and all(" s of a launch of " in text for text in hidden)


def test_what_stood_still_with_its_trainer_is_given_nothing(tmp_path: Path) -> None:
    """As in a container that is frozen beyond the launch's time: its ranks were silent for eight
    times their budget, and so was the watchdog.
    """
    launch = fake_launch("--dt", "0.1", steps=20, timeout_s=STOPPED_S)
    result = stopped(launch, tmp_path, at='"step": 8', with_trainer=True)
    assert result.ok, result.cause
    assert times_off(tmp_path, launch, result) == []
    assert [one.away_s for one in result.ranks] == [0.0, 0.0]


class Queue(Local):
    """Takes its time to begin, as a cluster does whose nodes are taken."""

    here = False

    def start(self, start: Start) -> Running:
        time.sleep(STOPPED_S / 2)
        return LocalRun(start)


def test_time_in_a_queue_is_no_trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "OVERHEAD_S", STOPPED_S / 4)
    launch = fake_launch(steps=5)
    result = run(launch, tmp_path, launcher=Queue())
    assert result.ok, result.cause
    assert times_off(tmp_path, launch, result) == []
    assert all(STOPPED_S / 2 <= one.away_s < STOPPED_S / 2 + 1 for one in result.ranks)
    assert result.notes == ()


@pytest.mark.parametrize(
    ("passed_s", "computed_s", "away_s"),
    [(0.1, 0.1, 0.0), (5.0, 0.0, 0.0), (60.0, 0.5, 59.5), (60.0, 59.0, 0.0)],
)
def test_who_computes_is_there(
    monkeypatch: pytest.MonkeyPatch, passed_s: float, computed_s: float, away_s: float
) -> None:
    """A trainer that writes files over which the harness sits long makes it no less there."""
    now = {"monotonic": 1000.0, "process_time": 3.0}
    for name in now:
        monkeypatch.setattr(f"runbook.launch.watch.time.{name}", lambda name=name: now[name])
    presence = Presence()
    assert presence.look() == 0.0, "there is no look before the first"
    now["monotonic"] += passed_s
    now["process_time"] += computed_s
    assert (presence.look(), presence.away_s) == (away_s, away_s)
    assert (presence.look(), presence.away_s) == (0.0, away_s)
