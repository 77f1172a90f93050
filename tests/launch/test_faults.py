"""Real processes that fail in every way: noticed, named, with evidence, and nothing left alive."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from runbook.folder.launch.evidence import read_launch
from runbook.launch import run_launch
from runbook.launch.observer import Observer, Pulse, StopRequest
from runbook.launch.supervision import LaunchOptions
from runbook.launch.watch.watchdog import Budgets
from runbook.records import Launch, LaunchResult, LaunchStatus
from tests.factory import records
from tests.factory.tables import table
from tests.launch.helpers import At, fake_launch, run
from tests.launch.test_endings import bare
from tests.shared import alive, crowded


def test_a_healthy_launch(tmp_path: Path) -> None:
    launch = fake_launch("--bare", env={"NSA_OPT_FUSED": "1"})
    result = run(launch, tmp_path)
    assert not alive(bare(tmp_path / launch.run_dir)), "nothing in its environment tells of us"
    assert (result.status, result.exit_code, result.cause) == (LaunchStatus.COMPLETED, 0, "")
    assert [(e.rank, e.code, e.steps_done) for e in result.ranks] == [(0, 0, 5), (1, 0, 5)]
    folder = tmp_path / launch.run_dir
    assert folder.stat().st_mode & 0o777 == 0o700
    assert json.loads((folder / "launch.json").read_text())["run_token"] == result.run_token
    assert LaunchResult.model_validate_json((folder / "result.json").read_text()) == result
    evidence = read_launch(tmp_path, launch, result)
    assert evidence.problems == ()
    assert evidence.training is not None and len(evidence.training.frame) == 5


@table(__file__, "faults")
def test_a_fault_is_named_with_its_rank(tmp_path: Path, fault: str, status: str, sign: str) -> None:
    began = time.monotonic()
    result = run(fake_launch("--fault", fault), tmp_path)
    assert time.monotonic() - began < crowded(10)
    assert result.status == status and sign in result.cause
    agreed = ("nan", "halt")
    expected = None if fault == "config" else result.culprit_rank if fault in agreed else 1
    assert result.culprit_rank == expected
    assert result.evidence[0] == "baseline/one/console.log"
    assert all((tmp_path / path).is_file() for path in result.evidence)


def test_stacks_of_all_ranks_of_a_hang_are_kept(tmp_path: Path) -> None:
    result = run(fake_launch("--fault", "hang", "--bare"), tmp_path)
    assert not alive(bare(tmp_path / "baseline/one"))
    stacks = [tmp_path / path for path in result.evidence if "stackdump_rank" in path]
    assert {path.name.split("_")[1] for path in stacks} == {"rank0", "rank1"}
    assert all("fake_trainer.py" in path.read_text() for path in stacks)
    summary = json.loads((tmp_path / "baseline/one/incident.json").read_text())
    assert [rank["step"] for rank in summary["ranks"]] == [3, 3]
    assert summary["ranks"][1]["last_heartbeats"][-1]["event"] == "step_start"


def test_peers_that_do_not_listen_are_gone_within_two_seconds(tmp_path: Path) -> None:
    launch = fake_launch("--fault", "sigkill", "--deaf")
    result = run(launch, tmp_path)
    # From its last word before it died: how long a busy machine took to start it is not asked.
    beats = (tmp_path / launch.run_dir / "heartbeat_rank1.jsonl").read_text().splitlines()
    assert time.monotonic() - json.loads(beats[-1])["mono"] < crowded(2)
    assert (result.status, result.culprit_rank) == (LaunchStatus.CRASHED, 1)


def test_slow_starts_and_checkpoints_are_no_hang(tmp_path: Path) -> None:
    """With one flat budget of a second, both would be an alarm."""
    launch = fake_launch("--slow-first", "2.5", "--checkpoint", "2.5")
    assert run(launch, tmp_path).status is LaunchStatus.COMPLETED
    flat = Budgets(first_step_s=1, checkpoint_s=1, step_s=1, init_s=1, data_s=1)
    again = launch.model_copy(update={"run_dir": "baseline/flat"})
    assert run(again, tmp_path, budgets=flat).status is LaunchStatus.HUNG


def test_a_command_that_says_nothing_at_all(tmp_path: Path) -> None:
    launch = fake_launch().model_copy(
        update={"argv": ("python", "-c", "import time; time.sleep(60)")}
    )
    result = run(launch, tmp_path, budgets=Budgets(silence_s=0.5))
    assert result.status is LaunchStatus.SILENT
    assert "no heartbeat of ranks [0, 1]" in result.cause


def test_a_command_that_does_not_end_after_its_ranks(tmp_path: Path) -> None:
    budgets = Budgets(exit_s=1.0)
    result = run(fake_launch("--fault", "linger"), tmp_path, budgets=budgets)
    assert result.status is LaunchStatus.HUNG
    assert result.cause.startswith("hang at exit: every rank was done")


def test_a_launch_that_is_only_too_slow_times_out(tmp_path: Path) -> None:
    # So long that its ranks have begun on a busy machine too: what has not has no stack to tell.
    result = run(fake_launch(steps=10_000, timeout_s=6.0), tmp_path)
    assert result.status is LaunchStatus.TIMED_OUT
    assert "after 6 s" in result.cause
    assert any("stackdump" in path for path in result.evidence)


def test_exit_code_0_without_the_ranks_word_is_not_completed(tmp_path: Path) -> None:
    launch = fake_launch().model_copy(update={"argv": ("python", "-c", "pass")})
    result = run(launch, tmp_path)
    assert result.status is LaunchStatus.CRASHED
    assert "ranks [0, 1] wrote no exit heartbeat" in result.cause


def test_a_stop_request_ends_everything_within_five_seconds(tmp_path: Path) -> None:
    stop = StopRequest()
    asked: list[float] = []

    def ask(_: Launch) -> None:
        asked.append(time.monotonic())
        stop.request("SIGTERM")

    result = run(fake_launch(steps=10_000), tmp_path, observer=At(3, ask), stop=stop)
    assert result.status is LaunchStatus.INTERRUPTED
    assert time.monotonic() - asked[0] < crowded(5)
    assert {exit_.code for exit_ in result.ranks} == {13}


def test_a_stop_request_of_a_launch_that_is_silent_says_where_it_stands(tmp_path: Path) -> None:
    stop = StopRequest()

    class Impatient(Observer):
        def launch_ranks(self, launch: Launch, pulse: Pulse) -> None:
            if len(pulse.silent) == pulse.wanted:  # which one crosses its limit first is chance
                stop.request("SIGTERM")

    options = {"observer": Impatient(), "stop": stop, "budgets": Budgets()}
    result = run(fake_launch("--fault", "hang"), tmp_path, **options)
    assert result.status is LaunchStatus.INTERRUPTED
    assert result.cause.startswith("interrupted by SIGTERM while rank 1 had been silent for ")
    assert any("stackdump_rank1" in path for path in result.evidence)


def test_a_stall_is_tried_once_more_on_another_port_and_recorded(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    launch = fake_launch("--fault", "hang", "--once", str(mark), steps=8, retry_steps=4)
    result = run(launch, tmp_path, retry=True)
    assert (result.status, result.attempts, result.steps) == (LaunchStatus.COMPLETED, 2, 4)
    assert result.cause.startswith("attempt 1: hang: rank 1")
    assert [e.steps_done for e in result.ranks] == [4, 4]
    first = tmp_path / "baseline/one.attempt1"
    assert (first / "incident.json").is_file()
    assert all((tmp_path / path).is_file() for path in result.evidence)
    again = json.loads((tmp_path / launch.run_dir / "launch.json").read_text())
    assert again["env"]["NCCL_DEBUG"] == "INFO"
    assert again["attempt"] == 2


@pytest.mark.parametrize(
    ("fault", "attempts"),
    [("hang", 2), ("nccl", 2), ("watchdog", 2), ("nan", 1), ("raise", 1), ("oom", 1)],
)
def test_only_stalls_and_communication_failures_are_tried_again(
    tmp_path: Path, fault: str, attempts: int
) -> None:
    result = run(fake_launch("--fault", fault), tmp_path, retry=True)
    assert result.attempts == attempts
    assert (result.status is LaunchStatus.HUNG) is (fault == "hang"), "two stalls are a hang"
    told = [f"attempt {number}: hang" in result.cause for number in (1, 2)]
    assert told == [fault == "hang"] * 2


# The bundled trainer under torchrun: the same promises on the real process tree.


def bundled(steps: int) -> Launch:
    words = "torchrun --nproc_per_node=2 -m nsa.train --config configs/cpu_smoke.yaml"
    return records.launch(
        *(*words.split(), "--dataset", "synthetic", "--ddp", "1", "--steps", str(steps)),
        name="real", steps=steps, timeout_s=120,
        env={"NSA_PREFILL_BATCHED": "1", "NSA_WATCH_HEARTBEAT_STALL_S": "3"},
    )  # fmt: skip


@pytest.mark.e2e
@pytest.mark.slow
def test_a_healthy_run_leaves_nothing_outside_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(temporary := tmp_path / "temporary"))
    temporary.mkdir()
    launch = bundled(8)
    result = run_launch(launch, LaunchOptions(run_root=tmp_path, observer=Observer()))
    assert list(temporary.iterdir()) == []
    assert result.status is LaunchStatus.COMPLETED, result
    evidence = read_launch(tmp_path, launch, result)
    assert evidence.problems == ()
    assert evidence.training is not None and evidence.training.frame["step"].tolist() == [
        *range(1, 9)
    ]
    assert {rank.param_hash for rank in evidence.ranks} != {None}
    assert len({rank.param_hash for rank in evidence.ranks}) == 1
