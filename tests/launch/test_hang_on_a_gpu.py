"""Real hangs on a GPU, and what a rank leaves of them; on a CPU `runbook drill` has its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nsa.contract import HEARTBEATS, NCCL_FLIGHTS, STACKDUMPS
from runbook.config.load import load_profile
from runbook.launch import Budgets, LaunchOptions, run_launch
from runbook.launch.end import said_by_watchdog
from runbook.launch.incident.flight import read_nccl_rows
from runbook.launch.observer import Observer
from runbook.machine.gpu import detect_profile
from runbook.process.reaper import carriers
from runbook.records import LaunchResult, LaunchStatus
from runbook.tools.drill.scene import injected_at
from tests.factory.records import launch

STEPS = 4000
# Small, so that the launch is about its collectives; the backend and the device are the real ones.
SMALL: dict[str, str | int | float | bool] = {"model.n_layers": 2, "train.seq_len": 256}
# By the folder that it leaves: what is injected, after how long the harness acts, and NCCL's own
# limit, which is shorter where its dump is wanted.
HANGS = {
    "asleep": ("sleep", 5.0, {}),
    "nccl_timeout": ("stuck_stream", 40.0, {"NSA_PG_TIMEOUT_MIN": "0.15"}),
}


def missing(name: str, result: LaunchResult, folder: Path) -> list[str]:
    """What is missing of what this hang of one rank has to leave."""
    ended = {"asleep": (LaunchStatus.HUNG,)}.get(name, (LaunchStatus.CRASHED, LaunchStatus.HUNG))
    dumps = NCCL_FLIGHTS.found_in(folder).values()
    found = {
        f"ended as {result.status}": result.status not in ended,
        "never injected": injected_at(folder) is None,
        "no heartbeat": not HEARTBEATS.found_in(folder),
        "no silence in the cause": (
            result.status is LaunchStatus.HUNG and "silent for" not in result.cause
        ),
        "processes are alive": bool(result.run_token and carriers(result.run_token)),
    }
    if name == "asleep":
        stacks = [path for path in folder.glob(STACKDUMPS.glob()) if path.stat().st_size]
        found["no stack dump"] = not stacks
    else:
        found["no dump of NCCL's watchdog that can be read"] = not any(
            read_nccl_rows(path.read_bytes()) for path in dumps
        )
        found["no word of NCCL's watchdog"] = not said_by_watchdog([result.cause], None)
    return [text for text, wrong in found.items() if wrong]


@pytest.mark.gpu
@pytest.mark.e2e
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", HANGS)
def test_one_rank_that_hangs_leaves_what_says_so(name: str, tmp_path: Path) -> None:
    kind, stall_s, variables = HANGS[name]
    profile = load_profile(detect_profile()[0])
    config = f"configs/{profile.config}"
    command = (
        *("torchrun", "--nproc_per_node=1", "-m", "nsa.inject", kind, "0", "6", "--"),
        *("--config", config, "--dataset", "synthetic", "--ddp", "1", "--steps", str(STEPS)),
    )
    started = launch(
        *command,
        name=name, phase="evidence", run_dir=name, nproc=1, steps=STEPS, timeout_s=90,
        config=config, env={name: one.value for name, one in profile.env.items()} | variables,
        config_overrides={**profile.phases["baseline"].config_overrides, **SMALL},
    )  # fmt: skip
    budgets = Budgets(step_s=stall_s, data_s=stall_s, init_s=60, first_step_s=60)
    how = LaunchOptions(run_root=tmp_path, observer=Observer(), budgets=budgets, retry=False)
    result = run_launch(started, how)
    assert missing(name, result, tmp_path / name) == []
