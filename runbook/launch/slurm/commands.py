"""Slurm's own tools: submit a job, ask about it, end it, and say what its end means.

Only `key=value` words are parsed.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runbook.launch.inputs import RefusedError
from runbook.launch.nodes.files import Job
from runbook.process import run_tool
from runbook.records import End, Kind, LaunchStatus

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
        return host_names(self.nodes)

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
        path = run_dir / LOG
        text = path.read_text("utf-8", "replace") if path.is_file() else ""
        said = [line.strip()[:_LONGEST] for line in text.split("\n") if line.strip()]
        last = f"{LOG} ends with: {said[-1]}" if said else f"{LOG} is empty"
        over = f"{name} is over ({called}, exit code {self.code})"
        cause = f"{over}, but {silent} did not say how; {last}"
        return End(status=LaunchStatus.ENVIRONMENT_ERROR, cause=cause)


def submit(words: Sequence[str], script: str, environment: Mapping[str, str]) -> int:
    """Submit a batch script and return the job's number. Raises RefusedError with Slurm's words."""
    command = ["sbatch", "--parsable", *words, "--wrap", script]
    done = run_tool(command, timeout_s=_TIMEOUT_S, variables=environment, only=True)
    number = done.stdout.strip().split(";")[0]
    if not done.ok or not number.isdigit():
        said = " ".join(done.stderr.split()) or done.problem or done.stdout
        raise RefusedError(f"sbatch refused the job: {said}")
    return int(number)


def job_state(job_id: int) -> JobState | None:
    """The job's state; None if Slurm no longer knows it. Raises RefusedError without an answer."""
    done = run_tool(["scontrol", "--oneliner", "show", "job", str(job_id)], timeout_s=_TIMEOUT_S)
    if not done.ok:
        if "Invalid job id" in done.stderr:
            return None
        raise RefusedError(f"scontrol: {' '.join(done.stderr.split()) or done.problem}")
    return parse_job(done.stdout)


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


def find_job(name: str) -> int:
    """The number of the newest job of this name that Slurm still knows; 0 if there is none."""
    command = ["squeue", "--noheader", "--states=all", f"--name={name}", "--format=%i"]
    done = run_tool(command, timeout_s=_TIMEOUT_S)
    numbers = [int(word) for word in done.stdout.split() if word.isdigit()]
    return max(numbers, default=0)


def is_listed(job_id: int) -> bool:
    """Does Slurm still hold nodes for the job, or wait to?"""
    command = ["squeue", "--noheader", f"--jobs={job_id}", "--format=%i"]
    return bool(run_tool(command, timeout_s=_TIMEOUT_S).stdout.split())


def cancel(job_id: int, *words: str) -> None:
    """End a job; one that is over already stays as it is."""
    run_tool(["scancel", *words, str(job_id)], timeout_s=_TIMEOUT_S)


def host_names(expression: str) -> tuple[str, ...]:
    """The nodes of an expression by name, in their order."""
    if not expression:
        return ()
    done = run_tool(["scontrol", "show", "hostnames", expression], timeout_s=_TIMEOUT_S)
    return tuple(done.stdout.split())


def node_words(node: str) -> dict[str, str]:
    """What Slurm says of a node, by its own keys; empty if it says nothing."""
    done = run_tool(["scontrol", "--oneliner", "show", "node", node], timeout_s=_TIMEOUT_S)
    return dict(_WORD.findall(done.stdout))
