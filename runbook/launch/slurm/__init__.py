"""The launcher of a Slurm cluster: a job for each launch, and an agent on each node of it.

Code belongs here if it talks to Slurm.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

from runbook.config.profile import Profile
from runbook.config.setup import RunOptions, Setup
from runbook.launch.command import completed, rendezvous
from runbook.launch.launcher_api import Launcher, LauncherKind
from runbook.launch.nodes import NodesLauncher, gpus_per_node, problems_of
from runbook.launch.slurm.cluster import SRUN, TOOLS, SlurmCluster
from runbook.records import Launch
from runbook.records.launch import TORCHRUN

_PORT = 29400


class Slurm(LauncherKind):
    """Jobs of Slurm, as `--launcher` names them."""

    reads = ("--nodes", "--partition", "--account", "--queue-s")

    def lacks(self) -> list[str]:
        """As in `LauncherKind`."""
        absent = ", ".join(name for name in TOOLS if shutil.which(name) is None)
        words = f"--launcher slurm: no {absent} here; run it where jobs are submitted"
        return [words] if absent else []

    def problems(self, options: RunOptions, profile: Profile) -> list[str]:
        """As in `LauncherKind`."""
        return problems_of(self, "slurm", options, profile)

    def launcher(self, setup: Setup, run_root: Path, note: Callable[[str], None]) -> Launcher:
        """As in `LauncherKind`."""
        cluster, queue_s = cluster_of(setup), setup.options.queue_s
        return NodesLauncher(run_root=run_root, cluster=cluster, queue_s=queue_s, note=note)

    def printed(self, launch: Launch, setup: Setup) -> str:
        """As in `LauncherKind`: the batch script of its job."""
        return printed_script(launch, cluster_of(setup))

    def takes_out(self) -> str:
        """As in `LauncherKind`."""
        return "scontrol update nodename={node} state=drain reason={reason}"


def cluster_of(setup: Setup) -> SlurmCluster:
    """Slurm as a run asks it."""
    options, profile = setup.options, setup.profile
    return SlurmCluster(
        partition=options.partition,
        account=options.account,
        gpus_per_node=gpus_per_node(options, profile),
    )


def printed_script(launch: Launch, cluster: SlurmCluster) -> str:
    """The launch as a batch script that a person can submit: the same experiment."""
    whole = completed(launch)
    options = cluster.words(launch, name="runbook")
    words = list(whole.words())
    lines = ["sbatch <<'JOB'", "#!/bin/bash", *(f"#SBATCH {word}" for word in options)]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in whole.env.items()]
    start = [*SRUN]
    if words[0] == TORCHRUN and launch.nodes > 1:
        lines.append('head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)')
        meet = rendezvous(f'"$head:{_PORT}"', '"$SLURM_JOB_ID"')
        line = f"{shlex.join([*start, words[0]])} {' '.join(meet)} {shlex.join(words[1:])}"
    else:
        line = shlex.join([*start, *words])
    return "\n".join([*lines, line, "JOB"])
