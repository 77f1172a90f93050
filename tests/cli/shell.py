"""Run the installed program as a person would: a process of its own, a pipe for each stream.

What starts nothing gives the same in this process, without a second of imports each time.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from runbook.cli import main
from tests import executed

ESCAPE = "\x1b"
_SETTINGS = ("NSA_", "NCCL_", "TORCH_", "PYTORCH_", "CONFIG")


@dataclass(frozen=True, kw_only=True)
class Ended:
    code: int
    out: str
    err: str


def runbook(*words: str, cwd: Path, timeout_s: float = 300, **variables: str) -> Ended:
    """`runbook WORDS` in `cwd`, without the variables of this test run's own environment."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "runbook", *words],
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    executed.note(("runbook", *words), done.returncode)
    return Ended(code=done.returncode, out=done.stdout, err=done.stderr)


def inside(*words: str, cwd: Path, **variables: str) -> Ended:
    """The same in this process: for commands that start, install and interrupt nothing."""
    out, err = _Pipe(), _Pipe()
    with (
        patch.dict(os.environ, environment(**variables), clear=True),
        chdir(cwd),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            code: object = main(words)
        except SystemExit as end:
            code = end.code or 0
    assert isinstance(code, int)
    executed.note(("runbook", *words), code)
    return Ended(code=code, out=out.text(), err=err.text())


def environment(**variables: str) -> dict[str, str]:
    """The variables of this process without those that set up a training, and with these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS)}
    return {**kept, **variables}


class _Pipe(io.TextIOWrapper):
    """Takes what a process writes into a pipe; no terminal, and every byte is kept."""

    def __init__(self) -> None:
        self._bytes = io.BytesIO()
        super().__init__(self._bytes, encoding="utf-8", newline="\n", write_through=True)

    def text(self) -> str:
        return self._bytes.getvalue().decode()
