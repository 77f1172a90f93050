"""Run the installed program as a person would: a process of its own, a pipe for each stream."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ESCAPE = "\x1b"
_SETTINGS = ("NSA_", "NCCL_", "TORCH_", "PYTORCH_", "CONFIG")


@dataclass(frozen=True, kw_only=True)
class Ended:
    code: int
    out: str
    err: str


def runbook(*words: str, cwd: Path, timeout_s: float = 120, **variables: str) -> Ended:
    """`runbook WORDS` in `cwd`, without the variables of this test run's own environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS)}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "runbook", *words],
        cwd=cwd,
        env={**kept, **variables},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Ended(code=done.returncode, out=done.stdout, err=done.stderr)
