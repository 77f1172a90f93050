"""What else the machine did while a launch ran: the CPU time of everything that is not ours.

The kernel counts the time of all processors, and the time of this program and of the children that
have ended. What is left is the work of others: of other users, or of the same one elsewhere.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from runbook.files import write_atomic
from runbook.folder.load import Load, load_of
from runbook.folder.names import LOAD_JSON


@dataclass(frozen=True, kw_only=True)
class CpuTimes:
    """Seconds since boot (`busy_s`, `steal_s`, `idle_s`, of all CPUs) and of this program's own."""

    busy_s: float
    steal_s: float
    idle_s: float
    own_s: float
    wall_s: float


def read_times() -> CpuTimes:
    """The counters now. Of children only those that have ended and were waited for are ours."""
    machine, own = psutil.cpu_times(), os.times()
    busy_s = sum(getattr(machine, name, 0.0) for name in ("user", "nice", "system"))
    busy_s += sum(getattr(machine, name, 0.0) for name in ("irq", "softirq"))
    return CpuTimes(
        busy_s=busy_s,
        steal_s=getattr(machine, "steal", 0.0),
        idle_s=machine.idle + getattr(machine, "iowait", 0.0),
        own_s=own.user + own.system + own.children_user + own.children_system,
        wall_s=time.monotonic(),
    )


class LoadMeter:
    """Reads the counters when it is made, and again when it writes: it costs two looks a launch."""

    def __init__(self) -> None:
        self._before = read_times()
        self._load_before = os.getloadavg()

    def write(self, run_dir: Path) -> Load | None:
        """Write `load.json` and return it; call it when nothing of the launch is alive.

        None where the kernel tells no times. Raises OSError.
        """
        then, now = self._before, read_times()
        total_s = sum(
            getattr(now, name) - getattr(then, name) for name in ("busy_s", "steal_s", "idle_s")
        )
        busy_s, own_s = now.busy_s - then.busy_s, now.own_s - then.own_s
        document = {
            "schema_version": 1,
            "problem": "" if total_s > 0 else "the kernel tells no times of the CPUs here",
            "cpus": psutil.cpu_count() or 1,
            "wall_s": round(now.wall_s - then.wall_s, 3),
            "total_s": round(total_s, 2),
            "busy_s": round(busy_s, 2),
            "own_s": round(own_s, 2),
            # Two clocks of the kernel that count differently: less than nothing is nothing.
            "others_s": round(max(0.0, busy_s - own_s), 2),
            "steal_s": round(now.steal_s - then.steal_s, 2),
            "load_before": list(self._load_before),
            "load_after": list(os.getloadavg()),
        }
        write_atomic(run_dir / LOAD_JSON, json.dumps(document, indent=2) + "\n")
        return load_of([document])
