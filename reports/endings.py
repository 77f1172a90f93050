"""The bad end of a launch in words, in one short sentence, and the files that tell most of it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from reports.row import CheckRow
from runbook.records import Kind, LaunchEntry, LaunchStatus

# What was not finite, as the trainer ends: `loss nan on rank 1, gradient norm inf`.
_NUMBER = re.compile(r"(loss|gradient norm) (\S+?)(?: on ([^,]+(?:, \d+)*))?(?=,|$)")
_STEP = re.compile(r"\bat step (\d+)")
_WRITTEN = {"nan": "NaN", "inf": "infinite"}
# An end that does not say so itself begins with these words.
_WORDS = {
    LaunchStatus.CRASHED: "crashed: ",
    LaunchStatus.CONFIG_ERROR: "the trainer refuses this config: ",
    LaunchStatus.ENVIRONMENT_ERROR: "the trainer cannot run on this machine: ",
    LaunchStatus.HARDWARE_ERROR: "hardware error: ",
    LaunchStatus.OUT_OF_MEMORY: "out of memory: ",
    LaunchStatus.PREEMPTED: "ended from outside: ",
}
# The files that tell most of an end, by parts of their names; `{}` is the culprit's rank.
_TELLING = {
    LaunchStatus.HUNG: ("stackdump_rank{}_", "incident.json", "console.log", "flight_rank{}"),
    LaunchStatus.TIMED_OUT: ("training.csv", "stackdump_rank", "console.log"),
    LaunchStatus.NON_FINITE: ("training.csv", "incident.json", "console.log"),
    LaunchStatus.HARDWARE_ERROR: ("kernel_log.json", "incident.json", "console.log"),
    LaunchStatus.HALTED: (".anomaly_type", "anomalies.jsonl", "console.log"),
}
_OF_A_CRASH = ("console.log", "stackdump_rank{}_", "incident.json")
_OF_A_DESYNC = ("flight_rank", "incident.json", "console.log")


def headline_of(entry: LaunchEntry | None, launches: Sequence[str]) -> str:
    """The sentence for the launch shown, of those that ended alike; empty where none fits."""
    if entry is None:
        return ""
    if entry.result.status is LaunchStatus.HUNG:
        return _hang(entry)
    if entry.result.status is LaunchStatus.NON_FINITE:
        return _divergence(entry, launches)
    return ""


def _hang(entry: LaunchEntry) -> str:
    result, steps = entry.result, _STEP.findall(entry.result.cause)
    if result.culprit_rank is None or not steps:
        return ""
    both = result.attempts == len(steps) > 1
    again = ", in both attempts" if both and len(set(steps)) == 1 else ""
    return f"Rank {result.culprit_rank} hung at step {steps[-1]}{again}."


def _divergence(entry: LaunchEntry, launches: Sequence[str]) -> str:
    found, steps = seen_non_finite(entry.result.cause), _STEP.findall(entry.result.cause)
    if not found or not steps:
        return ""
    ((what, value, ranks),) = found
    where = f" on {ranks}" if ranks else ""
    phases = {name.partition("/")[0] for name in launches}
    spread = f" ({len(phases)} phases, one cause)" if len(phases) > 1 else ""
    return f"Training diverged at step {steps[0]}: the {what} is {_WRITTEN[value]}{where}{spread}."


def seen_non_finite(cause: str) -> list[tuple[str, str, str]]:
    """What a launch saw that was not finite: the number, NaN or infinite, and on which ranks.

    The step is not looked at: one fault ends launches of other settings at other steps. A gradient
    norm follows from a loss that is not finite, so it counts only where the loss was finite.
    """
    found = [
        (what, value.lstrip("+-"), ranks)
        for what, value, ranks in _NUMBER.findall(cause)
        if value.lstrip("+-") in _WRITTEN
    ]
    return found[:1]


def how_it_ended(entry: LaunchEntry) -> str:
    """What the launch said last, or the kind of its end."""
    result = entry.result
    cause = result.cause or result.status.value.replace("_", " ")
    return f"{_WORDS.get(result.status, '')}{cause}"


def telling(rows: Sequence[CheckRow], launch: LaunchEntry | None) -> tuple[str, ...]:
    """The paths of evidence, those that tell most of this end first."""
    if launch is None:
        return rows[0].evidence
    result, folder = launch.result, f"{launch.launch.run_dir}/"
    found = [*result.evidence, *(path for row in rows for path in row.evidence)]
    paths = [path for path in dict.fromkeys(found) if path.startswith(folder)]
    words = _OF_A_DESYNC if result.kind is Kind.DESYNC else _TELLING.get(result.status, _OF_A_CRASH)
    culprit = "" if result.culprit_rank is None else str(result.culprit_rank)
    parts = [part.replace("{}_" if not culprit else "{}", culprit) for part in words]

    def place(path: str) -> int:
        name = path.rpartition("/")[2]
        return next((i for i, part in enumerate(parts) if name.startswith(part)), len(parts))

    return tuple(sorted(paths, key=place)) or rows[0].evidence
