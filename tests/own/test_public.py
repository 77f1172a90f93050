"""Real trainers of other people, found by `runbook init` and judged: their trainer, our script.

Those that are not installed are skipped: `pip install 'nsa-runbook[trainers]'`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from runbook.config.load import load_profile
from runbook.records import Outcome
from tests.own.runs import TRAINERS, judged, launched
from tests.own.test_run import runbook

_TORCHRUN = "torchrun --nproc_per_node=2 {script} --max_steps 9 --output_dir somewhere"
_LIVED = {"ranks_alive", "loss_finite", "plausible"}


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "needs", "command", "more", "columns"),
    [
        ("plain_ddp", "torch", "torchrun --nproc_per_node=2 {script} --steps 9", (), {}),
        ("spawned", "torch", "python {script} --ranks 2 --steps 9 --out somewhere",
         ("--heartbeats", "{out}/alive_{rank}.jsonl:at"),
         {"step": "iteration", "loss": "train/loss", "lr": "lr"}),
        ("hf", "transformers", _TORCHRUN, (),
         {"loss": "loss", "lr": "learning_rate", "grad_norm": "grad_norm"}),
        ("lit", "lightning", _TORCHRUN, (), {"step": "step", "loss": "train_loss"}),
    ],
)  # fmt: skip
def test_a_trainer_is_found_and_judged_as_it_is(
    tmp_path: Path, script: str, needs: str, command: str, more: tuple[str, ...],
    columns: dict[str, str],
) -> None:  # fmt: skip
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed: pip install 'nsa-runbook[trainers]'")
    typed = command.replace("{script}", str(TRAINERS / f"{script}.py"))
    told = runbook(
        tmp_path, "init", "--trainer", typed, "--tokens-per-rank", "64", "--profile", "cpu",
        "--ranks", "2", *more,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    profile = load_profile(str(tmp_path / f"{script}.yaml"))
    own = profile.own_trainer
    assert own is not None and own.log.columns == columns
    assert {f"baseline.{name}" for name in _LIVED} <= set(profile.required)
    short = profile.phases["baseline"].model_copy(update={"launches": 1, "steps": 60})
    phases = {**profile.phases, "baseline": short}
    profile = profile.model_copy(update={"phases": phases})
    evidence = launched(profile, tmp_path / "run")
    checks = judged(profile, evidence)
    passed = {name for name in _LIVED if checks[name].outcome is Outcome.PASS}
    assert passed == _LIVED, {name: checks[name].reason for name in _LIVED}
    assert evidence.training is not None and evidence.training.frame["step"].iloc[-1] > 50
