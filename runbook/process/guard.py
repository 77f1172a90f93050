"""What keeps a launch from outliving the harness: above it a subreaper, beside it a reaper."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from runbook.process.reaper import GOOD_BYE, TOKEN_VARIABLE, kill_all
from runbook.process.start import bare_python, start
from runbook.process.subreaper import packed

# Longer than `kill_all` tries; it takes milliseconds unless something hangs in the kernel.
_KEPT_WITHIN_S = 10.0


def spawn_kept(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    output: IO[bytes],
    cwd: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start `command` below a subreaper, from whose tree nothing that it starts can leave.

    What is returned is the subreaper, which ends when all of it has ended, and as the command did.
    It carries no token. Raises `OSError` if nothing can be started.
    """
    subreaper = start(
        bare_python("subreaper.py"),
        _for_python(environment),
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=cwd,
    )
    if subreaper.stdin is not None:
        subreaper.stdin.write(packed(command, environment))
        subreaper.stdin.flush()
    return subreaper


def end_kept(subreaper: subprocess.Popen[bytes]) -> None:
    """Have a subreaper end all that is below it, and itself."""
    if subreaper.stdin is not None:
        subreaper.stdin.close()
    try:
        subreaper.wait(_KEPT_WITHIN_S)
    except subprocess.TimeoutExpired:
        # Something hangs in the kernel. It was killed, and is gone as soon as that ends.
        subreaper.kill()
        subreaper.wait()


def _for_python(environment: Mapping[str, str]) -> dict[str, str]:
    """What a bare Python needs to start, where its library lies in no usual folder."""
    name = "LD_LIBRARY_PATH"
    return {name: environment[name]} if name in environment else {}


class Reaper:
    """A process that kills everything with the token as soon as this one is gone."""

    def __init__(self, token: str, variable: str = TOKEN_VARIABLE) -> None:
        self._token, self._variable = token, variable
        self._process = start(
            bare_python("reaper.py", token, variable),
            _for_python(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def __enter__(self) -> Reaper:
        return self

    def __exit__(self, *_: object) -> None:
        left = kill_all(self._token, self._variable)
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
