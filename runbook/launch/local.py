"""This machine as a launcher: the command is a child, and ends with the harness.

`Host` does what any machine does for a launch: it runs the command, samples, counts, and ends all.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from nsa.contract import RUN_TOKEN_VARIABLE
from runbook.config.setup import Setup
from runbook.folder import CONSOLE_LOG
from runbook.launch.command import RefusedError, pasteable
from runbook.launch.end import Aftermath
from runbook.launch.launcher_api import Launcher, LauncherKind, Running, Start
from runbook.launch.watch.rank_state import RankState
from runbook.machine.gpu.cards import AFTER, BEFORE, gpu_samples, write_devices
from runbook.machine.kernel_log import KernelLog
from runbook.machine.surroundings import LoadMeter, nothing_starts
from runbook.process import end_kept, kill_all, oom_kills, signal_owned, spawn_kept
from runbook.records import End, Launch

# In the temporary directory, where TORCHINDUCTOR_CACHE_DIR names no other place.
_COMPILED = "torchinductor_*"


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
        variable: str = RUN_TOKEN_VARIABLE,
    ) -> None:
        self.folder, self.environment = folder, environment
        self._token, self._variable = token, variable
        self._open = ExitStack()

    def start(self, argv: Sequence[str], *, cwd: Path | None = None) -> None:
        """Count, begin to sample, and start the command. Raises OSError."""
        self._oom = oom_kills()
        self._kernel = KernelLog()
        self._slots = write_devices(self.folder, BEFORE, self.environment)
        self._load = LoadMeter()
        with self._open as opened:
            opened.enter_context(_no_empty_cache(self.environment))
            console = opened.enter_context((self.folder / CONSOLE_LOG).open("ab"))
            if self._slots:
                opened.enter_context(gpu_samples(self.folder, self.environment))
            self.child = spawn_kept(argv, self.environment, output=console, cwd=cwd)
            opened.callback(kill_all, self._token, self._variable)
            opened.callback(end_kept, self.child)  # the last one comes first
            self._open = opened.pop_all()

    def stop(self) -> None:
        """End the command and everything else of it."""
        self._open.close()

    def aftermath(self, *, hurry: bool) -> Aftermath:
        """What was counted while it ran; call it once it is stopped. Raises OSError."""
        load = self._load.write(self.folder)
        window = self._kernel.close(self.folder)
        write_devices(self.folder, AFTER, self.environment, hurry=hurry)
        return Aftermath(
            exit_code=self.child.returncode,
            oom=(self._oom, oom_kills()),
            kernel=window.lines,
            slots=self._slots,
            load=load,
        )


@contextmanager
def _no_empty_cache(environment: Mapping[str, str]) -> Iterator[None]:
    """Take away torch's folder for compiled code if it is new and empty at the end.

    Whoever imports torch makes it in the temporary directory, whatever is compiled. One that holds
    something stays: the next launch need not compile that again.
    """
    place = Path(environment.get("TMPDIR") or tempfile.gettempdir())
    before = set(place.glob(_COMPILED))
    yield
    for folder in set(place.glob(_COMPILED)) - before:
        with suppress(OSError):  # not empty, or somebody else's
            folder.rmdir()


class LocalRun(Host):
    """A command on this machine."""

    def __init__(self, start: Start) -> None:
        super().__init__(start.run_dir, start.environment, token=start.token)
        self.began, self.watch = time.monotonic(), start.watch
        self.start(start.command.argv, cwd=start.command.folder)

    def wait(self, within_s: float) -> None:
        """As in `Running`."""
        child = self.child
        self.watch.wait(within_s, child=child.pid if child.returncode is None else None)

    def poll(self) -> int | None:
        """As in `Running`."""
        return self.child.poll()

    def trouble(self, *, suspected: bool = False) -> End | None:  # noqa: ARG002 - see below
        """None: what happens to this machine happens to the harness too."""
        return None

    def send(self, state: RankState, number: int) -> bool:
        """As in `Running`."""
        return state.pid is not None and signal_owned(state.pid, self._token, number)

    def where(self, rank: int) -> str:  # noqa: ARG002 - there is one machine
        """Nothing: there is one machine."""
        return ""

    def stop(self) -> None:
        """As in `Running`."""
        super().stop()
        self.watch.close()
        self.watch.update()


class Local(LauncherKind, Launcher):
    """This machine, as `--launcher` names it, and as a run's launcher."""

    here = True

    def start(self, start: Start) -> Running:
        """As in `Launcher`. Raises RefusedError where no process or thread may be started."""
        try:
            return LocalRun(start)
        except (BlockingIOError, RuntimeError) as error:
            if why := nothing_starts(error):
                raise RefusedError(why) from error
            raise

    def launcher(self, setup: Setup, run_root: Path, note: Callable[[str], None]) -> Launcher:
        """As in `LauncherKind`."""
        del setup, run_root, note  # a launch says all
        return self

    def printed(self, launch: Launch, setup: Setup) -> str:  # noqa: ARG002 - a launch says all
        """As in `LauncherKind`."""
        return pasteable(launch).lines
