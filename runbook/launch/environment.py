"""The environment of a launch: an allow-list, so that nothing reaches a trainer by accident."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from nsa.contract import CONFIG_VARIABLE, RUN_DIR_VARIABLE, RUN_TOKEN_VARIABLE
from runbook.errors import UsageError

__all__ = ["build_environment", "check_launch_variables", "redacted"]

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

_FROM_PLAN = (
    "NSA_*", "NCCL_*", "TORCH_*", "TORCHELASTIC_*", "TORCHINDUCTOR_*", "PYTORCH_*", "CUDA_*",
    "GLOO_*", "OMP_*", "MKL_*", "TRITON_*", "HF_*", CONFIG_VARIABLE,
)  # fmt: skip

_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|PRIVATE", re.IGNORECASE)


def check_launch_variables(names: Iterable[str]) -> None:
    """Raise `UsageError` that lists every variable a plan or config may not set."""
    bad = sorted(name for name in names if not _matches(name, _FROM_PLAN))
    if bad:
        raise UsageError(
            [f"a launch may not set {name}" for name in bad],
            hint=f"allowed are {', '.join(_FROM_PLAN)}",
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


def redacted(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables for the record, with the values of secrets replaced."""
    return {k: "<redacted>" if _SECRET.search(k) else v for k, v in variables.items()}


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
