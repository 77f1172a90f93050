"""What the GPUs count, written before and after each launch: errors, links, what slowed them.

NVML is asked first, and nvidia-smi kept beside it; where NVML gives no answer, nvidia-smi's XML is
read instead, and the document says so.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from nsa.torch_env import VISIBLE_DEVICES
from runbook.errors import RunbookError
from runbook.files import utc_text, write_atomic
from runbook.folder.launch.documents import GPU_SAMPLES
from runbook.folder.launch.kernel_lines import slot_of
from runbook.folder.names import (
    DEVICES_AFTER_JSON,
    DEVICES_BEFORE_JSON,
    GPU_SAMPLER_TXT,
    GPU_SAMPLES_CSV,
    NVIDIA_SMI_AFTER_XML,
    NVIDIA_SMI_BEFORE_XML,
)
from runbook.folder.redact import redact_text
from runbook.machine.gpu import Gpu, find_nvidia_smi, visible_gpus
from runbook.machine.gpu.nvidia_smi import ask_nvidia_smi, parse_nvidia_smi
from runbook.process.start import run_tool, spawn

# Not isolated: pynvml may be a wheel carried on PYTHONPATH. The script's own folder stays off it.
NVML_PROGRAM = (sys.executable, "-P", str(Path(__file__).with_name("nvml.py")))
# What pynvml loads. Where the loader does not find it, no process has to be started to know that.
LIBRARY = "libnvidia-ml.so.1"
_NVML_TIMEOUT_S = 10.0
_SMI_TIMEOUT_S = 20.0
_HURRIED_S = 1.0
_PCI_DEVICES = Path("/sys/bus/pci/devices")


class When(StrEnum):
    """Which of the two documents of a launch."""

    BEFORE = "before"
    AFTER = "after"


_FILES = {
    When.BEFORE: (DEVICES_BEFORE_JSON, NVIDIA_SMI_BEFORE_XML),
    When.AFTER: (DEVICES_AFTER_JSON, NVIDIA_SMI_AFTER_XML),
}


@dataclass(frozen=True, kw_only=True)
class Devices:
    """What was written: `source` is nvml, nvidia-smi or empty, `slots` the GPUs' PCI places."""

    source: str
    problem: str
    slots: tuple[str, ...]


def write_devices(
    run_dir: Path, when: When, environment: Mapping[str, str], *, hurry: bool = False
) -> Devices:
    """Ask about the GPUs that a launch in `environment` may use, and write what they answer.

    Without a driver the document says so and holds no GPU. In a `hurry`, because somebody waits
    for an interrupted run to end, only NVML is asked, for a second.
    Raises OSError if the disk refuses.
    """
    name, xml_name = _FILES[when]
    began = time.monotonic()
    answer = _ask_nvml(_HURRIED_S if hurry else _NVML_TIMEOUT_S)
    xml, smi_problem = ("", "interrupted: nvidia-smi was not asked") if hurry else _ask_smi()
    if xml:
        (run_dir / xml_name).write_text(redact_text(xml), encoding="utf-8")
    source, problem = "nvml", answer.get("problem", "")
    if problem:
        source, answer, problem = _from_smi(xml, smi_problem, problem)
    gpus = _visible(answer.get("gpus", []), environment)
    for gpu in gpus:
        gpu["pci_path"] = _path_to(gpu.get("pci"))
    document = {
        "schema_version": 1,
        "source": source,
        "problem": problem,
        "taken_at": utc_text(),
        "took_s": round(time.monotonic() - began, 4),
        "driver": answer.get("driver", ""),
        "visible": environment.get(VISIBLE_DEVICES),
        "gpus": gpus,
    }
    write_atomic(run_dir / name, json.dumps(document, indent=2) + "\n")
    slots = tuple(slot for gpu in gpus for slot in (*_slots(gpu), *gpu["pci_path"]))
    return Devices(source=source, problem=problem, slots=tuple(dict.fromkeys(slots)))


def _ask_nvml(timeout_s: float) -> dict[str, Any]:
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return {"problem": f"no NVIDIA driver: {LIBRARY} is not installed"}
    result = run_tool([*NVML_PROGRAM, "counters"], timeout_s=timeout_s)
    try:
        answer = json.loads(result.stdout)
    except ValueError:
        return {"problem": result.problem or "NVML gave no answer"}
    return answer if isinstance(answer, dict) else {"problem": "NVML gave no object"}


def _ask_smi() -> tuple[str, str]:
    """The XML, or an empty text and why there is none."""
    tool = find_nvidia_smi()
    if tool is None:
        return "", "no nvidia-smi"
    result = ask_nvidia_smi(tool, timeout_s=_SMI_TIMEOUT_S)
    return result.stdout, result.problem


def _from_smi(xml: str, smi_problem: str, problem: str) -> tuple[str, dict[str, Any], str]:
    """Source, answer and why it is not NVML's."""
    if smi_problem or not xml:
        return "", {}, f"{problem}; {smi_problem or 'nvidia-smi printed nothing'}"
    try:
        return "nvidia-smi", parse_nvidia_smi(xml).document(), problem
    except RunbookError as error:
        return "", {}, f"{problem}; {error}"


def _visible(gpus: list[dict[str, Any]], environment: Mapping[str, str]) -> list[dict[str, Any]]:
    seen = [Gpu(index=g["index"], uuid=str(g.get("uuid") or ""), mig=g.get("mig")) for g in gpus]
    chosen = {gpu.index for gpu in visible_gpus(seen, environment=environment)}
    return [gpu for gpu in gpus if gpu["index"] in chosen]


def _slots(gpu: Mapping[str, Any]) -> tuple[str, ...]:
    return (slot_of(gpu["pci"]),) if gpu.get("pci") else ()


def _path_to(pci: str | None, root: Path = _PCI_DEVICES) -> list[str]:
    """The bridges above a device, from the root; their errors are those of its link."""
    if not pci:
        return []
    place = root / f"{slot_of(pci)}.0"
    if not place.exists():
        return []
    parts = place.resolve().parts
    above = [part for part in parts[:-1] if part.count(":") == 2 and "." in part]
    return [slot_of(part) for part in above]


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
