"""This process from its run directory to its end: signals, stacks, death with the parent.

Signals work while a rank is stuck. A run directory is made for one launch, and refused when
anything of an earlier one is in it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from nsa import contract, torch_env
from nsa.contract import RUN_TOKEN_VARIABLE, STACKDUMPS, ExitCode, writing
from nsa.launch.output import Heartbeat, shout
from nsa.launch.plan import Place
from nsa.settings import ConfigError

_PR_SET_PDEATHSIG = 1
# A rank that cannot finish its step after SIGTERM is stuck; torchrun would kill it after 30 s.
GRACE_S = 8.0


def arm_death_signal(environ: Mapping[str, str]) -> None:
    """Die (SIGKILL) when the launcher dies. Only under torchrun or the harness: a trainer that a
    person put into the background must outlive the shell.
    """
    if "TORCHELASTIC_RUN_ID" not in environ and RUN_TOKEN_VARIABLE not in environ:
        return
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have died between its fork and the call above; then no signal will come.
    if os.getppid() != parent:
        os._exit(ExitCode.PREEMPTED)


def dump_stacks_on_usr1(file: int | None = None) -> None:
    """Write the Python stacks of all threads on SIGUSR1, to a file's descriptor or to stderr.

    faulthandler's handler runs in C, so it works while the interpreter waits in a collective.
    """
    where = sys.stderr if file is None else file
    faulthandler.register(signal.SIGUSR1, file=where, all_threads=True, chain=False)


def open_stackdump(run_dir: Path, rank: int) -> None:
    """The file that SIGUSR1 and fatal signals (SIGSEGV, SIGABRT) write to; empty until then.

    It stays open as long as the process lives, so nobody holds it.
    """
    path = run_dir / STACKDUMPS.name(rank, os.getpid())
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    dump_stacks_on_usr1(file)
    faulthandler.enable(file=file, all_threads=True)


class Termination:
    """SIGTERM and SIGINT: the first asks the loop to end after the step, the second ends now.
    SIGUSR2 calls `on_usr2` in the thread that reads the signals, whatever the main thread does.

    The main thread may be stuck in a collective, where no Python handler runs. The wake-up pipe
    is written by the C handler, and the thread that reads it ends the process in any case: at the
    second signal, or when the grace time is over and no checkpoint is being written.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.grace_s = GRACE_S
        self.in_loop = False
        # The last step is over: a checkpoint may take longer than a step.
        self.saving = False
        self.on_forced_exit: Callable[[str], None] | None = None
        self.on_usr2: Callable[[], None] | None = None
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self._read_fd, True)

    def install(self) -> None:
        """Take over SIGTERM and SIGINT; from the main thread."""
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)
        signal.signal(signal.SIGUSR2, _nothing)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def _note(self, number: int, _frame: object) -> None:
        self.reason = self.reason or signal.Signals(number).name

    def _watch(self) -> None:
        first = self._next_signal()
        self.reason = self.reason or first
        if not self.in_loop:
            self._exit_now(f"{first} before the first step")
        timer = threading.Timer(self.grace_s, self._overdue, args=(first,))
        timer.daemon = True
        timer.start()
        second = self._next_signal()
        self._exit_now(f"second signal ({second})")

    def _overdue(self, first: str) -> None:
        if not self.saving:
            self._exit_now(f"{first}: the step did not end in {self.grace_s:g} s")

    def _next_signal(self) -> str:
        while True:
            number = os.read(self._read_fd, 1)[0]
            if number in (signal.SIGTERM, signal.SIGINT):
                return signal.Signals(number).name
            if number == signal.SIGUSR2 and self.on_usr2:
                self.on_usr2()

    def _exit_now(self, reason: str) -> None:
        if self.on_forced_exit:
            self.on_forced_exit(reason)
        sys.stderr.flush()
        os._exit(ExitCode.PREEMPTED)


def _nothing(_number: int, _frame: object) -> None:
    """A handler that Python has, so that the signal is written to the wake-up pipe."""


def take_signals(environ: Mapping[str, str]) -> Termination:
    """What every rank does first: die with its launcher, show stacks, end in an orderly way."""
    arm_death_signal(environ)
    dump_stacks_on_usr1()
    termination = Termination()
    termination.install()
    return termination


def refuse(error: Exception, environ: Mapping[str, str]) -> int:
    """Say why the launch cannot start; returns the exit code.

    Every rank says it: torchrun may end rank 0 before it has come to its own refusal.
    """
    text = environ.get("RANK", "0")
    shout(f"[rank {text}] {error}" if text.isdigit() and int(text) else str(error))
    return int(ExitCode.CONFIG)


def leave(code: int) -> NoReturn:
    """End the process: all is written and on the disk, and tearing torch down only takes time."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


_LEFTOVERS = (
    contract.TRAINING_CSV,
    contract.VAL_CSV,
    contract.GATES_CSV,
    contract.ENV_JSON,
    contract.HALT_FILE,
    contract.ENOUGH_FILE,
    contract.HEARTBEATS.glob(),
    contract.SDPA_AUDIT_JSON,
    contract.CEILINGS_JSON,
    contract.CHECKPOINTS_DIR,
)


def by_hand(out_dir: str) -> Path:
    """`out_dir/<UTC>-<token>` for a launch without a harness, the token drawn."""
    utc = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return Path(out_dir).resolve() / f"{utc}-{secrets.token_hex(8)}"


def leftovers(run_dir: Path, world_size: int) -> list[str]:
    """Names in the directory that belong to an earlier launch.

    Heartbeats of this launch's other ranks may be there already: each rank refuses its own.
    """
    found: list[str] = []
    for pattern in _LEFTOVERS:
        found += sorted(path.name for path in run_dir.glob(pattern))
    ours = {contract.HEARTBEATS.name(rank) for rank in range(1, world_size)}
    return [name for name in found if name not in ours]


def claim(run_dir: Path, world_size: int) -> None:
    """Make the directory, private to its owner. Raises ConfigError for one that was used."""
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run directory {run_dir}: {error.strerror or error}") from error
    found = leftovers(run_dir, world_size)
    if found:
        stale = " (a stale .HALT is refused, not obeyed)" if contract.HALT_FILE in found else ""
        raise _used(run_dir, ", ".join(found) + stale)


def _used(run_dir: Path, what: str) -> ConfigError:
    return ConfigError(
        f"run directory {run_dir} belongs to an earlier launch: it holds {what}; give every launch "
        "a directory of its own"
    )


def open_run_dir(run_dir: Path, place: Place, beat: Heartbeat, *, grouped: bool) -> None:
    """Claim the directory and start this rank's own files in it.

    Raises ConfigError where the directory belongs to an earlier launch.
    """
    if place.rank == 0:
        claim(run_dir, place.world_size)
    else:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        beat.open(run_dir)
    except FileExistsError as error:
        raise _used(run_dir, Path(error.filename).name) from error
    if grouped:
        # torch looks when it makes the process group, or when it dumps.
        prefix = str(run_dir / contract.NCCL_FLIGHTS.stem)
        os.environ.update(torch_env.flight_dumps(prefix))
    open_stackdump(run_dir, place.rank)


def link_latest(run_dir: Path, out_dir: str) -> None:
    """Point `latest` at a directory of `by_hand`, beside it and in the folder of all runs.

    That is what a relative `out_dir` begins with, `artifacts`, whose link the harness moves too.
    """
    writing.link_latest(run_dir.parent, run_dir)
    top = Path(Path(out_dir).parts[0]).resolve()
    if not Path(out_dir).is_absolute() and run_dir.parent.is_relative_to(top):
        with suppress(OSError):  # whatever has that name there is not the trainer's affair
            writing.link_latest(top, run_dir)
