"""Samples of the GPUs while a launch runs, through NVML."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from runbook.folder.documents import GPU_SAMPLES
from runbook.folder.names import GPU_SAMPLER_TXT, GPU_SAMPLES_CSV
from runbook.machine.gpu.devices import NVML_PROGRAM
from runbook.process.start import spawn

# The steps of a fast trainer are over in seconds.
_EVERY_MS = 200
_ENDED_WITHIN_S = 2.0


class GpuSampler:
    """Writes `gpu_samples.csv` five times a second until stopped, where NVML answers.

    `source` is what gave the counters before the launch: NVML, nvidia-smi or nothing.
    """

    def __init__(self, run_dir: Path, environment: Mapping[str, str], source: str) -> None:
        self._path = run_dir / GPU_SAMPLES_CSV
        self._environment = environment
        self._source = source
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin to sample. The sampler carries the launch's token, so it cannot be left over."""
        if self._source != "nvml":
            return
        command = [*NVML_PROGRAM, "samples", str(_EVERY_MS)]
        with self._path.open("wb") as stream:
            stream.write((",".join(GPU_SAMPLES.columns) + "\n").encode())
            stream.flush()
            self._process = spawn(command, self._environment, output=stream)

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
        """Keep whole rows; what the sampler said of a card that it lost goes into a file beside."""
        head, *lines = self._path.read_text("utf-8", "replace").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        rows = [line for line in whole if line.count(",") == len(GPU_SAMPLES.columns) - 1]
        said = [line for line in whole if line not in rows]
        self._path.write_text(head + "".join(rows), encoding="utf-8")
        if said:
            self._path.with_name(GPU_SAMPLER_TXT).write_text("".join(said), encoding="utf-8")
