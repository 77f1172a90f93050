"""Between the harness and what it starts: ties the child's life to its parent's, then becomes it.

Run by path with `python -I -S shim.py PARENT_PID -- COMMAND...`; standard library only. The death
signal survives exec, so the command is killed as soon as the thread that started it is gone,
however it went. Nothing has to run between fork and exec in the harness for that.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_CANNOT_START = 127


def main(argv: list[str]) -> int:
    """Set the death signal and exec. Returns only if that is impossible."""
    parent = int(argv[1])
    command = argv[3:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.stderr.write(f"shim: no death signal: {os.strerror(ctypes.get_errno())}\n")
        return _CANNOT_START
    if os.getppid() != parent:
        # The harness died before the signal was set; nobody is left to work for.
        os.kill(os.getpid(), signal.SIGKILL)
    # A request for stacks or records that comes before the trainer has a handler must not kill it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        os.execvp(command[0], command)  # noqa: S606 - no shell
    except OSError as error:
        sys.stderr.write(f"shim: cannot start {command[0]}: {error.strerror}\n")
    return _CANNOT_START


if __name__ == "__main__":
    sys.exit(main(sys.argv))
