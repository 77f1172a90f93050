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
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED")


@dataclass(frozen=True, kw_only=True)
class JobState:
    """A job as Slurm sees it: `code` is its batch script's exit code, `nodes` an expression."""

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
    """`n[0-1]` as the names of the nodes, in their order."""
    if not expression:
        return ()
    done = run_tool(["scontrol", "show", "hostnames", expression], timeout_s=_TIMEOUT_S)
    return tuple(done.stdout.split())


def node_words(node: str) -> dict[str, str]:
    """What Slurm says of a node, by its own keys; empty if it says nothing."""
    done = run_tool(["scontrol", "--oneliner", "show", "node", node], timeout_s=_TIMEOUT_S)
    return dict(_WORD.findall(done.stdout))


_LONGEST = 300


def reason_of(state: JobState) -> str:
    """Why Slurm lets a job wait, in its words."""
    return state.reason if state.reason not in ("", "None") else "Slurm gives no reason"


def never_started(name: str, state: JobState, *, waited_s: float, limit_s: float) -> End:
    """The job waited for longer than it may."""
    cause = (
        f"{name} never started: {waited_s:.0f} s in the queue, the limit is {limit_s:g} s "
        f"(--queue-s); {reason_of(state)}"
    )
    return End(status=LaunchStatus.ENVIRONMENT_ERROR, cause=cause)


def lost_node(node: str, silent_s: float) -> End:
    """The agent of a node was not heard for so long; Slurm is asked what it knows of the node."""
    words = node_words(node)
    why = f", {words['Reason']}" if words.get("Reason") else ""
    cause = (
        f"node {node} is lost: nothing heard from it for {silent_s:.0f} s; "
        f"Slurm calls it {words.get('State', 'unknown')}{why}"
    )
    return End(status=LaunchStatus.HARDWARE_ERROR, cause=cause, node=node)


def ended_early(name: str, state: JobState, run_dir: Path, *, gone: bool, silent: str) -> End:
    """The job is over, and not all agents have said how their command ended.

    `gone`: Slurm no longer knows it. `silent`: how many of its nodes did not say, in words.
    """
    called = "gone from Slurm" if gone else state.state
    if state.code == errno.ENOSPC:
        cause = f"{name}: no space left on device, in {run_dir}"
        return End(status=LaunchStatus.CRASHED, cause=cause, kind=Kind.DISK_FULL)
    if state.state == "TIMEOUT":
        return End(status=LaunchStatus.TIMED_OUT, cause=f"{name} reached its time limit in Slurm")
    if state.state == "NODE_FAIL":
        cause = f"{name}: a node failed, says Slurm ({state.nodes})"
        return End(status=LaunchStatus.HARDWARE_ERROR, cause=cause)
    if state.state in ("CANCELLED", "PREEMPTED"):
        cause = f"{name} was ended in Slurm by somebody else (state {called})"
        return End(status=LaunchStatus.PREEMPTED, cause=cause)
    path = run_dir / "slurm.log"
    lines = path.read_text("utf-8", "replace").split("\n") if path.is_file() else []
    said = [line.strip()[:_LONGEST] for line in lines if line.strip()]
    last = f"slurm.log ends with: {said[-1]}" if said else "slurm.log is empty"
    over = f"{name} is over ({called}, exit code {state.code})"
    cause = f"{over}, but {silent} did not say how; {last}"
    return End(status=LaunchStatus.ENVIRONMENT_ERROR, cause=cause)
