"""The bundled trainer under torchrun: the same promises on the real process tree."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from getpass import getuser
from pathlib import Path

import pytest

from runbook.folder.launch.evidence import read_launch
from runbook.launch import LaunchOptions, run_launch
from runbook.launch.observer import Observer
from runbook.process.reaper import carriers
from runbook.records import Launch, LaunchResult, LaunchStatus
from tests.factory.records import launch
from tests.shared import crowded

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
STALL_S = 3.0


def trainer(steps: int) -> Launch:
    words = "torchrun --nproc_per_node=2 -m nsa.train --config configs/cpu_smoke.yaml"
    return launch(
        *(*words.split(), "--dataset", "synthetic", "--ddp", "1", "--steps", str(steps)),
        name="real", steps=steps, timeout_s=120,
        env={"NSA_PREFILL_BATCHED": "1", "NSA_WATCH_HEARTBEAT_STALL_S": f"{STALL_S:g}"},
    )  # fmt: skip


class Injector(Observer):
    """Does something to the run, once, when rank 0 comes to its sixth step."""

    def __init__(self, folder: Path, act: Callable[[Path], None]) -> None:
        self.folder, self.act, self.at = folder, act, 0.0

    def launch_progress(
        self, launch: Launch, step: int, total: int, toks_per_s: float | None
    ) -> None:
        if step >= 6 and not self.at:
            self.at = time.monotonic()
            self.act(self.folder)


def pid_of(folder: Path, rank: int) -> int:
    line = (folder / f"heartbeat_rank{rank}.jsonl").read_text().splitlines()[-1]
    return int(json.loads(line)["pid"])


def inject(tmp_path: Path, act: Callable[[Path], None]) -> tuple[LaunchResult, float]:
    launch = trainer(100_000)
    injector = Injector(tmp_path / launch.run_dir, act)
    result = run_launch(launch, LaunchOptions(run_root=tmp_path, observer=injector, retry=False))
    took = time.monotonic() - injector.at
    assert injector.at
    assert carriers(result.run_token) == []
    evidence = read_launch(tmp_path, launch, result)
    assert evidence.training is not None and len(evidence.training.frame) >= 5
    return result, took


def test_a_healthy_run_leaves_nothing_outside_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(temporary := tmp_path / "temporary"))
    temporary.mkdir()
    launch = trainer(8)
    result = run_launch(launch, LaunchOptions(run_root=tmp_path, observer=Observer()))
    # One folder for each person, which torch keeps and uses again, is its cache of compiled code.
    assert {path.name for path in temporary.iterdir()} <= {f"torchinductor_{getuser()}"}
    assert result.status is LaunchStatus.COMPLETED, result
    evidence = read_launch(tmp_path, launch, result)
    assert evidence.problems == ()
    assert evidence.training is not None and evidence.training.frame["step"].tolist() == [
        *range(1, 9)
    ]
    assert {rank.param_hash for rank in evidence.ranks} != {None}
    assert len({rank.param_hash for rank in evidence.ranks}) == 1


def test_the_ranks_go_with_their_parent(tmp_path: Path) -> None:
    def kill_torchrun(folder: Path) -> None:
        status = Path(f"/proc/{pid_of(folder, 1)}/status").read_text()
        parent = next(line for line in status.splitlines() if line.startswith("PPid:"))
        os.kill(int(parent.split()[1]), signal.SIGKILL)

    result, took = inject(tmp_path, kill_torchrun)
    assert (result.status, result.culprit_rank) == (LaunchStatus.CRASHED, None)
    assert "parent was ended by SIGKILL" in result.cause
    assert took < crowded(5)


@pytest.mark.parametrize(
    ("words", "env", "cause"),
    [
        (
            ("--set", "runtime.device=cuda"),
            {"CUDA_VISIBLE_DEVICES": ""},
            "this launch cannot start: 1 problem(s) - runtime.device=cuda: rank ",
        ),
        # Refused before there is any heartbeat: only the console knows.
        (
            ("--set", "train.seq_lenn=4"),
            {},
            "this launch cannot start: 1 problem(s) - --set (train.seq_lenn)",
        ),
    ],
)
def test_a_config_that_this_machine_cannot_run_is_quoted(
    tmp_path: Path, words: tuple[str, ...], env: dict[str, str], cause: str
) -> None:
    launch = trainer(5)
    asked = {"argv": (*launch.argv, *words), "env": {**launch.env, **env}}
    how = LaunchOptions(run_root=tmp_path, observer=Observer())
    result = run_launch(launch.model_copy(update=asked), how)
    assert (result.status, result.attempts) == (LaunchStatus.CONFIG_ERROR, 1)
    assert result.cause.startswith(cause), result.cause
