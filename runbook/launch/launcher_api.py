"""What a launcher is: where the launches of a run are started, on this machine or on others.

A `LauncherKind` is what a package installs under a name in the entry points `runbook.launchers`: it
says what does not fit, and makes the `Launcher` of a run. That one starts a command somewhere, or
finds one again that an earlier harness started there. A `Running` is that command: it is waited
for, signaled and ended through it. All else that is watched and judged lies in the run directory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from runbook import DEFAULT_LAUNCHER, DEFAULT_QUEUE_S, FILE_AFTER
from runbook.config import Profile
from runbook.config.registry import installed, loaded, names
from runbook.config.setup import RunOptions, Setup
from runbook.errors import UsageError, choice_for
from runbook.launch.command import Command
from runbook.launch.end import Aftermath
from runbook.launch.watch import RankWatch
from runbook.launch.watch.rank_state import RankState
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


class Running(Protocol):
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

    def send(self, state: RankState, number: int) -> bool:
        """Send a signal to a rank, if it is provably of the launch; False if it got none."""

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
        return _unread(options, self.reads) + _nodes_problems(options, profile)

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
    made = loaded(found[name])
    if path and FILE_AFTER not in made.reads:
        raise UsageError([f"--launcher {name}{FILE_AFTER}{path}: {name} takes no file"])
    kind: LauncherKind = made(path) if path else made()
    return kind


def _unread(options: RunOptions, reads: Sequence[str]) -> list[str]:
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


def other_launchers() -> list[str]:
    """The names of the launchers that do not run everything on this machine."""
    return [name for name in names(GROUP) if name != DEFAULT_LAUNCHER]


def _nodes_problems(options: RunOptions, profile: Profile) -> list[str]:
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
