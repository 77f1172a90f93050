"""The kernel's own count of processes killed for memory in this control group."""

from __future__ import annotations

from pathlib import Path

__all__ = ["oom_kills"]

_ROOT = Path("/sys/fs/cgroup")


def oom_kills(root: Path = _ROOT, membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """The `oom_kill` counter of the group that this process is in; None if it cannot be read."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers == "":
            candidates = [root / group.lstrip("/") / "memory.events", root / "memory.events"]
        elif "memory" in controllers.split(","):
            folder = root / "memory"
            candidates = [
                folder / group.lstrip("/") / "memory.oom_control",
                folder / "memory.oom_control",
            ]
        else:
            continue
        for path in candidates:
            count = _counter(path)
            if count is not None:
                return count
    return None


def _counter(path: Path) -> int | None:
    try:
        fields = dict(line.split()[:2] for line in path.read_text("utf-8").splitlines() if line)
        return int(fields["oom_kill"])
    except (OSError, KeyError, ValueError):
        return None
