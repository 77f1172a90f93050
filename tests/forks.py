"""Many short processes that need the same heavy imports: forked by one that has them.

A module that ends in `serve(answer)` is asked by `forks`, a question at a time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def serve(answer: Callable[..., object]) -> None:
    """Answer each list of words that is read, a line of JSON, in a process of its own.

    One that dies says how: the number of the signal, negative. What it prints goes to stderr.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        words = json.loads(line)
        if not (child := os.fork()):
            print(json.dumps([words, answer(*words)]), file=answers, flush=True)
            os._exit(0)
        if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            print(json.dumps([words, code]), file=answers, flush=True)


@contextmanager
def forks(module: str, said: Path, **variables: str) -> Iterator[Callable[..., Any]]:
    """Asks the server that `module` is; `said` is the file for what it and its children print.

    An answer is what the module's function returns, or how its process died. Asking raises
    `AssertionError` with all that was printed if the function raised.
    """
    with said.open("w") as stderr, subprocess.Popen(
        [sys.executable, "-m", module], cwd=ROOT, text=True, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    ) as server:  # fmt: skip

        def ask(*words: str) -> Any:
            assert server.stdin and server.stdout
            print(json.dumps(words), file=server.stdin, flush=True)
            told: list[Any] = []
            # A test that ran out of time leaves the answer to another question behind.
            while told[:1] != [list(words)]:
                told = json.loads(server.stdout.readline() or json.dumps([words, 1]))
            assert told[1] != 1, said.read_text()
            return told[1]

        try:
            yield ask
        finally:
            os.killpg(server.pid, signal.SIGKILL)
