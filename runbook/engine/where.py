"""Where the launches of a run run: this machine, or nodes of a cluster; and what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from runbook.defaults import DEFAULT_LAUNCHER, DEFAULT_QUEUE_S, LAUNCHERS
from runbook.errors import did_you_mean
from runbook.launch.local import LocalLauncher
from runbook.launch.place import Launcher

if TYPE_CHECKING:
    from runbook.config import Profile
    from runbook.config.setup import RunOptions, Setup
    from runbook.launch.slurm.script import Request


def request_of(setup: Setup) -> Request:
    """What is asked of Slurm for each launch of a run."""
    from runbook.launch.slurm.script import Request

    options, profile = setup.options, setup.profile
    return Request(
        partition=options.partition,
        account=options.account,
        gpus_per_node=profile.ranks // options.nodes if profile.has_gpu else 0,
    )


def launcher_of(setup: Setup, run_root: Path, note: Callable[[str], None]) -> Launcher:
    """The launcher that the run was asked for with."""
    if setup.options.launcher == DEFAULT_LAUNCHER:
        return LocalLauncher()
    from runbook.launch.slurm.launcher import SlurmLauncher

    return SlurmLauncher(
        run_root=run_root, request=request_of(setup), queue_s=setup.options.queue_s, note=note
    )


def tool_problems(launcher: str) -> list[str]:
    """What a run with this launcher lacks here."""
    if launcher == DEFAULT_LAUNCHER:
        return []
    from runbook.launch.slurm.commands import missing_tools

    absent = ", ".join(missing_tools())
    return [f"--launcher slurm: no {absent} here; run it where jobs are submitted"] * bool(absent)


def place_problems(options: RunOptions, profile: Profile) -> list[str]:
    """What is wrong with the launcher, or with spreading this profile over its nodes."""
    known = ", ".join(LAUNCHERS)
    if options.launcher not in LAUNCHERS:
        near = did_you_mean(options.launcher, LAUNCHERS)
        return [f"--launcher {options.launcher!r}: no such launcher{near}; there are: {known}"]
    found = []
    if options.launcher == DEFAULT_LAUNCHER:
        given = {
            "--nodes": options.nodes != 1,
            "--partition": bool(options.partition),
            "--account": bool(options.account),
            "--queue-s": options.queue_s != DEFAULT_QUEUE_S,
        }
        found = [f"{flag} is for --launcher slurm" for flag, typed in given.items() if typed]
    elif profile.own_trainer is not None:
        found.append("--launcher slurm: a trainer of one's own runs on one machine only, so far")
    found += _nodes_problems(options, profile)
    return found


def _nodes_problems(options: RunOptions, profile: Profile) -> list[str]:
    """A machine with GPUs has the nodes of its profile; CPUs are spread as asked for."""
    needed = profile.hardware.nodes or (1 if profile.has_gpu else options.nodes)
    if options.nodes != needed:
        way = f"--launcher slurm --nodes {needed}" if needed > 1 else "--nodes 1"
        return [f"--nodes {options.nodes}: profile {profile.name} is for {needed} node(s): {way}"]
    if profile.ranks % options.nodes:
        divisors = [n for n in range(1, profile.ranks + 1) if profile.ranks % n == 0]
        return [
            f"--nodes {options.nodes}: the {profile.ranks} ranks of profile {profile.name} cannot "
            f"be spread evenly; possible are: {', '.join(map(str, divisors))}"
        ]
    return []
