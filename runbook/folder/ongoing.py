"""A run that goes on: told by the lock of its journal, which its process holds until its end.

Reads plain JSON and imports next to nothing, so that a look costs no time.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from runbook.folder.names import EVENTS_FILE

RUNNING = "RUNNING"
Event = Mapping[str, Any]


def is_going_on(folder: Path) -> bool:
    """True if a process holds the journal of the run in this folder; False without a journal."""
    path = folder / EVENTS_FILE
    if not path.is_file():
        return False
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # Shared: two that look at once are no run that goes on.
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def events_so_far(path: Path) -> list[Event]:
    """The journal's events; empty if it is missing or damaged before its last line."""
    from runbook.files import read_bytes

    try:
        lines = read_bytes(path).splitlines(keepends=True)
        events = [json.loads(line) for line in lines if line.endswith(b"\n")]
    except (OSError, ValueError, RecursionError):
        return []
    whole = all(isinstance(event, dict) for event in events)
    return cast("list[Event]", events) if whole else []


def phases_done(events: Sequence[Event]) -> str:
    """`2 of 5 phases`."""
    planned = [event["phases"] for event in events if isinstance(event.get("phases"), list)]
    names = [one.get("event") for one in events if not one.get("interrupted")]
    done = names.count("phase_finished") - names.count("phase_repeated")
    count = len(planned[-1]) if planned else 0
    return f"{done} of {count} phase{'' if count == 1 else 's'}"


def running_text(folder: Path) -> str:
    """`RUNNING, 2 of 5 phases, now smoke/run` of a run that goes on; empty for any other."""
    try:
        if not is_going_on(folder):
            return ""
    except PermissionError:
        return ""  # the run of somebody else, of which only what it wrote can be read
    events = events_so_far(folder / EVENTS_FILE)
    last = next((one for one in reversed(events) if "phase" in one), {})
    words = [str(last[name]) for name in ("phase", "launch") if name in last]
    now = f", now {'/'.join(words)}" if words else ""
    return f"{RUNNING}, {phases_done(events)}{now}"


def watch_line(folder: Path) -> str:
    """The command that looks on: by the link `latest` where it leads into this run."""
    import shlex

    from nsa.contract import LATEST_LINK

    link = folder.parent / LATEST_LINK
    here = folder.resolve()
    place = link if link.is_symlink() and here in link.resolve().parents else folder
    return f"runbook watch {shlex.quote(str(place))}"
