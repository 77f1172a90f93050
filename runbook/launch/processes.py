"""Processes with a known environment that cannot outlive the harness.

Above a launch stands a keeper, beside it runs a reaper.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from nsa.contract import RUN_DIR_VARIABLE, RUN_TOKEN_VARIABLE
from runbook.config.settings import VARIABLE_FAMILIES, is_passed_on, may_be_set
from runbook.errors import UsageError
from runbook.launch.keeper import packed
from runbook.launch.reaper import GOOD_BYE, TOKEN_VARIABLE, kill_all

_HERE = Path(__file__).parent
_BARE = (sys.executable, "-I", "-S")
# Longer than `kill_all` tries; it takes milliseconds unless something hangs in the kernel.
_KEPT_WITHIN_S = 10.0


def check_launch_variables(names: Iterable[str]) -> None:
    """Raise `UsageError` that lists every variable a plan or config may not set."""
    bad = sorted(name for name in names if not may_be_set(name))
    if bad:
        raise UsageError(
            [f"a launch may not set {name}" for name in bad],
            hint=f"allowed are {', '.join(VARIABLE_FAMILIES)}",
        )


def build_environment(
    machine: Mapping[str, str],
    plan: Mapping[str, str],
    *,
    token: str,
    run_dir: Path,
    loopback: bool,
    folder: Path | None = None,
    own: Iterable[str] = (),
    installed: bool = False,
) -> dict[str, str]:
    """The whole environment of one launch.

    `machine` is the harness's own environment, of which only a fixed list is passed on; `plan` is
    what the launch sets. `loopback` keeps gloo's sockets on this machine. The packages of `folder`
    come before all others. `own` are variables of a trainer of one's own, checked in
    its profile. `installed`: nothing is imported from the folder that the launch runs in, where
    somebody's `nsa` or `pytest.py` may lie.

    Raises `UsageError` for a variable that a plan may not set.
    """
    check_launch_variables(set(plan) - set(own))
    environment = {name: value for name, value in machine.items() if is_passed_on(name)}
    environment["PYTHONUNBUFFERED"] = "1"
    # Python's stack for a crash in native code; the trainer's own handler comes much later.
    environment["PYTHONFAULTHANDLER"] = "1"
    if installed:
        environment["PYTHONSAFEPATH"] = "1"
    if loopback:
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    environment.update(plan)
    if folder is not None:
        others = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(folder), *([others] if others else [])])
    environment[RUN_TOKEN_VARIABLE] = token
    environment[RUN_DIR_VARIABLE] = str(run_dir)
    return environment


def spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    output: IO[bytes],
    cwd: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start `command` in a session of its own, tied to the life of the calling thread.

    Its output goes straight into the file, so that nothing is lost if the harness dies. Call this
    from a thread that outlives the command: the death signal fires when that thread ends.
    Raises `OSError` if nothing can be started.
    """
    shim = [*_BARE, str(_HERE / "shim.py"), str(os.getpid()), "--", *command]
    return subprocess.Popen(
        shim,
        env=dict(environment),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def spawn_kept(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    output: IO[bytes],
    cwd: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start `command` below a keeper, from whose tree nothing that it starts can leave.

    What is returned is the keeper, which ends when all of it has ended, and as the command did.
    It carries no token. Raises `OSError` if nothing can be started.
    """
    keeper = subprocess.Popen(
        [*_BARE, str(_HERE / "keeper.py")],
        env=_for_python(environment),
        cwd=cwd,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    if keeper.stdin is not None:
        keeper.stdin.write(packed(command, environment))
        keeper.stdin.flush()
    return keeper


def end_kept(keeper: subprocess.Popen[bytes]) -> None:
    """Have a keeper end all that is below it, and itself."""
    if keeper.stdin is not None:
        keeper.stdin.close()
    try:
        keeper.wait(_KEPT_WITHIN_S)
    except subprocess.TimeoutExpired:
        # Something hangs in the kernel. It was killed, and is gone as soon as that ends.
        keeper.kill()
        keeper.wait()


def _for_python(environment: Mapping[str, str]) -> dict[str, str]:
    """What a bare Python needs to start, where its library lies in no usual folder."""
    name = "LD_LIBRARY_PATH"
    return {name: environment[name]} if name in environment else {}


class Reaper:
    """A process that kills everything with the token as soon as this one is gone."""

    def __init__(self, token: str, variable: str = TOKEN_VARIABLE) -> None:
        self._token, self._variable = token, variable
        self._process = subprocess.Popen(
            [*_BARE, str(_HERE / "reaper.py"), token, variable],
            env=_for_python(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> Reaper:
        return self

    def __exit__(self, *_: object) -> None:
        left = kill_all(self._token, self._variable)
        if self._process.stdin is not None:
            # If something survived, the reaper goes on trying after we are gone.
            if not left:
                try:
                    self._process.stdin.write(GOOD_BYE)
                    self._process.stdin.flush()
                except BrokenPipeError:
                    pass
            self._process.stdin.close()
        if not left:
            self._process.wait(timeout=5)
