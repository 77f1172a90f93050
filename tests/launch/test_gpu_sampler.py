"""GPU samples through NVML: a stand-in that goes on until it is ended."""

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

from nsa.contract import RUN_TOKEN_VARIABLE
from runbook.folder.launch.documents import GPU_SAMPLES
from runbook.folder.launch.evidence import read_launch
from runbook.folder.launch.rows import read_rows
from runbook.machine.gpu import devices as counters
from runbook.machine.gpu.devices import AFTER, gpu_samples, write_devices
from tests.factory.programs import first_on_path, program
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
    monkeypatch.setattr("runbook.machine.gpu.devices.SAMPLER", (sys.executable, "-c", code))
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
