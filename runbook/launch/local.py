"""The launcher of this machine: the command is a child, and ends with the harness."""

from __future__ import annotations

import time
from pathlib import Path

from runbook.folder.names import CONSOLE_LOG
from runbook.launch.classify import End
from runbook.launch.host import Host
from runbook.launch.incident import read_outside
from runbook.launch.place import Aftermath, Running, Start
from runbook.launch.ranks import RankState
from runbook.launch.reaper import signal_owned


class LocalRun:
    """A command on this machine."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self.began = time.monotonic()
        self.watch = start.watch
        self._host = Host(start.run_dir, start.environment, token=start.token)
        self._host.start(start.command.argv, cwd=start.command.folder)

    def wait(self, within_s: float) -> None:
        """As in `Running`."""
        child = self._host.child
        self.watch.wait(within_s, child=child.pid if child.returncode is None else None)

    def poll(self) -> int | None:
        """As in `Running`."""
        return self._host.child.poll()

    def trouble(self, *, suspected: bool = False) -> End | None:  # noqa: ARG002 - see below
        """None: what happens to this machine happens to the harness too."""
        return None

    def console_bytes(self) -> int:
        """As in `Running`."""
        return (self._start.run_dir / CONSOLE_LOG).stat().st_size

    def send(self, state: RankState, number: int) -> bool:
        """As in `Running`."""
        return state.pid is not None and signal_owned(state.pid, self._start.token, number)

    def read_outside(self, state: RankState) -> Path | None:
        """As in `Running`."""
        return read_outside(self._start.run_dir, state)

    def where(self, rank: int) -> str:  # noqa: ARG002 - there is one machine
        """Nothing: there is one machine."""
        return ""

    def stop(self) -> None:
        """As in `Running`."""
        self._host.stop()
        self.watch.close()
        self.watch.update()

    def aftermath(self, *, hurry: bool) -> Aftermath:
        """As in `Running`."""
        return self._host.aftermath(hurry=hurry)


class LocalLauncher:
    """Starts launches on this machine."""

    name = "local"

    def start(self, start: Start) -> Running:
        """As in `Launcher`."""
        return LocalRun(start)

    def adopt(self, start: Start) -> Running | None:  # noqa: ARG002 - nothing is ever left
        """None: nothing of this machine outlives its harness."""
        return None
