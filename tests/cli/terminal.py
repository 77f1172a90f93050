"""A real terminal: what a program writes to it, and what a screen then shows."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
from collections.abc import Callable, Mapping


def in_terminal(
    action: Callable[[], None], *, columns: int = 80, variables: Mapping[str, str | None] = {}
) -> str:
    """What `action` writes in a process whose stdout and stderr are a terminal of that width.

    A variable that is None is taken away.
    """
    pid, master = pty.fork()
    if pid == 0:
        code = 1
        try:
            _be_a_program(action, columns, variables)
            code = 0
        finally:
            os._exit(code)
    written = _read_all(master)
    _, status = os.waitpid(pid, 0)
    assert status == 0, written
    return written


def _be_a_program(
    action: Callable[[], None], columns: int, variables: Mapping[str, str | None]
) -> None:
    import sys

    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    action()
    sys.stdout.flush()
    sys.stderr.flush()


def _read_all(master: int) -> str:
    chunks = []
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(master)
    return b"".join(chunks).decode().replace("\r\n", "\n")
