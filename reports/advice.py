"""What is said of a cause: how a launch ended, what is likely behind it, and what to do.

Everything is a fact of the run: what a person set, what the judges found in the evidence. Nothing
here knows a kind of failure by its name.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from runbook.config.precedence import SHELL, Given, given
from runbook.errors import listed
from runbook.records import Check, Kind, LaunchEntry, LaunchStatus, RunRecord
from runbook.records.outcome import STEP
from runbook.records.run import edited

# More settings than this are counted.
_NAMED = 3
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


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What a reader does about one cause.

    `likely` are sentences, and `seen` is what the evidence shows of the cause. `command` is what to
    type next. `steps` are to be taken in their order. `left_out` are the settings that `command`
    lacks.
    """

    likely: tuple[str, ...]
    command: str
    steps: tuple[str, ...]
    seen: str = ""
    left_out: tuple[Given, ...] = ()


class Adviser:
    """Advice on the causes of one run."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record

    @cached_property
    def by_hand(self) -> tuple[Given, ...]:
        """The settings that a person gave and that are not as in the profile."""
        record = self.record
        found = given(record.settings, record.sources, values_before(record))
        return tuple(one for one in found if not one.as_in_profile)

    def on(
        self,
        *,
        clue: str,
        remedy: str,
        rerun: str,
        first: str,
        ran: bool,
        goes_on: bool,
        of_machine: bool = False,
    ) -> Advice:
        """Advice on a cause.

        `clue`, `remedy`, `rerun` and `first` are those of its check. `ran`: a launch of its phase
        was started, which settings may be to blame for. `goes_on`: it was cut off, and `rerun`
        continues it. `of_machine`: its check asks what the machine has, so that what the evidence
        shows is the likely cause.
        """
        steps = tuple(remedy.split(STEP)) if remedy else ()
        if goes_on or not rerun:
            return Advice(likely=(), command=rerun, steps=steps)
        settings = self.by_hand if ran else ()
        found = Advice(
            likely=tuple(_of_settings(settings)),
            seen=clue,
            command=first or rerun,
            steps=steps,
        )
        if settings:
            return _without_settings(found, rerun, settings)
        return replace(found, likely=(clue,), seen="") if of_machine and clue else found


def _without_settings(found: Advice, rerun: str, settings: tuple[Given, ...]) -> Advice:
    """What was set by hand is left out first, and the remedy comes after that."""
    words = " ".join(f"--set {shlex.quote(one.text)}" for one in settings)
    steps: tuple[str, ...] = (f"first without {words}, which was set by hand",)
    if found.steps:
        steps = (*steps, f"if it comes back: {found.steps[0]}", *found.steps[1:])
    return replace(
        found,
        command=without(rerun, settings),
        steps=steps,
        left_out=settings,
    )


def values_before(record: RunRecord) -> dict[str, str]:
    """What the run's profile and its config set, as far as a person changed the config."""
    env = record.profile_document.get("env")
    known = env if isinstance(env, Mapping) else {}
    variables = {n: str(one.get("value")) for n, one in known.items() if isinstance(one, Mapping)}
    return variables | record.config_before


def without(line: str, settings: Iterable[Given]) -> str:
    """The command without these settings, which may come from the shell that it is typed in."""
    dropped = list(settings)
    shorter = edited(line, without=[one.name for one in dropped])
    unset = [word for one in dropped if one.source == SHELL for word in ("-u", one.name)]
    return f"{shlex.join(['env', *unset])} {shorter}" if unset else shorter


def _of_settings(settings: tuple[Given, ...]) -> Iterator[str]:
    if len(settings) > _NAMED:
        yield f"{listed([one.text for one in settings])} were set by hand."
        return
    for one in settings:
        before = "" if one.before is None else f"; the {one.owner} has {one.before}"
        yield f"{one.text} was set by hand ({one.source}){before}."


# -- the bad end of a launch in words, and the files that tell most of it -------------------------


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
    cause = result.cause or result.status.words
    return f"{_WORDS.get(result.status, '')}{cause}"


def telling(rows: Sequence[Check], launch: LaunchEntry | None) -> tuple[str, ...]:
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
