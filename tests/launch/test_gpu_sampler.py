"""GPU samples, by NVML and by nvidia-smi: stand-ins that go on until they are ended."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pandas as pd
import pytest

from nsa.contract import RUN_TOKEN_VARIABLE
from runbook.machine.gpu.sampler import GpuSampler
from runbook.read import read_launch
from runbook.read.documents import GPU_SAMPLES
from runbook.read.rows import read_rows
from tests.launch.helpers import fake_launch, run
from tests.launch.nvml import Machine

LINES = """\
2026/11/21 04:00:00.123, 0, 97, 49152, 81920, 301.50, 61, 1410, 0x0000000000000000, 4, 16, GPU-aa
2026/11/21 04:00:00.125, 1, 95, 49000, 81920, [N/A], 60, 1410, 0x0000000000000004, 4, 16, GPU-bb
"""


HELP = '"clocks_event_reasons.active"\\nBitmask of active clock event reasons.'


def stand_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, *, listed: str = HELP
) -> None:
    script = folder / "nvidia-smi"
    script.write_text(
        f"#!/bin/sh\nif [ $1 = --help-query-gpu ]; then printf '{listed}'; exit; fi\n"
        "if [ $1 = -q ]; then echo 'NVIDIA-SMI has failed'; exit 9; fi\n"
        f"echo $1 >{folder}/asked\n"
        f"cat <<'EOF'\n{text}EOF\nprintf '2026/11/21 04:0'\nsleep 60\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_samples_are_taken_while_the_launch_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, LINES)
    launch = fake_launch(steps=20)
    evidence = read_launch(tmp_path, launch, run(launch, tmp_path))
    assert evidence.problems == ()
    samples = evidence.gpu_samples
    assert samples is not None and samples["index"].tolist() == [0, 1]
    assert samples["utilization_percent"].tolist() == [97, 95]
    assert samples["power_w"].isna().tolist() == [False, True]
    assert samples["throttle_reasons"].iloc[1].endswith("4")
    assert samples["uuid"].tolist() == ["GPU-aa", "GPU-bb"]
    assert set(samples["source"]) == {"nvidia-smi"} and samples["other_processes"].isna().all()
    assert evidence.gpu_samples_path == "baseline/one/gpu_samples.csv"


def test_what_nvidia_smi_says_instead_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, "Unable to determine the device handle: Unknown Error\n")
    launch = fake_launch(steps=20)
    evidence = read_launch(tmp_path, launch, run(launch, tmp_path))
    assert evidence.problems == ()
    assert evidence.gpu_samples is not None and len(evidence.gpu_samples) == 0
    said = tmp_path / "baseline/one/gpu_sampler.txt"
    assert "Unable to determine" in said.read_text()


@pytest.mark.parametrize(
    ("listed", "asked"),
    [
        (HELP, "clocks_event_reasons.active"),
        ('"clocks_throttle_reasons.active"', "clocks_throttle_reasons.active"),
        (
            '"clocks_throttle_reasons.active" or "clocks_event_reasons.active"',
            "clocks_event_reasons.active",
        ),
    ],
)
def test_a_field_is_asked_for_by_the_name_that_this_driver_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str, asked: str
) -> None:
    stand_in(tmp_path, monkeypatch, LINES, listed=listed)
    run(fake_launch(steps=20), tmp_path)
    (query,) = (tmp_path / "asked").read_text().split()
    fields = query.removeprefix("--query-gpu=").split(",")
    assert asked in fields and len(fields) == GPU_SAMPLES.columns.index("uuid") + 1
    assert len([name for name in fields if "reasons" in name]) == 1


def sampler(folder: Path, token: str, seconds: float = 1.2) -> pd.DataFrame:
    environment = {**os.environ, RUN_TOKEN_VARIABLE: token}
    one = GpuSampler(folder, environment, "nvml")
    one.start()
    time.sleep(seconds)
    one.stop()
    rows = read_rows(folder / "gpu_samples.csv", GPU_SAMPLES)
    assert rows.problems == []
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
        time.sleep(0.1)  # until both have become what they run
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
    assert (last["own_processes"], last["own_utilization_percent"]) == (1, 70)
    assert (last["own_memory_mib"], last["other_processes"]) == (1024, 1)
    assert last["others"] == f"{other.pid} sleep" and last["unknown_processes"] == 0


def test_a_number_without_a_process_is_unknown_unless_ours_are_recognized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(tmp_path, monkeypatch).say(own=2**22 + 1, other=2**22 + 2)
    last = sampler(tmp_path, "5a" * 16).iloc[-1]
    assert (last["own_processes"], last["other_processes"]) == (0, 0)
    assert last["unknown_processes"] == 2 and last["others"] == ""


def test_a_launch_is_sampled_by_nvml_where_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(tmp_path, monkeypatch)
    launch = fake_launch(steps=40)
    evidence = read_launch(tmp_path, launch, run(launch, tmp_path))
    assert evidence.problems == ()
    assert evidence.devices_before is not None and evidence.devices_before["source"] == "nvml"
    assert evidence.gpu_samples is not None and set(evidence.gpu_samples["source"]) == {"nvml"}
