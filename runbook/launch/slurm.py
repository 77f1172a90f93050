"""The launcher of a Slurm cluster: a job for each launch, and an agent on each node of it.

Code belongs here if it talks to Slurm. Its own tools submit a job, ask about it, and end it; only
`key=value` words of what they print are parsed.
"""

from __future__ import annotations

import errno
import math
import os
import re
import shlex
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runbook.config.setup import Setup
from runbook.errors import RunbookError
from runbook.files import text_there
from runbook.launch.command import RefusedError, completed, rendezvous
from runbook.launch.launcher_api import Start
from runbook.launch.nodes import (
    RENDEZVOUS_PORT,
    Cluster,
    NodesKind,
    Standing,
    agent,
    gpus_per_node,
)
from runbook.launch.nodes.agent import Place
from runbook.launch.nodes.files import Job
from runbook.process import ToolResult, run_tool
from runbook.records import End, Kind, Launch, LaunchStatus
from runbook.records.launch import TORCHRUN

TOOLS = ("sbatch", "scontrol", "squeue", "scancel")
_TIMEOUT_S = 20.0
_WORD = re.compile(r"(\w[\w:/]*)=(\S*)")
# Slurm has done with a job in any of these; the first is the only good one.
OVER = (
    *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"),
    *("OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL", "REVOKED"),
)
# What srun and the agents said.
LOG = "slurm.log"
_LONGEST = 300
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED")
# Slurm ends a job by itself only if the harness could not: after its own limit and this.
_MARGIN_S = 300.0
# One task on each node with all of its processors; one that ends leaves the others to the harness.
SRUN = ("srun", "--kill-on-bad-exit=0", "--wait=0", "--cpu-bind=none")
# Of the job, not of the launch: with them in its environment a program would think it is a task.
_FROM_SLURM = ("SLURM", "SBATCH", "PMI_", "PMIX_")


def agent_script(run_dir: Path) -> str:
    """What the job of a launch runs: the agent on every node."""
    words = [*SRUN, *agent.command(place, run_dir)]
    log = shlex.quote(str(run_dir.resolve() / LOG))
    return f"exec {shlex.join(words)} >>{log} 2>&1"


def _told(*words: str) -> ToolResult:
    return run_tool(words, timeout_s=_TIMEOUT_S)


@dataclass(frozen=True, kw_only=True)
class JobState:
    """A job as Slurm tells of it, `Standing` of the launcher: `code` is its script's exit code.

    `nodes` is an expression.
    """

    state: str
    reason: str = ""
    nodes: str = ""
    code: int = 0

    @property
    def waits(self) -> bool:
        """True while it has no nodes."""
        return self.state in _WAITING

    @property
    def over(self) -> bool:
        """True once nothing of it can run any more, or Slurm only waits for what ran."""
        return self.state in (*OVER, "COMPLETING")

    @property
    def why(self) -> str:
        """Why Slurm lets it wait, in its words."""
        return self.reason if self.reason not in ("", "None") else "Slurm gives no reason"

    def names(self) -> tuple[str, ...]:
        """`n[0-1]` as the names of the nodes, in their order."""
        told = _told("scontrol", "show", "hostnames", self.nodes).stdout if self.nodes else ""
        return tuple(told.split())

    def ended(self, job: Job, run_dir: Path, *, gone: bool, silent: str) -> End:
        """As in `Standing`."""
        name, called = job.called, "gone from Slurm" if gone else self.state
        if self.code == errno.ENOSPC:
            cause = f"{name}: no space left on device, in {run_dir}"
            return End(status=LaunchStatus.CRASHED, cause=cause, kind=Kind.DISK_FULL)
        if self.state == "TIMEOUT":
            cause = f"{name} reached its time limit in Slurm"
            return End(status=LaunchStatus.TIMED_OUT, cause=cause)
        if self.state == "NODE_FAIL":
            cause = f"{name}: a node failed, says Slurm ({self.nodes})"
            return End(status=LaunchStatus.HARDWARE_ERROR, cause=cause)
        if self.state in ("CANCELLED", "PREEMPTED"):
            cause = f"{name} was ended in Slurm by somebody else (state {called})"
            return End(status=LaunchStatus.PREEMPTED, cause=cause)
        text = text_there(run_dir / LOG)
        said = [line.strip()[:_LONGEST] for line in text.split("\n") if line.strip()]
        last = f"{LOG} ends with: {said[-1]}" if said else f"{LOG} is empty"
        over = f"{name} is over ({called}, exit code {self.code})"
        cause = f"{over}, but {silent} did not say how; {last}"
        return End(status=LaunchStatus.ENVIRONMENT_ERROR, cause=cause)


@dataclass(kw_only=True)
class SlurmCluster(Cluster):
    """As in `Cluster`: asked for every launch in the same way."""

    partition: str = ""
    account: str = ""
    gpus_per_node: int = 0
    name = "slurm"
    title = "Slurm"
    pending: Standing = JobState(state="PENDING")
    by_itself_s = 3.0

    def words(self, launch: Launch, *, name: str, on: Sequence[str] = ()) -> list[str]:
        """The options of sbatch for a launch; Slurm adds the nodes that it needs beyond `on`."""
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
        return [*words, f"--nodelist={','.join(on)}"] if on else words

    def submit(self, start: Start, job: Job, on: Sequence[str]) -> Job:
        """As in `Cluster`. Raises RefusedError with Slurm's words."""
        options = self.words(start.launch, name=job.name, on=on)
        options += [
            "--output=/dev/null",
            "--error=/dev/null",
            "--wrap",
            agent_script(start.run_dir),
        ]
        # The job inherits the launch's environment, and the same cluster is asked.
        cluster = {name: value for name, value in os.environ.items() if name == "SLURM_CONF"}
        command, environment = ["sbatch", "--parsable", *options], {**start.environment, **cluster}
        done = run_tool(command, timeout_s=_TIMEOUT_S, variables=environment, only=True)
        number = done.stdout.strip().split(";")[0]
        if not done.ok or not number.isdigit():
            said = " ".join(done.stderr.split()) or done.problem or done.stdout
            raise RefusedError(f"sbatch refused the job: {said}")
        return job.model_copy(update={"job_id": int(number)})

    def found(self, job: Job) -> Job:
        """As in `Cluster`: the newest job of this name that Slurm still knows."""
        if job.job_id:
            return job
        done = _told("squeue", "--noheader", "--states=all", f"--name={job.name}", "--format=%i")
        numbers = [int(word) for word in done.stdout.split() if word.isdigit()]
        return job.model_copy(update={"job_id": max(numbers, default=0)})

    def look(self, job: Job) -> Standing | None:
        """As in `Cluster`. Raises RefusedError."""
        if not job.job_id:
            return None
        done = _told("scontrol", "--oneliner", "show", "job", str(job.job_id))
        if not done.ok:
            if "Invalid job id" in done.stderr:
                return None
            raise RefusedError(f"scontrol: {' '.join(done.stderr.split()) or done.problem}")
        return parse_job(done.stdout)

    def is_listed(self, job: Job) -> bool:
        """As in `Cluster`."""
        return bool(
            _told("squeue", "--noheader", f"--jobs={job.job_id}", "--format=%i").stdout.split()
        )

    def cancel(self, job: Job, *, at_once: bool) -> None:
        """As in `Cluster`."""
        _told("scancel", *(("--signal=KILL", "--full") if at_once else ()), str(job.job_id))

    def calls(self, node: str) -> str:
        """As in `Cluster`."""
        words = _node_words(node)
        why = f", {words['Reason']}" if words.get("Reason") else ""
        return f"{words.get('State', 'unknown')}{why}"


def parse_job(text: str) -> JobState:
    """What `scontrol --oneliner show job` printed."""
    words = dict(_WORD.findall(text))
    code = words.get("ExitCode", "0:0").split(":")[0]
    nodes = words.get("NodeList", "")
    return JobState(
        state=words.get("JobState", ""),
        reason=words.get("Reason", ""),
        nodes="" if nodes == "(null)" else nodes,
        code=int(code) if code.isdigit() else 0,
    )


def _node_words(node: str) -> dict[str, str]:
    """What Slurm says of a node, by its own keys; empty if it says nothing."""
    return dict(_WORD.findall(_told("scontrol", "--oneliner", "show", "node", node).stdout))


def place() -> Place:
    """Where an agent runs that srun started. Raises RunbookError."""
    node, index = os.environ["SLURMD_NODENAME"], int(os.environ["SLURM_NODEID"])
    host = _node_words(node).get("NodeAddr") or node
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise RunbookError(f"the address of {host} is not known: {error}") from error
    return Place(node=node, index=index, address=address, own=_FROM_SLURM)


class Slurm(NodesKind):
    """Jobs of Slurm, as `--launcher` names them."""

    name = "slurm"
    reads = ("--nodes", "--partition", "--account", "--queue-s")

    def lacks(self) -> list[str]:
        """As in `LauncherKind`."""
        absent = ", ".join(name for name in TOOLS if shutil.which(name) is None)
        words = f"--launcher slurm: no {absent} here; run it where jobs are submitted"
        return [words] if absent else []

    def cluster(self, setup: Setup, run_root: Path) -> SlurmCluster:  # noqa: ARG002 - it needs none
        """As in `NodesKind`."""
        options = setup.options
        gpus = gpus_per_node(options, setup.profile)
        return SlurmCluster(
            partition=options.partition, account=options.account, gpus_per_node=gpus
        )

    def printed(self, launch: Launch, setup: Setup) -> str:
        """As in `LauncherKind`: a batch script that a person can submit, the same experiment."""
        whole = completed(launch)
        options = self.cluster(setup, Path()).words(launch, name="runbook")
        words = list(whole.words())
        lines = ["sbatch <<'JOB'", "#!/bin/bash", *(f"#SBATCH {word}" for word in options)]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in whole.env.items()]
        if words[0] == TORCHRUN and launch.nodes > 1:
            lines.append('head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)')
            meet = " ".join(rendezvous(f'"$head:{RENDEZVOUS_PORT}"', '"$SLURM_JOB_ID"'))
            line = f"{shlex.join([*SRUN, words[0]])} {meet} {shlex.join(words[1:])}"
        else:
            line = shlex.join([*SRUN, *words])
        return "\n".join([*lines, line, "JOB"])

    def takes_out(self) -> str:
        """As in `LauncherKind`."""
        return "scontrol update nodename={node} state=drain reason={reason}"
