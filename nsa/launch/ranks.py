"""The process group: start, small agreements between the ranks, what its collectives were, end.

torch's flight recorder runs anyway (gloo and NCCL alike) and a dump takes milliseconds. It holds
the order, operation, shape and creation time of the last collectives, which tells a desynchronized
rank from a slow one. It is written on SIGUSR2, at every bad end, and at the end of a run of several
ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nsa.contract import FLIGHT_COLUMNS, FLIGHTS, THREAD_VARIABLES, flight_row
from nsa.launch.output import write_bytes
from nsa.launch.plan import LaunchPlan, Place
from nsa.settings import refusal

# Description of the group whose collectives a save runs beside those of the steps.
SAVING_GROUP = "saving"
_SETTLE_S = 0.1
# Collectives of a flight record.
KEPT = 2000


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This rank among the others. Every method but the properties is a collective."""

    place: Place
    device: torch.device
    grouped: bool

    @property
    def rank(self) -> int:
        """Number of this rank, 0 for a single process."""
        return self.place.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.place.world_size if self.grouped else 1

    @property
    def timeout_s(self) -> float | None:
        """After how long the process group gives a collective up, as its backend has it.

        None without a group, and where this torch does not tell.
        """
        if not self.grouped:
            return None
        group = dist.distributed_c10d._get_default_group()
        backend = group._get_backend(self.device)
        # Under TORCH_DISTRIBUTED_DEBUG=DETAIL another one stands before it.
        backend = getattr(backend, "wrapped_pg", backend)
        options = getattr(backend, "options", None)
        return None if options is None else float(options._timeout.total_seconds())

    def sum(self, values: list[float]) -> list[float]:
        """Element-wise sum over the ranks."""
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor.tolist()]

    def mean(self, values: Tensor) -> Tensor:
        """Element-wise mean over the ranks, in place. Does not wait for a device."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values.div_(self.world_size)

    def any(self, flag: bool) -> bool:
        """Is the flag up on any rank?"""
        return self.sum([float(flag)])[0] > 0

    def from_rank0(self, text: str) -> str:
        """Rank 0's text, on every rank; at most 4096 bytes."""
        if self.world_size == 1:
            return text
        data = text.encode().ljust(4096, b"\0")
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        dist.broadcast(tensor, 0)
        return bytes(tensor.cpu().numpy()).rstrip(b"\0").decode()

    def tensor_of_rank0(self, values: Tensor) -> Tensor:
        """Rank 0's values, on every rank; all have this type and shape."""
        if self.world_size > 1:
            values = values.clone(memory_format=torch.contiguous_format)
            dist.broadcast(values, 0)
        return values

    def same_everywhere(self, digest: str) -> bool:
        """Do all ranks hold the same digest?"""
        return not self.any(self.from_rank0(digest) != digest)

    def end(self) -> None:
        """Leave the process group."""
        if self.grouped:
            # gloo's thread may still hold the last collective, whose tensors it frees under the
            # interpreter's lock. torch keeps that lock while it waits for the thread: both stand.
            time.sleep(_SETTLE_S)
            dist.destroy_process_group()


def choose_device(plan: LaunchPlan) -> torch.device:
    """The device of this rank. Raises ConfigError where the config asks for a missing one."""
    return device_of(plan.place, plan.config.runtime.device, asked_by="runtime.device")


def device_of(place: Place, asked: str, *, asked_by: str) -> torch.device:
    """The device of a rank: cpu, cuda or auto. Raises ConfigError where it is missing."""
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if place.local_rank >= count:
        problem = (
            f"{asked_by}={asked}: rank {place.rank} needs CUDA device "
            f"{place.local_rank}, but {count} are visible; set {asked_by} to cpu, use fewer ranks, "
            "or check CUDA_VISIBLE_DEVICES"
        )
        raise refusal([problem])
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


def start_ranks(plan: LaunchPlan, device: torch.device) -> Ranks:
    """Join the process group of a launch; none for a single process."""
    timeout = timedelta(minutes=plan.toggles.number("NSA_PG_TIMEOUT_MIN"))
    return join_ranks(plan.place, device, grouped=plan.ddp, timeout=timeout)


def join_ranks(place: Place, device: torch.device, *, grouped: bool, timeout: timedelta) -> Ranks:
    """Join the process group (gloo on the CPU, NCCL on GPUs) if the ranks are `grouped`."""
    if grouped:
        if device.type == "cuda":
            dist.init_process_group("nccl", timeout=timeout, device_id=device)
        else:
            dist.init_process_group("gloo", timeout=timeout)
    return Ranks(place=place, device=device, grouped=grouped)


def parameter_hash(module: nn.Module) -> str:
    """SHA-256 over all parameters' bytes, in order."""
    digest = hashlib.sha256()
    for parameter in module.parameters():
        whole = parameter.detach().contiguous().cpu()
        digest.update(whole.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def in_force(ranks: Ranks) -> dict[str, Any]:
    """`timeout_s` of the process group, `threads` of torch, and what these may depend on.

    Asked of torch and of the process group, not of the settings.
    """
    return {
        "timeout_s": ranks.timeout_s,
        "threads": torch.get_num_threads(),
        "cpus": len(os.sched_getaffinity(0)),
        "variables": {name: os.environ.get(name) for name in THREAD_VARIABLES},
    }


# -- what the last collectives were ---------------------------------------------------------------


def write_flight(run_dir: Path, *, rank: int, token: str, reason: str) -> None:
    """Write the last collectives of this rank; nothing if torch records none.

    Raises RecordWriteError when the file cannot be written. `created_ns` is on the wall clock;
    `wall_ns` and `mono` say how it stood to the monotonic clock when the file was written.
    """
    entries = _entries()
    if entries is None:
        return
    document = {
        "schema_version": 1,
        "rank": rank,
        "pid": os.getpid(),
        "token": token,
        "reason": reason,
        "wall_ns": time.time_ns(),
        "mono": time.monotonic(),
        "columns": list(FLIGHT_COLUMNS),
        "entries": entries[-KEPT:],
    }
    data = json.dumps(document, separators=(",", ":")).encode()
    write_bytes(run_dir / FLIGHTS.name(rank), data)


def _entries() -> list[list[Any]] | None:
    """The entries of the first recorder that has any; None if there is no recorder."""
    found = None
    for dump in _recorders():
        try:
            record = json.loads(dump())
        except (ValueError, RuntimeError):
            continue
        entries = record.get("entries", [])
        # A thread saves beside the steps: each rank in its own time, and with numbers of its own.
        kept = [one for one in entries if SAVING_GROUP not in one.get("process_group", ())]
        found = [flight_row(entry) for entry in kept if not entry.get("is_p2p")]
        if found:
            return found
    return found


def _recorders() -> list[Callable[[], bytes]]:
    """NCCL's recorder where the build has it, and the generic one, which gloo writes to.

    On a machine with GPUs a launch may use either.
    """
    import torch._C._distributed_c10d as c10d

    names = ["_dump_fr_trace_json"]
    if torch.cuda.is_available():
        names.insert(0, "_dump_nccl_trace_json")
    return [getattr(c10d, name) for name in names if hasattr(c10d, name)]
