"""The launcher of a Slurm cluster: a job for each launch, and an agent on each node of it.

Code belongs here if it talks to Slurm.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runbook.config.profile import Profile
from runbook.config.setup import RunOptions, Setup
from runbook.launch.command import completed, rendezvous
from runbook.launch.launcher_api import Launcher, Start
from runbook.launch.nodes import NodesLauncher, chosen, gpus_per_node, problems_of
from runbook.launch.nodes.cluster import Standing
from runbook.launch.nodes.files import Job
from runbook.launch.slurm import commands
from runbook.records import Launch
from runbook.records.launch import TORCHRUN


@dataclass(kw_only=True)
class SlurmCluster:
    """Slurm as a `Cluster`, which is asked for every launch in the same way."""

    request: Request
    name: str = field(default="slurm", init=False)
    title: str = field(default="Slurm", init=False)
    pending: Standing = field(init=False, default=commands.JobState(state="PENDING"))
    by_itself_s: float = field(default=3.0, init=False)
    meet_s: float = field(default=120.0, init=False)

    def submit(self, start: Start, job: Job, names: tuple[str, ...]) -> Job:
        """As in `Cluster`. Raises RefusedError."""
        options = self.request.words(start.launch, name=job.name, names=names)
        options += ["--output=/dev/null", "--error=/dev/null"]
        # The job inherits the launch's environment, and the same cluster is asked.
        cluster = {name: value for name, value in os.environ.items() if name == "SLURM_CONF"}
        environment = {**start.environment, **cluster}
        number = commands.submit(options, agent_script(start.run_dir), environment)
        return job.model_copy(update={"job_id": number})

    def found(self, job: Job) -> Job:
        """As in `Cluster`."""
        return job.model_copy(update={"job_id": job.job_id or commands.find_job(job.name)})

    def look(self, job: Job) -> Standing | None:
        """As in `Cluster`. Raises RefusedError."""
        return commands.job_state(job.job_id) if job.job_id else None

    def is_listed(self, job: Job) -> bool:
        """As in `Cluster`."""
        return commands.is_listed(job.job_id)

    def cancel(self, job: Job, *, at_once: bool) -> None:
        """As in `Cluster`."""
        commands.cancel(job.job_id, *(("--signal=KILL", "--full") if at_once else ()))

    def calls(self, node: str) -> str:
        """As in `Cluster`."""
        words = commands.node_words(node)
        why = f", {words['Reason']}" if words.get("Reason") else ""
        return f"{words.get('State', 'unknown')}{why}"


class Slurm:
    """Jobs of Slurm, as `--launcher` names them."""

    here = False
    reads: Sequence[str] = ("--nodes", "--partition", "--account", "--queue-s")

    def lacks(self) -> list[str]:
        """As in `LauncherKind`."""
        absent = ", ".join(name for name in commands.TOOLS if shutil.which(name) is None)
        words = f"--launcher slurm: no {absent} here; run it where jobs are submitted"
        return [words] if absent else []

    def problems(self, options: RunOptions, profile: Profile) -> list[str]:
        """As in `LauncherKind`."""
        return problems_of(self, "slurm", options, profile)

    def launcher(self, setup: Setup, run_root: Path, note: Callable[[str], None]) -> Launcher:
        """As in `LauncherKind`."""
        cluster, queue_s = SlurmCluster(request=request_of(setup)), setup.options.queue_s
        return NodesLauncher(run_root=run_root, cluster=cluster, queue_s=queue_s, note=note)

    def printed(self, launch: Launch, setup: Setup) -> str:
        """As in `LauncherKind`: the batch script of its job."""
        return printed_script(launch, request_of(setup))

    def takes_out(self) -> str:
        """As in `LauncherKind`."""
        return "scontrol update nodename={node} state=drain reason={reason}"


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
        on = chosen(launch, names)
        return [*words, f"--nodelist={','.join(on)}"] if on else words


def request_of(setup: Setup) -> Request:
    """What is asked of Slurm for each launch of a run."""
    options, profile = setup.options, setup.profile
    return Request(
        partition=options.partition,
        account=options.account,
        gpus_per_node=gpus_per_node(options, profile),
    )


# One task on each node with all of its processors; one that ends leaves the others to the harness.
_SRUN = ("srun", "--kill-on-bad-exit=0", "--wait=0", "--cpu-bind=none")


def agent_script(run_dir: Path) -> str:
    """What the job of a launch runs: the agent on every node."""
    words = [*_SRUN, sys.executable, "-P", "-m", AGENT, str(run_dir.resolve())]
    log = shlex.quote(str(run_dir.resolve() / commands.LOG))
    return f"exec {shlex.join(words)} >>{log} 2>&1"


def printed_script(launch: Launch, request: Request) -> str:
    """The launch as a batch script that a person can submit: the same experiment."""
    whole = completed(launch)
    options = request.words(launch, name="runbook")
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
