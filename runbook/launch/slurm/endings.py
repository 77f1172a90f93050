"""What the end of a job means that its agents did not tell: a queue, a limit, a node, somebody."""

from __future__ import annotations

import errno
from pathlib import Path

from runbook.launch.end.classify import End
from runbook.launch.slurm.commands import JobState, node_words
from runbook.records import Kind, LaunchStatus

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
    return End(status=LaunchStatus.HARDWARE_ERROR, cause=cause)


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
    cause = (
        f"{name} is over ({called}, exit code {state.code}), but {silent} did not say how; "
        f"{_last_words(run_dir)}"
    )
    return End(status=LaunchStatus.ENVIRONMENT_ERROR, cause=cause)


def _last_words(run_dir: Path) -> str:
    path = run_dir / "slurm.log"
    lines = path.read_text("utf-8", "replace").split("\n") if path.is_file() else []
    said = [line.strip() for line in lines if line.strip()]
    return f"slurm.log ends with: {said[-1][:_LONGEST]}" if said else "slurm.log is empty"
