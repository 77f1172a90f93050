"""Starting processes that cannot outlive the harness, and the reaper that sees to it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from runbook.launch.reaper import GOOD_BYE, kill_all

__all__ = ["Reaper", "spawn"]

_HERE = Path(__file__).parent
_BARE = (sys.executable, "-I", "-S")


def spawn(
    command: Sequence[str], environment: Mapping[str, str], *, output: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start `command` in a session of its own, tied to the life of the calling thread.

    Its output goes straight into the file, so that nothing is lost if the harness dies. Call this
    from a thread that outlives the command: the death signal fires when that thread ends.
    Raises `OSError` if nothing can be started.
    """
    shim = [*_BARE, str(_HERE / "shim.py"), str(os.getpid()), "--", *command]
    return subprocess.Popen(
        shim,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


class Reaper:
    """A process that kills everything with the token as soon as this one is gone."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._process = subprocess.Popen(
            [*_BARE, str(_HERE / "reaper.py"), token],
            env={},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> Reaper:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        left = kill_all(self._token)
        if self._process.stdin is not None:
            # If something survived, the reaper goes on trying after we are gone.
            if not left:
                try:
                    self._process.stdin.write(GOOD_BYE)
                    self._process.stdin.flush()
                except BrokenPipeError:
                    pass
            self._process.stdin.close()
        if not left:
            self._process.wait(timeout=5)
