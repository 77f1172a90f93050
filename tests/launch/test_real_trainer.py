"""The bundled trainer under torchrun: the same promises on the real process tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from runbook.folder.launch.evidence import read_launch
from runbook.launch import LaunchOptions, run_launch
from runbook.launch.observer import Observer
from runbook.records import Launch, LaunchStatus
from tests.factory.records import launch

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
STALL_S = 3.0


def trainer(steps: int) -> Launch:
    words = "torchrun --nproc_per_node=2 -m nsa.train --config configs/cpu_smoke.yaml"
    return launch(
        *(*words.split(), "--dataset", "synthetic", "--ddp", "1", "--steps", str(steps)),
        name="real", steps=steps, timeout_s=120,
        env={"NSA_PREFILL_BATCHED": "1", "NSA_WATCH_HEARTBEAT_STALL_S": f"{STALL_S:g}"},
    )  # fmt: skip


def test_a_healthy_run_leaves_nothing_outside_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(temporary := tmp_path / "temporary"))
    temporary.mkdir()
    launch = trainer(8)
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


def test_a_refusal_that_only_the_console_knows_is_quoted(tmp_path: Path) -> None:
    """There is no heartbeat yet."""
    launch = trainer(5)
    asked = launch.model_copy(update={"argv": (*launch.argv, "--set", "train.seq_lenn=4")})
    result = run_launch(asked, LaunchOptions(run_root=tmp_path, observer=Observer()))
    assert (result.status, result.attempts) == (LaunchStatus.CONFIG_ERROR, 1)
    told = "this launch cannot start: 1 problem(s) - --set (train.seq_lenn)"
    assert result.cause.startswith(told), result.cause
