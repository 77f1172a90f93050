"""What the GPUs count, written before and after each launch: errors, links, what slowed them.

Both documents are read from nvidia-smi's XML, which is kept beside them; NVML gives the samples.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from nsa.torch_env import VISIBLE_DEVICES
from runbook.files import utc_text, write_atomic
from runbook.folder import (
    DEVICES_AFTER_JSON,
    DEVICES_BEFORE_JSON,
    GPU_SAMPLER_TXT,
    GPU_SAMPLES_CSV,
    NVIDIA_SMI_AFTER_XML,
    NVIDIA_SMI_BEFORE_XML,
)
from runbook.folder.facts import redact_text
from runbook.folder.launch.documents import GPU_SAMPLES
from runbook.machine.gpu import find_nvidia_smi, visible_gpus
from runbook.machine.gpu.nvidia_smi import read_nvidia_smi
from runbook.machine.kernel_log import slot_of
from runbook.process import start

# Not isolated: pynvml may be a wheel carried on PYTHONPATH. The script's own folder stays off it.
SAMPLER = (sys.executable, "-P", str(Path(__file__).with_name("nvml.py")))
# What pynvml loads. Where the loader does not find it, no process has to be started to know that.
LIBRARY = "libnvidia-ml.so.1"
_WITHIN_S, _HURRIED_S = 20.0, 2.0
_PCI_DEVICES = Path("/sys/bus/pci/devices")


# The document of a launch, and the XML that it was read from.
BEFORE = DEVICES_BEFORE_JSON, NVIDIA_SMI_BEFORE_XML
AFTER = DEVICES_AFTER_JSON, NVIDIA_SMI_AFTER_XML


def write_devices(
    run_dir: Path, when: tuple[str, str], environment: Mapping[str, str], *, hurry: bool = False
) -> tuple[str, ...]:
    """Ask about the GPUs that a launch in `environment` may use, and write what they answer.

    Returns their PCI places, and those of the bridges above them.
    Without a driver the document says so and holds no GPU. In a `hurry`, because somebody waits
    for an interrupted run to end, the answer has to come within two seconds.
    Raises OSError if the disk refuses.
    """
    name, xml_name = when
    tool = find_nvidia_smi()
    smi, xml, problem = None, "", "no nvidia-smi"
    if tool is not None:
        smi, xml, problem = read_nvidia_smi(tool, within_s=_HURRIED_S if hurry else _WITHIN_S)
    if xml:
        (run_dir / xml_name).write_text(redact_text(xml), encoding="utf-8")
    gpus = smi.counted(visible_gpus(smi.gpus, environment=environment)) if smi else []
    for gpu in gpus:
        gpu["pci_path"] = _path_to(gpu["pci"])
    document = {
        "schema_version": 1,
        "source": "nvidia-smi" if smi else "",
        "problem": problem,
        "taken_at": utc_text(),
        "driver": smi.driver or "" if smi else "",
        "visible": environment.get(VISIBLE_DEVICES),
        "gpus": gpus,
    }
    write_atomic(run_dir / name, json.dumps(document, indent=2) + "\n")
    placed = [gpu for gpu in gpus if gpu["pci"]]
    slots = [slot for gpu in placed for slot in (slot_of(gpu["pci"]), *gpu["pci_path"])]
    return tuple(dict.fromkeys(slots))


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


@contextmanager
def gpu_samples(run_dir: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Write `gpu_samples.csv` five times a second, where NVML is installed.

    The sampler carries the token of the launch's `environment`, so it cannot be left over. Rows
    stay; what it says of a card that it lost goes into a file beside them.
    """
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        yield
        return
    path = run_dir / GPU_SAMPLES_CSV
    with path.open("wb") as stream:
        stream.write((",".join(GPU_SAMPLES.columns) + "\n").encode())
        stream.flush()
        process = start(
            [*SAMPLER, str(_EVERY_MS)], environment, stdout=stream, stderr=subprocess.STDOUT
        )
    try:
        yield
    finally:
        process.kill()
        # One that hangs in the driver of a lost card cannot be killed; the reaper goes on trying.
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_ENDED_WITHIN_S)
        head, *lines = path.read_text("utf-8", "replace").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        rows = [line for line in whole if line.count(",") == len(GPU_SAMPLES.columns) - 1]
        path.write_text(head + "".join(rows), encoding="utf-8")
        if said := [line for line in whole if line not in rows]:
            path.with_name(GPU_SAMPLER_TXT).write_text("".join(said), encoding="utf-8")
