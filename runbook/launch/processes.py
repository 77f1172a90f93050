"""Starting processes with a known environment that cannot outlive the harness."""

from __future__ import annotations

import fnmatch
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from nsa.contract import RUN_DIR_VARIABLE, RUN_TOKEN_VARIABLE
from runbook.config.settings import VARIABLE_FAMILIES, may_be_set
from runbook.errors import UsageError
from runbook.launch.reaper import GOOD_BYE, kill_all

_HERE = Path(__file__).parent
_BARE = (sys.executable, "-I", "-S")
# What a process needs to run on this machine. Toggles are not among them: a launch gets exactly
# the ones that its plan shows.
_FROM_MACHINE = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR",
    "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED",
    "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_*",
    "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
    "HF_HOME", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TIKTOKEN_CACHE_DIR",
    "TORCH_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
)  # fmt: skip


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
) -> dict[str, str]:
    """The whole environment of one launch.

    `machine` is the harness's own environment, of which only a fixed list is passed on; `plan` is
    what the launch sets. `loopback` keeps gloo's sockets on this machine.
    Raises `UsageError` for a variable that a plan may not set.
    """
    check_launch_variables(plan)
    environment = {k: v for k, v in machine.items() if _matches(k, _FROM_MACHINE)}
    environment["PYTHONUNBUFFERED"] = "1"
    # Python's stack for a crash in native code; the trainer's own handler comes much later.
    environment["PYTHONFAULTHANDLER"] = "1"
    if loopback:
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    environment.update(plan)
    environment[RUN_TOKEN_VARIABLE] = token
    environment[RUN_DIR_VARIABLE] = str(run_dir)
    return environment


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def spawn(
    command: Sequence[str], environment: Mapping[str, str], *, output: IO[bytes]
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
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


class Reaper:
    """A process that kills everything with the token as soon as this one is gone."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._process = subprocess.Popen(
            [*_BARE, str(_HERE / "reaper.py"), token],
            env={},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> Reaper:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        left = kill_all(self._token)
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
