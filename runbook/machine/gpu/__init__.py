"""What the GPUs are and count, by the XML of `nvidia-smi -q -x`, and which are visible.

What they do is NVML's to say. torch tells the UUIDs of its devices; where it does not,
CUDA_VISIBLE_DEVICES is read as CUDA reads it (CUDA C++ Programming Guide, "CUDA Environment
Variables").
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from nsa.torch_env import VISIBLE_DEVICES


def find_nvidia_smi() -> str | None:
    """The program, None where there is none."""
    return shutil.which("nvidia-smi")


_MIG = "MIG-"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What decides whether a launch sees a GPU: its place in nvidia-smi's order, its UUID (empty
    if unknown), and whether it is cut into instances.
    """

    index: int
    uuid: str
    mig: bool | None


_Gpu = TypeVar("_Gpu", bound=Gpu)


def visible_gpus(
    gpus: Sequence[_Gpu], *, environment: Mapping[str, str], uuids: Sequence[str] = ()
) -> tuple[_Gpu, ...]:
    """The GPUs that CUDA shows to a launch, in nvidia-smi's order.

    `uuids` are those of torch's devices, with or without the leading "GPU-".
    """
    chosen = _by_uuid(gpus, uuids)
    if chosen is None:
        chosen = _by_variable(gpus, environment.get(VISIBLE_DEVICES))
    return tuple(gpu for gpu in gpus if gpu.index in chosen)


def _by_uuid(gpus: Sequence[Gpu], uuids: Sequence[str]) -> set[int] | None:
    """Indices of torch's devices; None unless each of them is exactly one GPU."""
    known = {gpu.uuid.removeprefix("GPU-"): gpu.index for gpu in gpus if gpu.uuid}
    wanted = [uuid.removeprefix("GPU-") for uuid in uuids]
    if not wanted or len(known) < len(gpus) or not set(wanted) <= set(known):
        return None
    return {known[uuid] for uuid in wanted}


def _by_variable(gpus: Sequence[Gpu], text: str | None) -> set[int]:
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


def _meant(gpus: Sequence[Gpu], entry: str) -> set[int]:
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
