"""How a launch ends. torchrun reports 1 for every failure: read the heartbeat's `exit`."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the trainer."""

    SUCCESS = 0
    CRASH = 1
    CONFIG = 2
    HALTED = 10
    NONFINITE = 11
    OUT_OF_MEMORY = 12
    PREEMPTED = 13
