"""Processes: how they are started, found and ended, and what the kernel tells of them and groups.

None outlives the harness. Names are never matched: whoever carries a run token in its environment
was started by a launch.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from nsa.contract import RUN_TOKEN_VARIABLE, is_secret_name
from runbook.files import text_there
from runbook.process.subreaper import packed

# The default of who sets no variables besides those that are there.
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
_KILLED_WITHIN_S = 2.0


def start(
    command: Sequence[str], environment: Mapping[str, str], **options: Any
) -> subprocess.Popen[Any]:
    """Start `command` in a session of its own. Raises `OSError` if nothing can be started.

    `options` are those of `Popen`; it reads nothing unless they say so.
    """
    own = {"stdin": subprocess.DEVNULL, "start_new_session": True}
    return subprocess.Popen(list(command), env=dict(environment), **{**own, **options})


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """What a tool printed; `problem` is empty if it ran and exited with 0."""

    stdout: str
    stderr: str
    problem: str

    @property
    def ok(self) -> bool:
        """True if the tool finished without an error."""
        return not self.problem


def run_tool(
    argv: Sequence[str],
    *,
    timeout_s: float,
    cwd: Path | None = None,
    errors: str = "replace",
    variables: Mapping[str, str] = NO_VARIABLES,
    without: Container[str] = (),
    only: bool = False,
    given: str = "",
) -> ToolResult:
    """Run `argv` in a session of its own; on a timeout the whole session is killed.

    `variables` are set besides those of this process; those named in `without` are not passed on.
    `only`: `variables` are all that is set. `given` is what it reads on its stdin.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not only and not is_secret_name(name) and name not in without
    }
    environment |= variables
    try:
        process = start(
            argv,
            environment,
            cwd=cwd,
            stdin=subprocess.PIPE if given else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors=errors,
        )
    except OSError as error:
        return ToolResult(stdout="", stderr="", problem=f"{argv[0]}: {error.strerror or error}")
    try:
        stdout, stderr = process.communicate(given or None, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        left = _gave_up(process)
        problem = f"{argv[0]}: no answer within {timeout_s:g} s"
        problem += "" if left else ", and it does not end"
        stdout, stderr = left or ("", "")
        return ToolResult(stdout=stdout, stderr=stderr, problem=problem)
    except BaseException:
        _gave_up(process)
        raise
    problem, code = "", process.returncode
    if code:
        lines = [line.strip() for line in stderr.splitlines() if line.strip()]
        problem = f"{argv[0]}: exit code {code}{': ' + lines[-1] if lines else ''}"
    return ToolResult(stdout=stdout, stderr=stderr, problem=problem)


def _gave_up(process: subprocess.Popen[str]) -> tuple[str, str] | None:
    """Kill the tool's session and return what it said; None for one that hangs in a driver.

    Such a one cannot be killed, and is not waited for.
    """
    with suppress(ProcessLookupError):  # it ended by itself while an interrupt was on its way
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=_KILLED_WITHIN_S)
    except subprocess.TimeoutExpired:
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        process.poll()
        return None


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

    Its output goes straight into the file, so that nothing is lost if the harness dies. What is
    returned is the subreaper, which ends when all of it has ended, and as the command did.
    It carries no token. Raises `OSError` if nothing can be started.
    """
    library = "LD_LIBRARY_PATH"  # a bare Python's own may lie in no usual folder
    subreaper = start(
        [sys.executable, "-I", "-S", str(Path(__file__).with_name("subreaper.py"))],
        {library: environment[library]} if library in environment else {},
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


# Scans in a row that find nothing, until nothing is left.
_EMPTY_SCANS = 2
_PAUSE_S = 0.02


def variables_of(pid: int) -> list[bytes]:
    """`NAME=value` of its environment; none if it is gone, a zombie, or not ours to read."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def environment_holds(pid: int, token: str, variable: str = RUN_TOKEN_VARIABLE) -> bool:
    """Does the process carry this token? False where `variables_of` has none of it."""
    return f"{variable}={token}".encode() in variables_of(pid)


def holds_file(pid: int, path: str) -> bool:
    """Has the process this file open? Tells a rank that was started by hand, without a token."""
    try:
        wanted = Path(path).stat()
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if os.path.samestat(link.stat(), wanted):
                    return True
    except OSError:
        pass
    return False


def carriers(token: str, variable: str = RUN_TOKEN_VARIABLE) -> list[int]:
    """Pids of all live processes with the token, without this one."""
    me = os.getpid()
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    return [pid for pid in pids if pid != me and environment_holds(pid, token, variable)]


def signal_owned(
    pid: int, token: str, number: int, variable: str = RUN_TOKEN_VARIABLE, *, path: str = ""
) -> bool:
    """Send a signal to a process if it carries the token, or has the file at `path` open.

    That is checked after its pidfd is open: from then on the number cannot be reused by another
    process, so a signal can only reach the one that was checked. False if it reached none.
    """
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        ours = environment_holds(pid, token, variable) or (path != "" and holds_file(pid, path))
        if ours:
            signal.pidfd_send_signal(handle, number)
        return ours
    except OSError:
        return False
    finally:
        os.close(handle)


def kill_all(token: str, variable: str = RUN_TOKEN_VARIABLE, *, within_s: float = 5.0) -> list[int]:
    """Kill everything with the token until two scans in a row find nothing.

    Returns the pids that are still there after `within_s` (empty in all but strange cases: a
    process in an uninterruptible wait dies only when that ends).
    """
    deadline = time.monotonic() + within_s
    empty = 0
    left: list[int] = []
    while empty < _EMPTY_SCANS and time.monotonic() < deadline:
        left = carriers(token, variable)
        for pid in left:
            signal_owned(pid, token, signal.SIGKILL, variable)
        empty = 0 if left else empty + 1
        if left:
            time.sleep(_PAUSE_S)
    return left


# Fields of /proc/PID/stat, counted from 1 as in proc_pid_stat(5).
_PARENT_FIELD, _MEMORY_FIELD, _EXIT_FIELD = 4, 23, 52
_ASK_FOR_S = 0.2
_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third, `state`, on; none if the process is gone."""
    # The name in parentheses may hold anything, so fields count from the last one.
    return text_there(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def process_state(pid: int | None) -> str:
    """The kernel's one-letter state of a process, or an empty string if it cannot be read."""
    fields = _stat(pid) if pid is not None else []
    return fields[0] if fields else ""


def processor_s(pid: int) -> float | None:
    """Processor time of all threads of a process so far, s; None if the kernel does not tell.

    The clock that `time.process_time` reads in that process; what runs on another processor counts
    up to its last tick.
    """
    try:
        # MAKE_PROCESS_CPUCLOCK of linux/posix-timers.h, with CPUCLOCK_SCHED.
        return time.clock_gettime(~pid << 3 | 2)
    except (OSError, OverflowError):
        return None


def has_ended_under(pid: int, handle: int, token: str, variable: str = RUN_TOKEN_VARIABLE) -> bool:
    """Has the process ended, and its parent, which carries the token, not waited for it yet?

    A process that ends loses its memory first, and with it what tells that it carried the token
    itself; it is a zombie a moment later. `handle` is its pidfd. True as well if the parent has
    waited for it meanwhile.
    """
    fields = _stat(pid)
    if not fields:
        return True
    if fields[_MEMORY_FIELD - 3] != "0":
        return False
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    if not poller.poll(_ASK_FOR_S * 1000):
        return False
    return environment_holds(int(fields[_PARENT_FIELD - 3]), token, variable)


def exit_code_of(pid: int) -> int | None:
    """The exit code of a process that has ended, negative for a signal.

    None once its parent has waited for it: then that one alone knows.
    """
    deadline = time.monotonic() + _ASK_FOR_S
    # Between "ended" and "a zombie" there is a moment in which nobody knows.
    while (fields := _stat(pid)) and time.monotonic() <= deadline:
        if fields[0] == "Z":
            return os.waitstatus_to_exitcode(int(fields[_EXIT_FIELD - 3]))
        time.sleep(0.002)
    return None


def oom_kills(root: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int | None:
    """The `oom_kill` counter of the group that this process is in; None if it cannot be read."""
    files = _group_files("memory", "memory.events", "memory.oom_control", root, membership)
    return next((n for file in files for n in _numbers(file, r"^oom_kill (\d+)$")), None)


def group_tasks(root: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int | None:
    """How many processes and threads the groups of this process may have; None for any number."""
    files = _group_files("pids", "pids.max", "pids.max", root, membership)
    return min((n for file in files for n in _numbers(file, r"^(\d+)$")), default=None)


def _group_files(
    controller: str, unified: str, own: str, root: Path, membership: Path
) -> Iterator[Path]:
    """A controller's file in the group of this process and in those above it, the nearest first.

    It is called `unified` in version 2 of control groups and `own` in version 1.
    """
    for line in text_there(membership).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        folder = top / group.lstrip("/")
        for place in (folder, *folder.parents):
            if place.is_relative_to(top):
                yield place / (own if controllers else unified)


def _numbers(path: Path, line: str) -> list[int]:
    """The number in each line of a file that is like this; none where it cannot be read."""
    return [int(digits) for digits in re.findall(line, text_there(path), re.MULTILINE)]
