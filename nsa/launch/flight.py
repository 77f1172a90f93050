"""What this rank's collectives were: torch's flight recorder as a small JSON file.

The recorder runs anyway (gloo and NCCL alike) and a dump takes milliseconds. It holds the order,
operation, shape and creation time of the last collectives, which tells a desynchronized rank from
a slow one. It is written on SIGUSR2, at every bad end, and at the end of a run of several ranks.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nsa.contract import FLIGHTS
from nsa.launch.output import write_bytes
from nsa.launch.ranks import SAVING_GROUP

KEPT = 2000


def write_flight(run_dir: Path, *, rank: int, token: str, reason: str) -> Path | None:
    """Write the last collectives of this rank; None if torch records none.

    Raises RecordWriteError when the file cannot be written. `created_ns` is on the wall clock;
    `wall_ns` and `mono` say how it stood to the monotonic clock when the file was written.
    """
    entries = _entries()
    if entries is None:
        return None
    document = {
        "schema_version": 1,
        "rank": rank,
        "pid": os.getpid(),
        "token": token,
        "reason": reason,
        "wall_ns": time.time_ns(),
        "mono": time.monotonic(),
        "columns": ["seq", "op", "sizes", "dtypes", "created_ns", "retired"],
        "entries": entries[-KEPT:],
    }
    path = run_dir / FLIGHTS.name(rank)
    write_bytes(path, json.dumps(document, separators=(",", ":")).encode())
    return path


def _entries() -> list[list[Any]] | None:
    """The entries of the first recorder that has any; None if there is no recorder."""
    found = None
    for dump in _recorders():
        try:
            record = json.loads(dump())
        except (ValueError, RuntimeError):
            continue
        entries = record.get("entries", [])
        found = [_row(entry) for entry in entries if not (entry.get("is_p2p") or _of_a_save(entry))]
        if found:
            return found
    return found


def _of_a_save(entry: dict[str, Any]) -> bool:
    """A thread saves beside the steps: each rank in its own time, and with numbers of its own."""
    return SAVING_GROUP in entry.get("process_group", ())


def _row(entry: dict[str, Any]) -> list[Any]:
    return [
        entry.get("collective_seq_id"),
        str(entry.get("profiling_name", "")).partition(":")[2],
        entry.get("input_sizes", []),
        entry.get("input_dtypes", []),
        entry.get("time_created_ns"),
        bool(entry.get("retired")),
    ]


def _recorders() -> list[Callable[[], bytes]]:
    """NCCL's recorder where the build has it, and the generic one, which gloo writes to.

    On a machine with GPUs a launch may use either.
    """
    import torch
    import torch._C._distributed_c10d as c10d
    import torch.distributed as dist

    if not dist.is_available():
        return []
    names = ["_dump_fr_trace_json"]
    if torch.cuda.is_available():
        names.insert(0, "_dump_nccl_trace_json")
    return [getattr(c10d, name) for name in names if hasattr(c10d, name)]
