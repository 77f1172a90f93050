"""Flight records: what NCCL's watchdog dumps before it aborts, and the trainer's own JSON.

The dump's form is that of PyTorch's documentation ("Flight Recorder", tools/flight_recorder): a
pickle of a dictionary with `version`, `pg_config`, `pg_status`, `nccl_comm_state` and `entries`.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

from benchmarks.rehearsal.trainer.beats import Rank
from benchmarks.rehearsal.trainer.effects import MIB, buckets
from nsa.contract import FLIGHTS, NCCL_FLIGHTS

_SHOWN_STEPS = 40


def _collectives(rank: Rank, steps: int, missing: int) -> list[dict[str, Any]]:
    """The last steps' collectives: a bucket after the other, then five numbers; `missing` of the
    last ones were never entered."""
    job, entries = rank.job, []
    block = job.blocks[0]
    kind = "BFloat16" if block.settings.get("NSA_DDP_COMPRESS") == "bf16" else "Float"
    sizes = [[round(mib * MIB / 4)] for mib in buckets(rank.job, block)]
    first = max(0, steps - _SHOWN_STEPS)
    number = 6 + first * (len(sizes) + 1)
    late = 0.0
    for at in range(first, steps):
        end = float(rank.steps.device_end_s[min(at, len(rank.steps.device_end_s) - 1)])
        for place, size in enumerate([*sizes, [5]]):
            number += 1
            created = rank.began_s + rank.wall_s + end - 0.012 + 0.0015 * place + late
            entries.append(_entry(number, size, kind if size != [5] else "Double", created))
    return entries[: len(entries) - missing] if missing else entries


def _entry(number: int, size: list[int], kind: str, created: float) -> dict[str, Any]:
    nanoseconds = int(created * 1e9)
    return {
        "record_id": number - 1,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": nanoseconds,
        "duration_ms": 1.9,
        "input_sizes": [size],
        "input_dtypes": [kind],
        "output_sizes": [size],
        "output_dtypes": [kind],
        "state": "completed",
        "time_discovered_started_ns": nanoseconds + 80_000,
        "time_discovered_completed_ns": nanoseconds + 2_000_000,
        "retired": True,
        "timeout_ms": 900_000,
        "is_p2p": False,
        "frames": [{"name": "compressed_all_reduce", "filename": "ddp.py", "line": 58}],
    }


def write_nccl_dump(folder: Path, rank: Rank, steps: int, *, behind: bool, hung: bool) -> None:
    """What the watchdog of a rank writes; the rank that is `behind` did not enter the last one."""
    entries = _collectives(rank, steps, missing=1 if behind else 0)
    if hung and not behind:
        entries[-1] |= {"state": "scheduled", "retired": False, "duration_ms": None}
        entries[-1] |= {"time_discovered_completed_ns": None}
    last = entries[-1]["collective_seq_id"]
    status = {"last_enqueued_collective": last, "last_started_collective": last,
              "last_completed_collective": last - (1 if hung else 0)}  # fmt: skip
    document = {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
        "pg_status": {"0": status},
        "nccl_comm_state": {},
        "entries": entries,
    }
    path = folder / NCCL_FLIGHTS.name(rank.rank)
    path.write_bytes(pickle.dumps(document, protocol=2))


def write_own_record(folder: Path, rank: Rank, steps: int, reason: str) -> None:
    """flight_rank*.json, as the trainer writes it at the end."""
    entries = [
        [e["collective_seq_id"], "all_reduce", e["input_sizes"], e["input_dtypes"],
         e["time_created_ns"], e["retired"]]
        for e in _collectives(rank, steps, missing=0)
    ]  # fmt: skip
    now = rank.began_s + float(rank.steps.device_end_s[steps - 1]) + 0.4
    document = {
        "schema_version": 1,
        "rank": rank.rank,
        "pid": rank.pid,
        "token": rank.token,
        "reason": reason,
        "wall_ns": int((now + rank.wall_s) * 1e9),
        "mono": now,
        "columns": ["seq", "op", "sizes", "dtypes", "created_ns", "retired"],
        "entries": entries,
    }
    (folder / FLIGHTS.name(rank.rank)).write_text(json.dumps(document, separators=(",", ":")))
