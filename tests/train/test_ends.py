"""Every way to end: agreed between the ranks, with its own code, and nothing left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.shared import crowded, gone, once
from tests.train.launching import Launch, start

pytestmark = pytest.mark.e2e

ENDLESS = ["--dataset", "synthetic", "--steps", "100000"]


def _training(launch: Launch) -> bool:
    return all(len(launch.beats(rank, "step_end")) >= 5 for rank in range(2))


def _stacks(launch: Launch, rank: int, pid: int) -> str:
    """What this rank has written of its stacks so far."""
    return (launch.run_dir / f"stackdump_rank{rank}_{pid}.txt").read_text()


def _took_sigterm(launch: Launch) -> bool:
    """Does no SIGTERM wait for this process any more?"""
    status = Path(f"/proc/{launch.process.pid}/status").read_text()
    waiting = int(status.partition("ShdPnd:")[2].split()[0], 16)
    return not waiting >> (signal.SIGTERM - 1) & 1


def _pids(launch: Launch) -> list[int]:
    return [launch.beats(rank)[0]["pid"] for rank in range(2)]


@pytest.fixture(scope="module")
def halted(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Stacks asked for in mid-run, then `.HALT`."""
    return once(tmp_path_factory, "halted", _halted)


def _halted(folder: Path) -> Launch:
    launch = start(folder, [*ENDLESS, "--ddp", "1"], ranks=2)
    launch.until(_training)
    pid = _pids(launch)[1]
    os.kill(pid, signal.SIGUSR1)
    launch.until(lambda it: "loop.py" in _stacks(it, 1, pid))
    (launch.run_dir / ".HALT").write_text("gate collapse\n")
    return launch.wait()


@pytest.mark.slow
def test_halt_stops_all_ranks_on_the_same_step(halted: Launch) -> None:
    ends = [halted.exit(rank) for rank in range(2)]
    assert [end["code"] for end in ends] == [10, 10]
    assert ends[0]["steps_done"] == ends[1]["steps_done"]
    assert ends[0]["param_hash"] == ends[1]["param_hash"]
    assert halted.beats(0, "halt")[0]["reason"] == ".HALT (gate collapse)"
    steps = {halted.beats(rank, "halt")[0]["step"] for rank in range(2)}
    assert steps == {ends[0]["steps_done"]} == {len(halted.rows())}


@pytest.mark.slow
def test_sigusr1_writes_stacks_and_training_goes_on(halted: Launch) -> None:
    stacks = {path.name: path.read_text() for path in halted.run_dir.glob("stackdump_rank*")}
    pids = _pids(halted)
    assert "loop.py" in stacks[f"stackdump_rank1_{pids[1]}.txt"]
    assert stacks[f"stackdump_rank0_{pids[0]}.txt"] == ""
    assert halted.exit(1)["code"] == 10


@pytest.mark.slow
def test_a_used_directory_and_a_stale_halt_are_refused(halted: Launch, tmp_path: Path) -> None:
    before = (halted.run_dir / "training.csv").read_bytes()
    again = start(halted.run_dir.parent, ENDLESS).wait()
    assert again.process.returncode == 2
    assert "belongs to an earlier launch" in again.text()
    assert "a stale .HALT is refused, not obeyed" in again.text()
    assert (halted.run_dir / "training.csv").read_bytes() == before


def test_sigterm_to_one_rank_ends_all_after_the_step_with_a_checkpoint(tmp_path: Path) -> None:
    launch = start(tmp_path, [*ENDLESS, "--ddp", "1", "--save"], ranks=2)
    launch.until(_training)
    os.kill(_pids(launch)[1], signal.SIGTERM)
    launch.wait()
    ends = [launch.exit(rank) for rank in range(2)]
    assert [end["code"] for end in ends] == [13, 13]
    assert "SIGTERM" in ends[1]["reason"]
    step = ends[0]["steps_done"]
    assert step == ends[1]["steps_done"] == len(launch.rows())
    names = [path.name for path in (launch.run_dir / "checkpoints").iterdir()]
    assert names == [f"step_{step}"]


def test_origin_stacks_of_a_rank_stuck_in_a_collective_and_death_with_the_launcher(
    tmp_path: Path,
) -> None:
    """A Python-level handler writes nothing while its rank waits in a collective."""
    launch = start(tmp_path, [*ENDLESS, "--ddp", "1"], ranks=2, fault=["sleep", "1", "4"])
    launch.until(lambda it: len(it.beats(1, "fetched")) == 4)
    pids = _pids(launch)

    def stuck(launch: Launch) -> bool:
        """Rank 0 waits for its peer inside the backward pass; rank 1 is the culprit."""
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        stacks = [_stacks(launch, rank, pid) for rank, pid in enumerate(pids)]
        return "_engine_run_backward" in stacks[0] and "_sleep" in stacks[1]

    launch.until(stuck)
    launch.process.kill()
    launch.wait()
    assert gone(*pids, within_s=5.0)


def test_a_second_sigterm_ends_a_stuck_process_now(tmp_path: Path) -> None:
    launch = start(tmp_path, ENDLESS, fault=["sleep", "0", "3"])
    launch.until(lambda it: len(it.beats(0, "fetched")) == 3)
    launch.process.send_signal(signal.SIGTERM)
    launch.until(_took_sigterm)  # two that wait are one
    begin = time.monotonic()
    launch.process.send_signal(signal.SIGTERM)
    launch.wait(120)
    assert time.monotonic() - begin < crowded(3)
    assert launch.process.returncode == 13
    assert launch.exit()["reason"] == "second signal (SIGTERM)"


@pytest.mark.slow
def test_writes_that_fail_name_the_path(singles: dict[str, Launch]) -> None:
    launch = singles["disk"]
    assert launch.process.returncode == 1
    path = launch.run_dir / "heartbeat_rank0.jsonl"
    assert f"cannot write {path}: File too large" in launch.text()
    rows = launch.rows()
    assert [int(row["step"]) for row in rows] == list(range(1, len(rows) + 1))


@pytest.mark.slow
def test_without_a_network_it_says_what_to_do(singles: dict[str, Launch]) -> None:
    launch = singles["offline"]
    assert launch.process.returncode == 2
    assert "fineweb_edu" in launch.exit()["reason"]
    assert "data.dataset local" in launch.text()


@pytest.mark.slow
def test_synthetic_on_fail_is_visible(singles: dict[str, Launch]) -> None:
    launch = singles["fallback"]
    folder = launch.run_dir.parent / ".." / "out"
    made = (folder / "latest").resolve()
    assert launch.process.returncode == 0, launch.text()
    assert made.parent == folder.resolve()
    launch = Launch(process=launch.process, run_dir=made, log=launch.log)
    env = launch.env()
    assert env["effective"]["dataset"] == "synthetic"
    assert "SYNTHETIC DATA instead of fineweb_edu" in env["notes"][0]
    assert made.name.endswith(env["run_token"])


@pytest.mark.slow
def test_csv_logs_and_aux_stats_can_be_switched_off(singles: dict[str, Launch]) -> None:
    launch = singles["others"]
    assert launch.process.returncode == 0, launch.text()
    assert not (launch.run_dir / "training.csv").exists()
    header, first = (launch.run_dir / "gates.csv").read_text().splitlines()[:2]
    assert len(first.split(",")) == len(header.split(","))
    assert first.split(",")[1] and first.endswith(",,,,,")
    assert len(launch.beats(0, "progress")) == 2


@pytest.mark.slow
def test_origin_sequential_prefill_is_recorded_as_what_ran(singles: dict[str, Launch]) -> None:
    launch = singles["others"]
    assert launch.env()["effective"]["attention_path"] == "sequential"
    effect = launch.effects()["NSA_PREFILL_BATCHED"]
    assert effect["took_effect"] is True
    assert effect["evidence"] == {"path": "sequential", "range_calls_per_layer": 24.0}
