"""What one machine does for a launch: it runs the command, samples, counts, and ends everything."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from runbook.folder.names import CONSOLE_LOG
from runbook.launch.launcher_api import Aftermath
from runbook.machine.gpu.devices import When, write_devices
from runbook.machine.gpu.sampler import GpuSampler
from runbook.machine.kernel_log import KernelLog
from runbook.machine.load import LoadMeter
from runbook.process.ended import oom_kills
from runbook.process.guard import Reaper, end_kept, spawn_kept
from runbook.process.reaper import TOKEN_VARIABLE, kill_all


class Host:
    """One command on this machine, with the files of the machine beside it in `folder`.

    Whatever descends from it, or carries `token` in `variable`, belongs to it, and ends with it or
    with this process. `child` is its subreaper, which ends as the command does.
    """

    child: subprocess.Popen[bytes]

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        *,
        token: str,
        variable: str = TOKEN_VARIABLE,
    ) -> None:
        self.folder, self.environment = folder, environment
        self._token, self._variable = token, variable
        self._open = ExitStack()

    def start(self, argv: Sequence[str], *, cwd: Path | None = None) -> None:
        """Count, begin to sample, and start the command. Raises OSError."""
        self._oom = oom_kills()
        self._kernel = KernelLog()
        self._devices = write_devices(self.folder, When.BEFORE, self.environment)
        self._load = LoadMeter()
        with self._open as opened:
            opened.enter_context(Reaper(self._token, self._variable))
            console = opened.enter_context((self.folder / CONSOLE_LOG).open("ab"))
            self._sampler = GpuSampler(self.folder, self.environment, self._devices.source)
            opened.callback(self._sampler.stop)
            self._sampler.start()
            self.child = spawn_kept(argv, self.environment, output=console, cwd=cwd)
            opened.callback(self._reap)
            self._open = opened.pop_all()

    def _reap(self) -> None:
        end_kept(self.child)
        kill_all(self._token, self._variable)

    def stop(self) -> None:
        """End the command and everything else of it."""
        self._open.close()

    def aftermath(self, *, hurry: bool) -> Aftermath:
        """What was counted while it ran; call it once it is stopped. Raises OSError."""
        load = self._load.write(self.folder)
        window = self._kernel.close(self.folder)
        write_devices(self.folder, When.AFTER, self.environment, hurry=hurry)
        return Aftermath(
            exit_code=self.child.returncode,
            oom=(self._oom, oom_kills()),
            kernel=window.lines,
            slots=self._devices.slots,
            load=load,
        )
