"""The batch script of a launch: what Slurm is asked for, and what runs on each node.

One builder for the script that `--dry-run` prints and for the job that is submitted. What is
submitted differs in what changes no result: an agent starts torchrun on each node, and the nodes
are those on which the run began.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runbook.config.setup import Setup
from runbook.launch.command import completed
from runbook.launch.slurm.files import job_name
from runbook.launch.torchrun import rendezvous
from runbook.records import Launch
from runbook.records.launch import TORCHRUN

# Slurm ends a job by itself only if the harness could not: after its own limit and this.
_MARGIN_S = 300.0
_PORT = 29400
AGENT = "runbook.launch.slurm.agent"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of Slurm for every launch of a run."""

    partition: str = ""
    account: str = ""
    gpus_per_node: int = 0

    def words(self, launch: Launch, *, name: str, names: Sequence[str] = ()) -> list[str]:
        """The options of sbatch for a launch, on the first of the run's nodes.

        `names` are those that are known so far; Slurm adds what a launch needs beyond them.
        """
        minutes = math.ceil((launch.timeout_s + _MARGIN_S) / 60)
        words = [
            f"--job-name={name}",
            f"--nodes={launch.nodes}",
            f"--ntasks={launch.nodes}",
            "--ntasks-per-node=1",
            "--exclusive",
            f"--time={minutes}",
            "--no-requeue",
        ]
        words += [f"--partition={self.partition}"] if self.partition else []
        words += [f"--account={self.account}"] if self.account else []
        words += [f"--gpus-per-node={self.gpus_per_node}"] if self.gpus_per_node else []
        places = launch.on or range(min(launch.nodes, len(names)))
        chosen = [names[place] for place in places] if names else []
        return [*words, f"--nodelist={','.join(chosen)}"] if chosen else words


def request_of(setup: Setup) -> Request:
    """What is asked of Slurm for each launch of a run."""
    options, profile = setup.options, setup.profile
    return Request(
        partition=options.partition,
        account=options.account,
        gpus_per_node=profile.ranks // options.nodes if profile.has_gpu else 0,
    )


# One task on each node with all of its processors; one that ends leaves the others to the harness.
_SRUN = ("srun", "--kill-on-bad-exit=0", "--wait=0", "--cpu-bind=none")


def agent_script(run_dir: Path) -> str:
    """What the job of a launch runs: the agent on every node."""
    words = [*_SRUN, sys.executable, "-P", "-m", AGENT, str(run_dir.resolve())]
    log = shlex.quote(str(run_dir.resolve() / "slurm.log"))
    return f"exec {shlex.join(words)} >>{log} 2>&1"


def printed_script(launch: Launch, request: Request) -> str:
    """The launch as a batch script that a person can submit: the same experiment."""
    whole = completed(launch)
    options = request.words(launch, name=job_name("TOKEN").removesuffix("-TOKEN"))
    words = list(whole.words())
    lines = ["sbatch <<'JOB'", "#!/bin/bash", *(f"#SBATCH {word}" for word in options)]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in whole.env.items()]
    start = [*_SRUN]
    if words[0] == TORCHRUN and launch.nodes > 1:
        lines.append('head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)')
        meet = rendezvous(f'"$head:{_PORT}"', '"$SLURM_JOB_ID"')
        line = f"{shlex.join([*start, words[0]])} {' '.join(meet)} {shlex.join(words[1:])}"
    else:
        line = shlex.join([*start, *words])
    return "\n".join([*lines, line, "JOB"])
