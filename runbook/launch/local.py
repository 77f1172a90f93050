"""What a launcher is, where the launches of a run are started, and the one of this machine.

A `LauncherKind` is what a package installs under a name in the entry points `runbook.launchers`: it
says what does not fit, and makes the `Launcher` of a run. That one starts a command somewhere, or
finds one again that an earlier harness started there. A `Running` is that command: it is waited
for, signaled and ended through it. All else that is watched and judged lies in the run directory.
On this machine the command is a child, and ends with the harness. `Host` does what any machine does
for a launch: it runs the command, samples, counts, and ends all.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from runbook import DEFAULT_LAUNCHER, DEFAULT_QUEUE_S, FILE_AFTER
from runbook.config import Profile
from runbook.config.registry import installed, names
from runbook.config.setup import RunOptions, Setup
from runbook.errors import UsageError, choice_for
from runbook.folder import CONSOLE_LOG
from runbook.folder.launch.documents import Load
from runbook.launch.command import Command, pasteable
from runbook.launch.incident import Reach, read_outside
from runbook.launch.inputs import RefusedError
from runbook.launch.watch import RankWatch
from runbook.launch.watch.rank_state import RankState
from runbook.machine.gpu.cards import AFTER, BEFORE, gpu_samples, write_devices
from runbook.machine.kernel_log import KernelLine, KernelLog
from runbook.machine.surroundings import LoadMeter, nothing_starts
from runbook.process import Reaper, end_kept, oom_kills, spawn_kept
from runbook.process.reaper import TOKEN_VARIABLE, kill_all, signal_owned
from runbook.records import End, Launch

GROUP = "runbook.launchers"
# The folder of what belongs to a node, for a program that a launcher starts there.
NODE_FOLDER_VARIABLE = "RUNBOOK_NODE_FOLDER"


@dataclass(frozen=True, kw_only=True)
class Start:
    """A command that is to run. `environment` is all of it, the token included.

    `watch` follows its ranks where they are processes of this machine.
    """

    launch: Launch
    command: Command
    environment: Mapping[str, str]
    run_dir: Path
    token: str
    watch: RankWatch


@dataclass(frozen=True, kw_only=True)
class Aftermath:
    """What is known once nothing of a launch is alive.

    `oom` is the kernel's count of processes that it killed for memory, before and after. `slots`
    are the PCI places of the GPUs that the launch could use. `node` is where the command ended as
    the exit code says; empty where there is only this machine.
    """

    exit_code: int | None
    oom: tuple[int | None, int | None] = (None, None)
    kernel: Sequence[KernelLine] = ()
    slots: tuple[str, ...] = ()
    load: Load | None = None
    node: str = ""


class Running(Reach, Protocol):
    """A command that was started, and how its ranks are reached."""

    @property
    def watch(self) -> RankWatch:
        """The view of its ranks."""

    @property
    def began(self) -> float | None:
        """When it began to run, on this process's monotonic clock; None while it waits to."""

    def wait(self, within_s: float) -> None:
        """Sleep until something of it ends, at most this long; then read what it has written."""

    def poll(self) -> int | None:
        """The exit code of the command; None while it has not ended by itself."""

    def trouble(self, *, suspected: bool = False) -> End | None:
        """What went wrong with the place itself, if anything. `suspected`: a rank is silent."""

    def console_bytes(self) -> int:
        """How much it has printed so far."""

    def where(self, rank: int) -> str:
        """The node that a rank runs on; empty where there is only this machine."""

    def stop(self) -> None:
        """End all of it."""

    def aftermath(self, *, hurry: bool) -> Aftermath:
        """What was counted, once it is stopped. `hurry`: somebody waits for it. Raises OSError."""


class Launcher(Protocol):
    """Starts the commands of one run, and finds those that a killed harness left running."""

    here: bool = False
    """Does everything run on this machine?"""

    def start(self, start: Start) -> Running:
        """Start the command. Raises OSError, or RefusedError."""

    def adopt(self, start: Start) -> Running | None:  # noqa: ARG002
        """The command that was started in this run directory, if it outlived its harness."""
        return None

    def nodes(self, run_dir: Path) -> list[Path]:  # noqa: ARG002
        """The folders of the nodes of a launch, the run's first node first.

        Empty where there is only this machine. Raises RunbookError if one of them is damaged.
        """
        return []

    def is_own_file(self, name: str) -> bool:  # noqa: ARG002
        """Is this file in the folder of a node the launcher's own?"""
        return False


class LauncherKind(Protocol):
    """A way to run launches, as the command line names it.

    Where `NAME:FILE` is read, it is made with the file's path, and without one for `NAME` alone.
    """

    here: bool = False
    """Does everything run on this machine?"""
    reads: Sequence[str] = ()
    """The options of the command line that it obeys; `FILE_AFTER` where it reads a file."""

    def lacks(self) -> list[str]:
        """What a run with it lacks here, in words."""
        return []

    def problems(self, options: RunOptions, profile: Profile) -> list[str]:
        """What is wrong with its options, or with running this profile by it, in words."""

    def launcher(self, setup: Setup, run_root: Path, note: Callable[[str], None]) -> Launcher:
        """The launcher of a run. `note` is told what a person should read."""

    def printed(self, launch: Launch, setup: Setup) -> str:
        """What a person types to start the launch so, in lines."""

    def takes_out(self) -> str:
        """What a person types so that `{node}` gets no more work because of `{reason}`.

        Empty where there is only this machine.
        """
        return ""


@lru_cache(maxsize=8)
def launcher(name: str) -> LauncherKind:
    """The launcher of `NAME` or `NAME:FILE`. Raises UsageError that lists those that there are."""
    name, _, path = name.partition(FILE_AFTER)
    found = {entry.name: entry for entry in installed(GROUP)}
    if name not in found:
        raise UsageError([f"--launcher {name!r}: no such launcher{choice_for(name, found)}"])
    made = found[name].load()
    if path and FILE_AFTER not in made.reads:
        raise UsageError([f"--launcher {name}{FILE_AFTER}{path}: {name} takes no file"])
    kind: LauncherKind = made(path) if path else made()
    return kind


def unread(options: RunOptions, reads: Sequence[str]) -> list[str]:
    """What was typed for another launcher than one that reads these options, in words."""
    typed = {
        "--nodes": options.nodes != 1,
        "--partition": bool(options.partition),
        "--account": bool(options.account),
        "--queue-s": options.queue_s != DEFAULT_QUEUE_S,
    }
    return [
        f"{flag} is for --launcher "
        + "|".join(one for one in names(GROUP) if flag in launcher(one).reads)
        for flag, given in typed.items()
        if given and flag not in reads
    ]


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
        variable: str = TOKEN_VARIABLE,
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
            opened.enter_context(Reaper(self._token, self._variable))
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

    def console_bytes(self) -> int:
        """As in `Running`."""
        return (self.folder / CONSOLE_LOG).stat().st_size

    def send(self, state: RankState, number: int) -> bool:
        """As in `Running`."""
        return state.pid is not None and signal_owned(state.pid, self._token, number)

    def read_outside(self, state: RankState) -> Path | None:
        """As in `Running`."""
        return read_outside(self.folder, state)

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

    def problems(self, options: RunOptions, profile: Profile) -> list[str]:
        """As in `LauncherKind`."""
        return unread(options, self.reads) + nodes_problems(options, profile)

    def launcher(
        self,
        setup: Setup,  # noqa: ARG002 - a launch says all
        run_root: Path,  # noqa: ARG002
        note: Callable[[str], None],  # noqa: ARG002
    ) -> Launcher:
        """As in `LauncherKind`."""
        return self

    def printed(self, launch: Launch, setup: Setup) -> str:  # noqa: ARG002 - a launch says all
        """As in `LauncherKind`."""
        return pasteable(launch).lines


def other_launchers() -> list[str]:
    """The names of the launchers that do not run everything on this machine."""
    return [name for name in names(GROUP) if name != DEFAULT_LAUNCHER]


def nodes_problems(options: RunOptions, profile: Profile) -> list[str]:
    """A machine with GPUs has the nodes of its profile; CPUs are spread as asked for."""
    needed = profile.hardware.nodes or (1 if profile.has_gpu else options.nodes)
    if options.nodes != needed:
        way = f"--nodes {needed}"
        way = f"--launcher {'|'.join(other_launchers())} {way}" if needed > 1 else way
        return [f"--nodes {options.nodes}: profile {profile.name} is for {needed} node(s): {way}"]
    if profile.ranks % options.nodes:
        divisors = [n for n in range(1, profile.ranks + 1) if profile.ranks % n == 0]
        return [
            f"--nodes {options.nodes}: the {profile.ranks} ranks of profile {profile.name} cannot "
            f"be spread evenly; possible are: {', '.join(map(str, divisors))}"
        ]
    return []
