"""What many tests only read, made once in a test run; how long a busy machine may take."""

from __future__ import annotations

import fcntl
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from runbook.process import process_state
from tests import executed

T = TypeVar("T")


def crowded(seconds: float) -> float:
    """As many seconds as these are on an idle machine, by what now waits for its processors.

    For how long something may take: what stands still is beyond any share of a processor.
    """
    return seconds * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def gone(*pids: int, within_s: float) -> bool:
    """Do none of these processes run any more, or soon? One that waits to be collected does not."""
    until = time.monotonic() + within_s
    while (left := any(map(alive, pids))) and time.monotonic() < until:
        time.sleep(0.01)
    return not left


def alive(pid: int) -> bool:
    """Does the process run?"""
    return process_state(pid) not in ("", "Z", "X")


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], T]) -> T:
    """What `make` returns for an empty folder of its own, which it may fill.

    Workers that ask meanwhile wait, and get a copy of what it returned. Nobody may change the
    folder afterwards. If `make` raises, the next one that asks tries again.
    """
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # the workers' own folders lie side by side in it
    result = root / f"{name}.pickle"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            with executed.apart() as kinds:
                made = make(factory.mktemp(name))
            result.write_bytes(pickle.dumps((made, frozenset(kinds))))
        found: tuple[T, frozenset[str]] = pickle.loads(result.read_bytes())
        executed.share(found[1])
        return found[0]
