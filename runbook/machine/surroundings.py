"""What processes may have on this machine: limits, room on disks, the loopback network, a clock.

Where one of these is too small or odd, launches end badly and no trainer is to blame. Most is
asked before anything starts; `limit_met` says whether an end had such a reason.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from runbook.config.settings import is_passed_on
from runbook.files import write_document
from runbook.folder import LOAD_JSON
from runbook.folder.launch.documents import Load, load_of
from runbook.machine.host import count_cpus
from runbook.process import group_tasks, run_tool

_GIB, _MIB = 1024**3, 1024**2
_KERNEL = Path("/proc/stat")
_SHM = Path("/dev/shm")  # noqa: S108 - its room is looked at, nothing is written


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """A limit of a process (`getrlimit`), which everything that it starts inherits."""

    number: int
    flag: str
    words: str
    size: int
    unit: str
    lifted: str = "unlimited"

    @property
    def limit(self) -> int | None:
        """In bytes, seconds or a count; None where there is no limit."""
        soft, _ = resource.getrlimit(self.number)
        return None if soft == resource.RLIM_INFINITY else soft

    def __str__(self) -> str:
        limit = (self.limit or 0) / self.size
        return f"{self.words} {limit:.4g} {self.unit} (`ulimit {self.flag}`)"

    @property
    def remedy(self) -> str:
        """What to type; a hard limit is its owner's to raise."""
        way = f"`ulimit {self.flag} {self.lifted}`"
        return f"{way} in this shell, or in the file that sets the limit"


_MEMORY_WORDS = "no process may map more than"
MEMORY = tuple(
    Allowance(number=number, flag=flag, words=_MEMORY_WORDS, size=_GIB, unit="GiB of memory")
    for number, flag in ((resource.RLIMIT_AS, "-v"), (resource.RLIMIT_DATA, "-d"))
)
CPU = Allowance(
    number=resource.RLIMIT_CPU, flag="-t", words="no process may compute for more than",
    size=1, unit="s",
)  # fmt: skip
FILE = Allowance(
    number=resource.RLIMIT_FSIZE, flag="-f", words="no file may be larger than",
    size=_MIB, unit="MiB",
)  # fmt: skip
FILES = Allowance(
    number=resource.RLIMIT_NOFILE, flag="-n", words="no process may open more than",
    size=1, unit="files", lifted="1024",
)  # fmt: skip
TASKS = Allowance(
    number=resource.RLIMIT_NPROC, flag="-u", words="this user may have no more than",
    size=1, unit="processes and threads", lifted="4096",
)  # fmt: skip

# Python with torch and pandas maps 1.6 GiB on a machine of two cores, and more on one of more.
_LEAST_MEMORY = 2 * _GIB
# Preflight writes a file of this size to see how fast the disk is.
_LEAST_FILE = 64 * _MIB
# The shipped tests of preflight, which are one process, open 224 on a machine without GPUs.
_LEAST_FILES = 512
# So many files or threads every machine grants; a trainer that uses them up has a leak.
_GRANTED = 1024
_WITHIN_S = 10.0
# Two clocks of one machine are no further apart, beyond the time that reading them takes.
_APART_S = 1.0
_STANDS_S = 0.001

_NO_MEMORY = re.compile(
    r"[Cc](?:annot|an't|ould not) allocate memory|MemoryError|std::bad_alloc|failed to map segment"
)
_TOO_LARGE = re.compile(r"File too large")
_NO_TASK = re.compile(
    r"Resource temporarily unavailable|can't start new thread|[Cc]annot fork|pthread_create failed"
)
_GROUP_REMEDY = "raise the limit of the container (--pids-limit) or of the job (TasksMax)"
_TOO_MANY_FILES = re.compile(r"Too many open files")
DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded")
# So little room, seen ten times a second, is what a write that just failed leaves.
_NEARLY_FULL = _GIB
# And with so little no file can say why anything ended.
_FULL = 64 * 1024
# Where nobody looked while the launch ran.
_OTHER_FULL = 16 * _MIB
DISK_REMEDY = "free space there (`df -h` shows it), or write elsewhere with --out"


def surroundings_problems(longest_s: float = 0.0) -> list[str]:
    """What keeps launches from running on this machine, each with what to do about it.

    `longest_s`: so long may one launch of the plan take.
    """
    # Where a limit is too small, nothing else can be asked.
    too_small = [
        *memory_problems(),
        *_too_small(FILE, _LEAST_FILE, f"a run needs {_LEAST_FILE // _MIB} MiB"),
        *_too_small(CPU, longest_s, f"a run may take {longest_s:g} s in one launch"),
        *_too_small(FILES, _LEAST_FILES, f"a run needs {_LEAST_FILES}"),
    ]
    if too_small:
        return too_small
    problems = [*_loopback_problems(), *_clock_problems()]
    # Not where it refuses to be written to: then what starts here takes another folder.
    if (free := free_bytes(place := Path(tempfile.gettempdir()))) < _OTHER_FULL:
        problems.append(
            f"the folder for temporary files, {place}, has {free / _MIB:.2g} MiB of room, and a "
            f"run needs {_OTHER_FULL // _MIB}: free space there, or set TMPDIR to another folder"
        )
    if not _KERNEL.exists():
        problems.append(
            "nothing is mounted at /proc, where the kernel tells what is alive: "
            "`mount -t proc proc /proc`"
        )
    return problems


def memory_problems(who: str = "a run") -> list[str]:
    """Limits under which NumPy cannot be loaded: OpenBLAS asks for its memory without end."""
    needs = f"{who} needs {_LEAST_MEMORY // _GIB} GiB"
    return [text for one in MEMORY for text in _too_small(one, _LEAST_MEMORY, needs)]


def _too_small(one: Allowance, least: float, needs: str) -> list[str]:
    small = one.limit is not None and one.limit < least
    return [f"{one}, and {needs}: {one.remedy}"] if small else []


def _loopback_problems() -> list[str]:
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=_WITHIN_S),
        ):
            return []
    except OSError as error:
        # The kernel gives an interface its address when it comes up, and never again.
        lost = error.errno == errno.EADDRNOTAVAIL
        way = "ip addr add 127.0.0.1/8 dev lo" if lost else "ip link set lo up"
        return [
            "no loopback network: 127.0.0.1, where the ranks of a launch meet, cannot be reached "
            f"({os.strerror(error.errno) if error.errno else error}): `{way}` in this network "
            "namespace"
        ]


def _clock_problems() -> list[str]:
    """Whether this process and one without its variables are told the same time by the system.

    Launches get few of its variables, so a library that is preloaded to tell it another time does
    not reach them, and their times would look forged.
    """
    began, clock = time.time(), time.monotonic()
    words = [sys.executable, "-I", "-S", "-c", "import time; print(time.time())"]
    variables = {name: text for name, text in os.environ.items() if is_passed_on(name)}
    answer = run_tool(words, timeout_s=_WITHIN_S, variables=variables, only=True)
    ended, took = time.time(), time.monotonic() - clock
    preloaded = os.environ.get("LD_PRELOAD")
    way = f"`unset LD_PRELOAD` ({preloaded})" if preloaded else "set it right, or wait until it is"
    if ended - began < _STANDS_S < took:
        return [f"the wall clock stands still at {began:.0f} s since 1970: {way}"]
    if not answer.ok:
        return [
            "no process of this program's own Python can be started with the few variables that "
            f"launches get: {answer.problem}; `env -i {sys.executable} -c pass` has to work for "
            "this user"
        ]
    told = float(answer.stdout)
    ahead = began - told if told < began else min(0.0, ended - told)
    if abs(ahead) <= _APART_S:
        return []
    side = "ahead of" if ahead > 0 else "behind"
    return [
        f"the clock of this process is {abs(ahead):.0f} s {side} the one of the processes that it "
        f"starts, on the same machine: {way}"
    ]


def free_bytes(folder: Path) -> int:
    """Room on the disk of a folder; none where no further file can be made, or nobody says."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return 0
    return disk.f_bavail * disk.f_frsize if disk.f_favail or not disk.f_files else 0


def limit_met(
    cause: str,
    *,
    signals: Container[str | None] = (),
    console: Sequence[str] = (),
    duration_s: float,
    folder: Path,
    least_free: int,
) -> str:
    """Which limit of the machine made a launch end so, and what to do; empty if none did.

    What the launch said (`cause`, `signals`) counts only where this process, which is no trainer's,
    sees the limit too. `console`: its last lines; who may start no thread has no other word.
    `least_free`: the least room seen on the disk of its folder, bytes.
    """
    for one in MEMORY:
        if one.limit is not None and _NO_MEMORY.search(cause):
            return f"{one}: {one.remedy}"
    if FILE.limit is not None and ("SIGXFSZ" in signals or _TOO_LARGE.search(cause)):
        return f"{FILE}: {FILE.remedy}"
    refused = any(_NO_TASK.search(line) for line in (cause, *console))
    for one, said in ((TASKS, refused), (FILES, _TOO_MANY_FILES.search(cause))):
        if one.limit is not None and one.limit < _GRANTED and said:
            return f"{one}: {one.remedy}"
    limit = group_tasks() if refused else None
    if limit is not None and limit < _GRANTED:
        return (
            f"this container or control group may have no more than {limit} processes and threads "
            f"(pids.max): {_GROUP_REMEDY}"
        )
    # No process can compute for longer than all processors together.
    spent = CPU.limit is not None and duration_s * count_cpus() >= CPU.limit
    if spent and ("SIGKILL" in signals or "SIGXCPU" in signals):
        return f"{CPU}: {CPU.remedy}"
    said_full = DISK_FULL.search(cause) is not None
    least = min(least_free, free_bytes(folder))
    if least < (_NEARLY_FULL if said_full else _FULL):
        return _full_disk(folder, least)
    for place in (Path(tempfile.gettempdir()), _SHM) if said_full else ():
        if (free := free_bytes(place)) < _OTHER_FULL:
            return _full_disk(place, free)
    return ""


def nothing_starts(error: OSError | RuntimeError) -> str:
    """The limit that let no process or thread start here; empty if the error is another one."""
    if not _NO_TASK.search(str(error)):
        return ""
    return f"nothing more can be started ({error}): {TASKS.remedy}; or {_GROUP_REMEDY}"


def _full_disk(place: Path, free: int) -> str:
    total = shutil.disk_usage(place).total / _MIB
    return (
        f"the disk of {place} is full (as little as {free / _MIB:.1f} of {total:.0f} MiB were "
        f"free): {DISK_REMEDY}"
    )


def read_times() -> dict[str, float]:
    """Seconds since boot of all CPUs, of this program, and of the wall clock, by name.

    Of children only those that have ended and were waited for are ours.
    """
    machine, own = psutil.cpu_times()._asdict(), os.times()
    kinds = {
        "busy_s": ("user", "nice", "system", "irq", "softirq"),
        "steal_s": ("steal",),
        "idle_s": ("idle", "iowait"),
    }
    found = {name: sum(machine.get(one, 0.0) for one in kind) for name, kind in kinds.items()}
    found["own_s"] = own.user + own.system + own.children_user + own.children_system
    return {**found, "wall_s": time.monotonic()}


class LoadMeter:
    """Reads the counters when it is made, and again when it writes: it costs two looks a launch."""

    def __init__(self) -> None:
        self._before = read_times()
        self._load_before = os.getloadavg()

    def write(self, run_dir: Path) -> Load | None:
        """Write `load.json` and return it; call it when nothing of the launch is alive.

        None where the kernel tells no times. Raises OSError.
        """
        now = read_times()
        took = {name: now[name] - then for name, then in self._before.items()}
        took["total_s"] = took["busy_s"] + took["steal_s"] + took.pop("idle_s")
        # Two clocks of the kernel that count differently: less than nothing is nothing.
        took["others_s"] = max(0.0, took["busy_s"] - took["own_s"])
        document = {
            "problem": "" if took["total_s"] > 0 else "the kernel tells no times of the CPUs here",
            "cpus": psutil.cpu_count() or 1,
            **{name: round(seconds, 3) for name, seconds in took.items()},
            "load_before": list(self._load_before),
            "load_after": list(os.getloadavg()),
        }
        write_document(run_dir / LOAD_JSON, document)
        return load_of([document])
