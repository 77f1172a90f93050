"""Samples of the GPUs while a launch runs: by NVML where it answers, else by nvidia-smi."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from runbook.machine.gpu.devices import NVML_PROGRAM
from runbook.process.start import run_tool, spawn
from runbook.read.documents import GPU_SAMPLER_TXT, GPU_SAMPLES, GPU_SAMPLES_CSV

# The first columns of GPU_SAMPLES, as nvidia-smi calls them.
_FIELDS = (
    "timestamp",
    "index",
    "utilization.gpu",
    "memory.used",
    "memory.total",
    "power.draw",
    "temperature.gpu",
    "clocks.sm",
    "clocks_event_reasons.active",
    "pcie.link.gen.current",
    "pcie.link.width.current",
    "uuid",
)
# What drivers before 535 call a field. One unknown name, and nvidia-smi answers nothing at all.
_OLDER = {"clocks_event_reasons.active": "clocks_throttle_reasons.active"}
# The steps of a fast trainer are over in seconds.
_EVERY_MS = 200
_HELP_TIMEOUT_S = 10.0
_ENDED_WITHIN_S = 2.0
_NO_VALUE = ("[N/A]", "N/A", "[Not Supported]", "[Unknown Error]", "[GPU requires reset]")


def query_fields(tool: str) -> tuple[str, ...]:
    """The fields by the names that this nvidia-smi lists in its help."""
    known = run_tool([tool, "--help-query-gpu"], timeout_s=_HELP_TIMEOUT_S).stdout
    return tuple(_OLDER[name] if name in _OLDER and name not in known else name for name in _FIELDS)


class GpuSampler:
    """Writes `gpu_samples.csv` five times a second until stopped, where there is a driver.

    `source` is what gave the counters before the launch: NVML, nvidia-smi or nothing. The file's
    column of that name says who wrote a row; only NVML tells whose processes compute.
    """

    def __init__(self, run_dir: Path, environment: Mapping[str, str], source: str) -> None:
        self._path = run_dir / GPU_SAMPLES_CSV
        self._environment = environment
        self._source = source
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin to sample. The sampler carries the launch's token, so it cannot be left over."""
        command = self._command()
        if not command:
            return
        with self._path.open("wb") as stream:
            stream.write((",".join(GPU_SAMPLES.columns) + "\n").encode())
            stream.flush()
            self._process = spawn(command, self._environment, output=stream)

    def _command(self) -> list[str]:
        if self._source == "nvml":
            return [*NVML_PROGRAM, "samples", str(_EVERY_MS)]
        tool = shutil.which("nvidia-smi")
        if tool is None:
            return []
        return [
            tool,
            f"--query-gpu={','.join(query_fields(tool))}",
            "--format=csv,noheader,nounits",
            f"--loop-ms={_EVERY_MS}",
        ]

    def stop(self) -> None:
        """End the sampler; rows already written stay."""
        if self._process is None:
            return
        self._process.kill()
        # One that hangs in the driver of a lost card cannot be killed; the reaper goes on trying.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_ENDED_WITHIN_S)
        self._process = None
        self._tidy()

    def _tidy(self) -> None:
        """nvidia-smi pads its fields, writes words for what a device lacks, and errors as lines."""
        head, *lines = self._path.read_text("utf-8", "replace").splitlines(keepends=True)
        columns = GPU_SAMPLES.columns
        unknown = [""] * (len(columns) - len(_FIELDS) - 1)
        rows, said = [], []
        for line in lines:
            fields = [field.strip() for field in line.split(",")]
            if not line.endswith("\n"):
                continue
            if len(fields) == len(_FIELDS):
                fields = [*fields, "nvidia-smi", *unknown]
            if len(fields) == len(columns):
                rows.append(",".join("" if f in _NO_VALUE else f for f in fields) + "\n")
            else:
                said.append(line)
        self._path.write_text(head + "".join(rows), encoding="utf-8")
        if said:
            self._path.with_name(GPU_SAMPLER_TXT).write_text("".join(said), encoding="utf-8")
