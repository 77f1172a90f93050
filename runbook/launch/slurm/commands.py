"""Slurm's own tools: submit a job, ask about it, end it. Only `key=value` words are parsed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runbook.launch.launcher_api import RefusedError
from runbook.process.start import run_tool

TOOLS = ("sbatch", "scontrol", "squeue", "scancel")
_TIMEOUT_S = 20.0
_WORD = re.compile(r"(\w[\w:/]*)=(\S*)")
# Slurm has done with a job in any of these; the first is the only good one.
OVER = (
    *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"),
    *("OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL", "REVOKED"),
)
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED")


class SlurmError(RefusedError):
    """Slurm refused, or does not answer; the message has its words."""


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


def missing_tools() -> list[str]:
    """The tools that are not installed here."""
    return [name for name in TOOLS if shutil.which(name) is None]


def submit(words: Sequence[str], script: str, environment: Mapping[str, str]) -> int:
    """Submit a batch script and return the job's number. Raises SlurmError with Slurm's words."""
    command = ["sbatch", "--parsable", *words, "--wrap", script]
    done = run_tool(command, timeout_s=_TIMEOUT_S, variables=environment, only=True)
    number = done.stdout.strip().split(";")[0]
    if not done.ok or not number.isdigit():
        said = " ".join(done.stderr.split()) or done.problem or done.stdout
        raise SlurmError(f"sbatch refused the job: {said}")
    return int(number)


def job_state(job_id: int) -> JobState | None:
    """The job's state; None if Slurm no longer knows it. Raises SlurmError without an answer."""
    done = run_tool(["scontrol", "--oneliner", "show", "job", str(job_id)], timeout_s=_TIMEOUT_S)
    if not done.ok:
        if "Invalid job id" in done.stderr:
            return None
        raise SlurmError(f"scontrol: {' '.join(done.stderr.split()) or done.problem}")
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
