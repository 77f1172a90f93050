"""Which GPUs there are, which are visible, and the profile that they have: `--profile auto`.

What they are and count is told by the XML of `nvidia-smi -q -x`, what they do by NVML.
CUDA_VISIBLE_DEVICES is read as CUDA reads it (CUDA C++ Programming Guide, "CUDA Environment
Variables"). `cpu` proves function only, so it is taken only
where nothing of an NVIDIA device is seen. A card without a profile, or a driver that does not
answer, is for a person to decide.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nsa.torch_env import VISIBLE_DEVICES
from runbook.errors import UsageError
from runbook.files import text_there

if TYPE_CHECKING:
    from runbook.machine.gpu.cards import GpuState

# NVML's bits of what holds the clocks back.
BITS = {
    "gpu_idle": 0x1,
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
    "display_clocks_setting": 0x100,
}
# Reasons that slow a GPU down in a way that makes its timings worthless; being idle is not one.
THROTTLES = {
    "hw_slowdown": "hardware slowdown",
    "hw_thermal_slowdown": "hardware thermal slowdown",
    "hw_power_brake_slowdown": "power brake",
    "sw_thermal_slowdown": "software thermal slowdown",
}
# Limits that somebody set or that the card keeps to by design, under load too: told, no fault.
CAPS = {"sw_power_cap": "power cap", "applications_clocks_setting": "applications clocks set"}


def find_nvidia_smi() -> str | None:
    """The program, None where there is none."""
    return shutil.which("nvidia-smi")


_MIG = "MIG-"


def visible_gpus(
    gpus: Sequence[GpuState], *, environment: Mapping[str, str]
) -> tuple[GpuState, ...]:
    """The GPUs that CUDA shows to a launch, in nvidia-smi's order."""
    chosen = _by_variable(gpus, environment.get(VISIBLE_DEVICES))
    return tuple(gpu for gpu in gpus if gpu.index in chosen)


def _by_variable(gpus: Sequence[GpuState], text: str | None) -> set[int]:
    """Indices that the variable names: all if it is not set, none after the first invalid entry."""
    if text is None:
        return {gpu.index for gpu in gpus}
    entries = [entry.strip() for entry in text.split(",")]
    if len(set(entries)) < len(entries):
        return set()  # CUDA shows no device where one is named twice
    chosen: set[int] = set()
    for entry in entries:
        found = _meant(gpus, entry)
        if not found:
            break
        chosen |= found
    return chosen


def _meant(gpus: Sequence[GpuState], entry: str) -> set[int]:
    """The GPUs that one entry stands for: an index, or the beginning of one UUID."""
    if entry.isdigit():
        return {gpu.index for gpu in gpus if gpu.index == int(entry)}
    if entry.startswith(_MIG):
        # The older form holds the UUID of its GPU; of the newer one only nvidia-smi -L knows it.
        uuid = entry.removeprefix(_MIG).partition("/")[0]
        holders = {gpu.index for gpu in gpus if gpu.uuid and gpu.uuid == uuid}
        return holders or {gpu.index for gpu in gpus if gpu.mig}
    found = {gpu.index for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)}
    return found if len(found) == 1 else set()


_NVIDIA_VENDOR = "0x10de"
_DISPLAY_CLASS = "0x03"  # VGA and 3D controllers; the sound function of a card has another


def detect_profile(root: Path = Path("/")) -> tuple[str, str]:
    """Name of the profile that fits this machine, and the reason in words.

    `root` is where `dev`, `proc` and `sys` are looked for. Raises UsageError where an NVIDIA device
    or driver is seen that no shipped profile fits: `cpu` has to be asked for by name then.
    """
    signs = _nvidia_signs(root)
    program = find_nvidia_smi()
    if program is None:
        if signs:
            raise _refused([*signs, "nvidia-smi is not installed"])
        return "cpu", "nvidia-smi is not installed and no NVIDIA device is seen: no GPU to use"
    # Parsing XML and starting processes: `runbook` alone has no use for it where there is no GPU.
    from runbook.machine.gpu.cards import read_nvidia_smi

    smi, _, problem = read_nvidia_smi(program)
    if smi is None:
        raise _refused([problem, *signs])
    if not smi.gpus:
        if signs:
            raise _refused(["nvidia-smi lists no GPU", *signs])
        return "cpu", "nvidia-smi lists no GPU"
    shown = visible_gpus(smi.gpus, environment=os.environ)
    if not shown:
        hidden = f"{VISIBLE_DEVICES}={os.environ.get(VISIBLE_DEVICES)} hides all GPUs"
        raise _refused([hidden, *signs])
    return profile_for([(gpu.name, gpu.link["gen_max"]) for gpu in shown])


def profile_for(cards: Sequence[tuple[str, int | None]]) -> tuple[str, str]:
    """Name of the profile for cards by name and highest PCIe generation, and why.

    Raises UsageError for cards that no shipped profile has limits for.
    """
    # The models of profiles: `runbook` alone has no use for them where there is no GPU.
    from runbook.config.load import seen_as

    names = [name for name, _ in cards]
    seen = f"{len(names)} x {names[0]}" if len(set(names)) == 1 else " + ".join(names)
    found = seen_as(names, [generation for _, generation in cards])
    if found is None:
        raise _refused([f"{seen}, for which no shipped profile has limits"])
    told = "/".join(sorted({"?" if one is None else str(one) for _, one in cards}))
    return found, f"found {seen}" + (f", PCIe generation {told}" if "_pcie" in found else "")


def _refused(seen: list[str]) -> UsageError:
    return UsageError(
        f"--profile auto: this machine has an NVIDIA device or driver, but none that fits a "
        f"profile: {'; '.join(seen)}",
        hint="repair the driver, or name a profile (runbook profiles; CONTRIBUTING.md says how to "
        "write one); --profile cpu asks for the CPU, which proves function only",
    )


def _nvidia_signs(root: Path) -> list[str]:
    """What of an NVIDIA device or its driver the kernel shows, whether or not it works."""
    nodes = sorted(path.name for path in (root / "dev").glob("nvidia*"))
    signs = [f"device nodes /dev/{', /dev/'.join(nodes)}"] if nodes else []
    if (root / "proc/driver/nvidia").exists():
        signs.append("/proc/driver/nvidia")
    cards = [
        folder.name
        for folder in sorted((root / "sys/bus/pci/devices").glob("*"))
        if text_there(folder / "vendor").strip() == _NVIDIA_VENDOR
        and text_there(folder / "class").startswith(_DISPLAY_CLASS)
    ]
    return [*signs, f"PCI {', '.join(cards)} of vendor {_NVIDIA_VENDOR}"] if cards else signs
