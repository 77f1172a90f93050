"""GPU samples through a stand-in for NVML; real hangs on a GPU and what a rank leaves of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch

from nsa.contract import HEARTBEATS, NCCL_FLIGHTS, RUN_TOKEN_VARIABLE, STACKDUMPS
from runbook.config.load import load_profile
from runbook.folder.launch.documents import GPU_SAMPLES
from runbook.folder.launch.evidence import read_launch
from runbook.folder.launch.rows import read_rows
from runbook.launch import run_launch
from runbook.launch.end import said_by_watchdog
from runbook.launch.incident.flight import read_nccl_rows
from runbook.launch.observer import Observer
from runbook.launch.supervision import LaunchOptions
from runbook.launch.watch.watchdog import Budgets
from runbook.machine.gpu import cards as counters
from runbook.machine.gpu import detect_profile
from runbook.machine.gpu.cards import AFTER, gpu_samples, write_devices
from runbook.process import carriers
from runbook.records import LaunchResult, LaunchStatus
from runbook.tools.drill.scene import injected_at
from tests.factory.programs import first_on_path, program
from tests.factory.records import launch
from tests.launch.helpers import fake_launch, run
from tests.shared import crowded


def until_lines(path: Path, count: int) -> None:
    """Wait until a sampler has written so many lines."""
    give_up = time.monotonic() + 120
    while path.read_text().count("\n") < count:
        assert time.monotonic() < give_up
        time.sleep(0.05)


def sampler(folder: Path, token: str) -> pd.DataFrame:
    """The header and two samples of two GPUs at least."""
    environment = {**os.environ, RUN_TOKEN_VARIABLE: token}
    with gpu_samples(folder, environment):
        until_lines(folder / "gpu_samples.csv", 5)
    rows = read_rows(folder / "gpu_samples.csv", GPU_SAMPLES)
    assert rows.problems == ()
    return rows.frame


def test_nvml_is_sampled_and_tells_whose_processes_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, monkeypatch)
    token = "5a" * 16
    ours = {**os.environ, RUN_TOKEN_VARIABLE: token}
    own = subprocess.Popen(["sleep", "60"], env=ours)
    other = subprocess.Popen(["sleep", "60"])
    try:
        machine.say(own=own.pid, other=other.pid)
        frame = sampler(tmp_path, token)
    finally:
        for process in (own, other):
            process.kill()
            process.wait()
    assert set(frame["index"]) == {0, 1} and set(frame["source"]) == {"nvml"}
    last = frame.iloc[-1]
    assert (last["utilization_percent"], last["memory_used_mib"]) == (97, 4096)
    assert (last["power_w"], last["temperature_c"], last["sm_clock_mhz"]) == (301.5, 61, 1410)
    assert last["throttle_reasons"] == "0x0000000000000004" and last["uuid"] == "GPU-1"
    assert (last["other_processes"], last["others"]) == (1, f"{other.pid} sleep")


def test_a_number_without_a_process_is_unknown_unless_ours_are_recognized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, monkeypatch)
    token, nobody = "5a" * 16, 2**22 + 1
    own = subprocess.Popen(["sleep", "60"], env={**os.environ, RUN_TOKEN_VARIABLE: token})
    try:
        for pid, others in ((nobody + 1, (0, "")), (own.pid, (1, f"{nobody}"))):
            machine.say(own=pid, other=nobody)
            last = sampler(tmp_path, token).iloc[-1]
            assert (last["other_processes"], last["others"]) == others
    finally:
        own.kill()
        own.wait()


def test_samples_are_taken_while_the_launch_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(tmp_path, monkeypatch)
    nvidia_smi(tmp_path / "bin", monkeypatch, FIXTURES / "a100x2_pcie4.xml")
    launch = fake_launch(steps=40)
    evidence = read_launch(tmp_path, launch, run(launch, tmp_path))
    assert evidence.problems == ()
    assert evidence.devices_before is not None and evidence.devices_before["source"] == "nvidia-smi"
    assert evidence.gpu_samples is not None and set(evidence.gpu_samples["source"]) == {"nvml"}


def test_what_the_sampler_says_of_a_lost_card_is_kept_beside_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(tmp_path, monkeypatch)
    row = ",".join("1" for _ in GPU_SAMPLES.columns)
    code = f"print('{row}'); print('NVML: GPU is lost', flush=True); import time; time.sleep(60)"
    monkeypatch.setattr("runbook.machine.gpu.cards.SAMPLER", (sys.executable, "-c", code))
    with gpu_samples(tmp_path, dict(os.environ)):
        until_lines(tmp_path / "gpu_samples.csv", 3)
    assert (tmp_path / "gpu_samples.csv").read_text().splitlines()[1:] == [row]
    assert (tmp_path / "gpu_sampler.txt").read_text() == "NVML: GPU is lost\n"


FIXTURES = Path(__file__).parents[1] / "machine" / "fixtures"


def test_a_driver_that_hangs_ends_with_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path / "bin", monkeypatch, FIXTURES / "a100x2_pcie4.xml")
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 30\n")
    began = time.monotonic()
    assert write_devices(tmp_path, AFTER, {}, hurry=True) == ()
    assert time.monotonic() - began < crowded(8)
    document = json.loads((tmp_path / "devices_after.json").read_text())
    assert "no answer within 2 s" in document["problem"] and document["source"] == ""


SOURCE = Path(__file__).with_name("nvml_stand_in.c")


class Machine:
    """Loads the stand-in wherever the real library would be; `say` changes what it answers."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler: the stand-in for NVML cannot be built")
        library = folder / "lib" / "libnvidia-ml.so.1"
        library.parent.mkdir(parents=True)
        command = [compiler, "-shared", "-fPIC", "-Wall", "-o", str(library), str(SOURCE)]
        subprocess.run(command, check=True, capture_output=True)
        self._file = folder / "stand_in.txt"
        self._said: dict[str, int] = {}
        self.say()
        monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
        monkeypatch.setenv("NVIDIA_STAND_IN", str(self._file))
        monkeypatch.setattr(counters, "LIBRARY", str(library))

    def say(self, **values: int) -> None:
        """Answer so from now on."""
        self._said |= values
        self._file.write_text("".join(f"{k} {v}\n" for k, v in self._said.items()))


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, xml: Path | None) -> None:
    """A program of that name that prints this XML, or fails as one without a driver does."""
    told = f"cat {xml}" if xml else "echo 'NVIDIA-SMI has failed' >&2; exit 9"
    program(folder / "nvidia-smi", f"case $1 in -q) {told};; *) exit 1;; esac")
    first_on_path(monkeypatch, folder)


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
