"""The environment of a launch: what it sets itself, and a fixed list of what the harness has."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from nsa.contract import RUN_DIR_VARIABLE, RUN_TOKEN_VARIABLE
from runbook.config.settings import VARIABLE_FAMILIES, is_passed_on, may_be_set
from runbook.errors import UsageError


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
