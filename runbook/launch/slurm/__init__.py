"""The launcher of a Slurm cluster: a job for each launch, and an agent on each node of it.

Agents and harness share only the run directory. Code belongs here if it talks to Slurm, or if it is
one of the two ends of those files; what a launch means is decided where it is for every launcher.
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
from runbook.errors import RunbookError
from runbook.folder import CONSOLE_LOG
from runbook.launch.command import completed, rendezvous
from runbook.launch.launcher_api import Launcher, Running, Start
from runbook.launch.local import nodes_problems
from runbook.launch.slurm import commands, files
from runbook.launch.slurm.job import SlurmRun
from runbook.records import Launch
from runbook.records.launch import TORCHRUN


@dataclass(kw_only=True)
class SlurmLauncher:
    """Starts launches on nodes of a cluster that share the run's folder and this Python.

    `queue_s` is how long a job may wait for its nodes. `note` is told what a person should read.
    """

    run_root: Path
    request: Request
    queue_s: float
    note: Callable[[str], None]
    here: bool = field(default=False, init=False)

    def start(self, start: Start) -> Running:
        """As in `Launcher`. Raises RefusedError."""
        words = list(start.command.argv)
        torchrun = words[:1] == [TORCHRUN]
        job = files.Job(
            run_token=start.token,
            nodes=start.launch.nodes,
            nproc=start.launch.nproc,
            argv=tuple(words[1:] if torchrun else words),
            torchrun=torchrun,
            folder=str(start.command.folder or ""),
        )
        path = start.run_dir / files.JOB_JSON
        files.write_record(path, job)
        options = self.request.words(
            start.launch, name=job.name, names=files.kept_nodes(self.run_root)
        )
        options += ["--output=/dev/null", "--error=/dev/null"]
        # The job inherits the launch's environment, and the same cluster is asked.
        cluster = {name: value for name, value in os.environ.items() if name == "SLURM_CONF"}
        environment = {**start.environment, **cluster}
        number = commands.submit(options, agent_script(start.run_dir), environment)
        job = job.model_copy(update={"job_id": number})
        try:
            files.write_record(path, job)
        except OSError:
            commands.cancel(number)
            raise
        return self._running(start, job)

    def adopt(self, start: Start) -> Running | None:
        """As in `Launcher`: the job is found by its number, or by the token in its name."""
        job = files.read_record(start.run_dir / files.JOB_JSON, files.Job)
        if job is None or job.run_token != start.token:
            return None
        number = job.job_id or commands.find_job(job.name)
        known = bool(number) and commands.job_state(number) is not None
        said = [files.last_state(folder) for folder in files.node_folders(start.run_dir)]
        # Every node may have written all that it had to say.
        ended = sum(state is not None and state.end is not None for state in said) >= job.nodes
        if not (known or ended):
            return None
        self.note(f"{start.launch.name}: job {number} outlived its harness and is watched again")
        return self._running(start, job.model_copy(update={"job_id": number}))

    def nodes(self, run_dir: Path) -> list[Path]:
        """As in `Launcher`."""
        kept = files.kept_nodes(self.run_root)
        folders = {folder: files.last_state(folder) for folder in files.node_folders(run_dir)}
        placed = []
        for folder, state in folders.items():
            if state is None:
                raise RunbookError(f"{folder / files.NODE_JSONL} is damaged")
            known = kept.index(folder.name) if folder.name in kept else len(kept)
            placed.append((known, state.index, folder.name, folder))
        return [folder for *_, folder in sorted(placed)]

    def is_own_file(self, name: str) -> bool:
        """As in `Launcher`."""
        return name in (CONSOLE_LOG, files.NODE_JSONL, files.ASKS_JSONL)

    def _running(self, start: Start, job: files.Job) -> SlurmRun:
        return SlurmRun(start, job, queue_s=self.queue_s, note=self.note, on_begin=self._remember)

    def _remember(self, expression: str) -> None:
        """Keep the nodes of a job for all that follow; one of more nodes adds the others."""
        files.keep_nodes(self.run_root, commands.host_names(expression))


class Slurm:
    """Jobs of Slurm, as `--launcher` names them."""

    here = False

    def lacks(self) -> list[str]:
        """As in `LauncherKind`."""
        absent = ", ".join(name for name in commands.TOOLS if shutil.which(name) is None)
        words = f"--launcher slurm: no {absent} here; run it where jobs are submitted"
        return [words] if absent else []

    def problems(self, options: RunOptions, profile: Profile) -> list[str]:
        """As in `LauncherKind`."""
        own = "--launcher slurm: a trainer of one's own runs on one machine only, so far"
        return [own] * (profile.own_trainer is not None) + nodes_problems(options, profile)

    def launcher(self, setup: Setup, run_root: Path, note: Callable[[str], None]) -> Launcher:
        """As in `LauncherKind`."""
        queue_s = setup.options.queue_s
        return SlurmLauncher(
            run_root=run_root, request=request_of(setup), queue_s=queue_s, note=note
        )

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
