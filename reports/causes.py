"""Causes: what went wrong, once each, with every row that only follows from it.

One NaN leaves a dozen rows without evidence, and a machine that preflight refused leaves eight
phases that did not run. Each is one fact. Which row follows from which launch, check or stop is in
the record (`Check.follows`, `LaunchResult.follows`), written where it was known; here the threads
are followed to their ends. Ends of the same fault, in several launches or phases, are one cause:
the same kind of end in the same words, apart from where it was. Whatever is not known to be the
same stays apart, because a hidden fault is worse than a long list.

What to do about a cause is a fact of the run too: what a person set, what the judges found in the
evidence. Nothing here knows a kind of failure by its name.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from reports.text import check_value, limit_text
from runbook.config.precedence import SHELL, Given, given
from runbook.errors import how_many, listed
from runbook.records import (
    THE_RUN,
    Check,
    Kind,
    LaunchEntry,
    LaunchStatus,
    Outcome,
    Reason,
    RunRecord,
)
from runbook.records.invocation import edited
from runbook.records.launch import RESUME_FLAG
from runbook.records.outcome import STEP

_SHOWN_PATHS = 3
_SHOWN_ROWS = 3
# Faults of the machine or the settings: what else such a launch shows is no fault of the trainer.
_OUTSIDE = (
    LaunchStatus.CONFIG_ERROR,
    LaunchStatus.ENVIRONMENT_ERROR,
    LaunchStatus.HARDWARE_ERROR,
)
# Nothing is wrong with what was ended so: it goes on.
_CUT_OFF = (LaunchStatus.PREEMPTED, LaunchStatus.INTERRUPTED)
# No setting makes these.
_FROM_OUTSIDE = (*_CUT_OFF, LaunchStatus.HARDWARE_ERROR)
# Of these the rank is part of what happened, and how long it took is not.
_BY_RANK = (LaunchStatus.HUNG,)
# Rows of one fault by where their thread ends: a launch, a row, or words that are neither.
_Group = dict[str, list[Check]]
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
# How the names of the files begin that tell most of an end, after the culprit's stack.
_TELLING = (
    *("kernel_log.json", ".anomaly_type", "training.csv", "incident.json", "console.log"),
    "flight_rank",
)


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


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One thing that went wrong.

    `headline` says in one short sentence what failed, `title` where and with which numbers; they
    are the same where nothing shorter is known. `rows` are all rows that follow from it, `lead`,
    the one that shows it best, first. `evidence` has at most three paths, the most telling first.
    `rerun` is one command that reproduces it.
    """

    headline: str
    title: str
    lead: Check
    rows: tuple[Check, ...]
    evidence: tuple[str, ...]
    advice: Advice
    rerun: str
    launches: tuple[str, ...] = ()

    @property
    def steps(self) -> tuple[str, ...]:
        """What to do after the next command, which leaves out what was set by hand."""
        return self.advice.steps[1:] if self.advice.left_out else self.advice.steps

    @property
    def remedy(self) -> str:
        """What to try, in one line."""
        return STEP.join(self.advice.steps)

    @property
    def told(self) -> tuple[tuple[str, str], ...]:
        """What is said of it where there is no page, each text under its name."""
        advice = self.advice
        parts = (
            ("what", "" if self.title == self.headline else self.title),
            *(("why", text) for text in (*advice.likely, advice.seen)),
            ("rows", _listed(self.rows)),
            *(("see", path) for path in self.evidence),
            ("try", self.remedy),
            ("next", advice.command),
            ("rerun", "" if self.rerun == advice.command else self.rerun),
        )
        return tuple((name, text) for name, text in parts if text)

    @property
    def blocks(self) -> bool:
        """True if it keeps the run from GO."""
        return any(row.blocks for row in self.rows)


def _listed(rows: Sequence[Check]) -> str:
    """`26 checks: a.b, a.c, d.e and 23 more of a, d`."""
    more = rows[_SHOWN_ROWS:]
    phases = ", ".join(dict.fromkeys(row.phase for row in more))
    named = listed([row.id for row in rows], _SHOWN_ROWS)
    return f"{how_many(len(rows), 'check')}: {named}{f' of {phases}' if more else ''}"


def causes_of(record: RunRecord, problems: Sequence[Check]) -> tuple[Cause, ...]:
    """The causes of a run's problem rows, worst first; every row is in one at least."""
    book = _Book(record, problems)
    threads: _Group = {end: [] for end in book.bad_launches()}
    for row in problems:
        threads.setdefault(book.end_of(row), []).append(row)
    groups: dict[tuple[object, ...], _Group] = {}
    for end, rows in threads.items():
        groups.setdefault(book.fault(end), {})[end] = rows
    causes = map(book.cause, groups.values())
    order = {id(row): place for place, row in enumerate(problems)}
    return tuple(sorted(causes, key=lambda one: (not one.blocks, *_harm(one, order))))


def _harm(cause: Cause, order: Mapping[int, int]) -> tuple[int, int]:
    """The worst that follows from it, not what shows it: a wrong machine may make others fail."""
    rows = [row for row in cause.rows if row.blocks] or cause.rows
    return min((row.outcome.rank, order[id(row)]) for row in rows)


class _Book:
    """The record's launches and problem rows by name."""

    def __init__(self, record: RunRecord, problems: Sequence[Check]) -> None:
        self.record = record
        self.rows = {row.id: row for row in problems}
        self.launches: dict[str, LaunchEntry] = {
            entry.launch.id: entry for phase in record.phases for entry in phase.launches
        }
        self.remedies = _by_launch({one.name: one.remedies for one in record.phases})
        self.first_commands = _by_launch({one.name: one.first_commands for one in record.phases})
        settings = given(record.settings, record.sources, values_before(record))
        self.by_hand = tuple(one for one in settings if not one.as_in_profile)

    def end_of(self, row: Check) -> str:
        """Where the row's thread ends: the launch, the row's id or the words it follows from."""
        seen, end = {row.id}, row.follows or row.id
        while end not in seen:
            seen.add(end)
            entry, other = self.launches.get(end), self.rows.get(end)
            if entry is not None:
                end = entry.result.follows or end
            elif other is not None:
                end = other.follows or end
        # A fault that was found does not follow from what went well: two of them stay two.
        wrong = end in self.launches or end in self.rows
        return row.id if row.outcome == Outcome.FAIL and not wrong else end

    def bad_launches(self) -> list[str]:
        """Launches that ended badly in phases whose rows follow from such an end.

        A row tells of the worst launch alone, so another one's fault may have no row.
        """
        told = {row.phase for row in self.rows.values() if row.follows in self.launches}
        return [
            name
            for name, entry in self.launches.items()
            if not entry.result.ok
            and not entry.result.follows
            and entry.result.status is not LaunchStatus.NOT_RUN
            and entry.launch.phase in told
        ]

    def fault(self, end: str) -> tuple[object, ...]:
        """What makes two ends the same fault."""
        entry, row = self.launches.get(end), self.rows.get(end)
        if entry is not None and not self._cut_with_the_run(entry):
            return _fault_of_launch(entry)
        if row is None:
            return ("words", end if entry is None else THE_RUN)
        # Two questions that fail are two faults; no evidence for the same reason is one.
        what = row.id.partition(".")[2] if row.outcome == Outcome.FAIL else ""
        return ("row", what, row.outcome, row.code, _without_place(row.reason, self._names(row)))

    def _cut_with_the_run(self, entry: LaunchEntry) -> bool:
        return self.record.interrupted and entry.result.status is LaunchStatus.INTERRUPTED

    def _names(self, row: Check) -> list[str]:
        own = [e.launch.name for e in self.launches.values() if e.launch.phase == row.phase]
        return [*own, row.phase]

    def cause(self, group: _Group) -> Cause:
        """The cause of threads that end in the same fault."""
        launches = tuple(end for end in group if end in self.launches)
        rows = [row for of_end in group.values() for row in of_end]
        if not rows:  # only in the shadow of a worse launch of the same phase
            phase = launches[0].partition("/")[0]
            of_phase = (row for row in self.rows.values() if row.phase == phase)
            rows = [next(row for row in of_phase if row.follows in self.launches)]
        outside = any(self.launches[name].result.status in _OUTSIDE for name in launches)
        rows.sort(key=lambda row: _showing(row, group, outside=outside))
        lead = rows[0]
        launch = self._shown_launch(lead, launches)
        title = self._title(lead, group, launch)
        rerun = self._rerun(group, rows, launch)
        return Cause(
            headline=headline_of(launch, launches) or lead.title or title,
            title=title,
            lead=lead,
            rows=tuple(rows),
            evidence=telling(rows, launch)[:_SHOWN_PATHS],
            advice=self._advice(lead, launch, rerun),
            rerun=rerun,
            launches=launches,
        )

    def _advice(self, lead: Check, launch: LaunchEntry | None, rerun: str) -> Advice:
        """What to do; first of all without what a person set for this run alone.

        A setting changes launches, so it is no suspect where none has run, nor of an end that came
        from outside. Of what a machine was asked for, the evidence shows the likely cause.
        """
        where = launch.launch.id if launch else ""
        status = launch.result.status if launch else None
        remedy = self.remedies.get(where, lead.remedy)
        steps = tuple(remedy.split(STEP)) if remedy else ()
        if not rerun or status in _CUT_OFF or RESUME_FLAG in rerun.split():
            return Advice(likely=(), command=rerun, steps=steps)
        ran = {one.launch.phase for one in self.launches.values() if one.result.attempts}
        suspect = lead.phase in ran and lead.phase != "preflight" and status not in _FROM_OUTSIDE
        if suspect and self.by_hand:
            return self._without_settings(lead.clue, rerun, steps)
        of_machine = lead.phase == "preflight" and launch is None and lead.clue
        return Advice(
            likely=(lead.clue,) if of_machine else (),
            seen="" if of_machine else lead.clue,
            command=self.first_commands.get(where, lead.first_command) or rerun,
            steps=steps,
        )

    def _without_settings(self, clue: str, rerun: str, steps: tuple[str, ...]) -> Advice:
        """What was set by hand is left out first, and the remedy comes after that."""
        words = " ".join(f"--set {shlex.quote(one.text)}" for one in self.by_hand)
        first = f"first without {words}, which was set by hand"
        then = (f"if it comes back: {steps[0]}", *steps[1:]) if steps else ()
        return Advice(
            likely=tuple(_of_settings(self.by_hand)),
            seen=clue,
            command=without(rerun, self.by_hand),
            steps=(first, *then),
            left_out=self.by_hand,
        )

    def _shown_launch(self, lead: Check, launches: Sequence[str]) -> LaunchEntry | None:
        if not launches:
            return None
        return self.launches[lead.follows if lead.follows in launches else launches[0]]

    def _title(self, lead: Check, group: _Group, launch: LaunchEntry | None) -> str:
        if launch is not None:
            others = [end for end in group if end in self.launches and end != launch.launch.id]
            return f"{launch.launch.id}{_also(others)}: {how_it_ended(launch)}"
        if THE_RUN in group:
            signal = self.record.options.get("signal")
            return f"the run was interrupted by {signal}" if signal else "the run has not completed"
        others = [end for end in group if end in self.rows and end != lead.id]
        return f"{lead.id}{_also(others)}: {lead.reason}{_measured(lead)}"

    def _rerun(self, group: _Group, rows: Iterable[Check], launch: LaunchEntry | None) -> str:
        cut_off = launch is not None and launch.result.status in _CUT_OFF
        if THE_RUN in group or (cut_off and self.record.interrupted):
            return self.record.invocation.resume_line(self.record.run_id)
        return next((row.rerun for row in rows if row.rerun), "")


def _by_launch(texts: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """What phases say of their launches, by `phase/launch`."""
    return {f"{phase}/{name}": text for phase, of in texts.items() for name, text in of.items()}


def _fault_of_launch(entry: LaunchEntry) -> tuple[object, ...]:
    result = entry.result
    if result.status is LaunchStatus.NON_FINITE:
        return ("launch", result.status, seen_non_finite(result.cause))
    if result.status in _BY_RANK or result.kind is Kind.DESYNC:
        return ("launch", result.status, result.kind, result.culprit_rank)
    return ("launch", result.status, result.kind, _without_place(result.cause, ()))


def _without_place(text: str, names: Iterable[str]) -> str:
    """The words without the step, and without the launch or phase that they begin with."""
    for name in names:
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "", text)
    return re.sub(r"\bstep \d+", "step", text)


def _showing(row: Check, ends: Container[str], *, outside: bool) -> tuple[object, ...]:
    """The fault itself first, then rows that tell of it, those that decide and the worst first.

    Where a launch met a fault from `outside`, a row that says so comes before a failure.
    """
    direct = row.id in ends or row.follows in ends
    inner = outside and row.outcome != Outcome.INVALID
    rank = row.outcome.rank
    return (row.id not in ends, not direct, not row.blocks, inner, rank, row.code == Reason.NOT_RUN)


def _also(names: Sequence[str]) -> str:
    return f" (and {listed(names)})" if names else ""


def _measured(row: Check) -> str:
    """The value against its limit."""
    value, limit = check_value(row), limit_text(row)
    return f" ({value} against {limit})" if limit and value else ""


# -- what a person set ---------------------------------------------------------------------------


def values_before(record: RunRecord) -> dict[str, str]:
    """What the run's profile and its config set, as far as a person changed the config."""
    known = record.of_profile("env").items()
    variables = {n: str(one.get("value")) for n, one in known if isinstance(one, Mapping)}
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
    steps = _STEP.findall(entry.result.cause) if entry else ()
    if entry is None or not steps:
        return ""
    result, seen = entry.result, seen_non_finite(entry.result.cause)
    if result.status is LaunchStatus.HUNG and result.culprit_rank is not None:
        both = result.attempts == len(steps) > 1 and len(set(steps)) == 1
        again = ", in both attempts" if both else ""
        return f"Rank {result.culprit_rank} hung at step {steps[-1]}{again}."
    if result.status is LaunchStatus.NON_FINITE and seen:
        what, value, ranks = seen
        where = f" on {ranks}" if ranks else ""
        phases = {name.partition("/")[0] for name in launches}
        spread = f" ({len(phases)} phases, one cause)" if len(phases) > 1 else ""
        number = f"the {what} is {_WRITTEN[value]}{where}{spread}"
        return f"Training diverged at step {steps[0]}: {number}."
    return ""


def seen_non_finite(cause: str) -> tuple[str, str, str] | None:
    """What a launch saw that was not finite: the number, NaN or infinite, and on which ranks.

    The step is not looked at: one fault ends launches of other settings at other steps. A gradient
    norm follows from a loss that is not finite, so it counts only where the loss was finite.
    """
    for what, value, ranks in _NUMBER.findall(cause):
        if (number := value.lstrip("+-")) in _WRITTEN:
            return what, number, ranks
    return None


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
    culprit = "" if result.culprit_rank is None else f"{result.culprit_rank}_"
    parts = (f"stackdump_rank{culprit}", *_TELLING)

    def place(path: str) -> int:
        name = path.rpartition("/")[2]
        return next((i for i, part in enumerate(parts) if name.startswith(part)), len(parts))

    return tuple(sorted(paths, key=place)) or rows[0].evidence
