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
