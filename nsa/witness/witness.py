"""What this process runs with, asked of torch and of the process group, not of the settings."""

from __future__ import annotations

import os
from typing import Any

import torch

from nsa.contract import THREAD_VARIABLES
from nsa.launch.ranks import Ranks


def in_force(ranks: Ranks) -> dict[str, Any]:
    """`timeout_s` of the process group, `threads` of torch, and what these may depend on."""
    return {
        "timeout_s": ranks.timeout_s,
        "threads": torch.get_num_threads(),
        "cpus": len(os.sched_getaffinity(0)),
        "variables": {name: os.environ.get(name) for name in THREAD_VARIABLES},
    }
