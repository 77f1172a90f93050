"""The answer to one row's question, and what it is answered from: one phase's evidence.

The guards of a `Case` say what is missing instead of failing on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar

from nsa.contract import ENV_JSON, HEARTBEATS
from nsa.toggles import TOGGLES
from phases.kit.commands import environment
from phases.kit.limits import spec
from runbook.config.limits import Limit
from runbook.config.phase import PlanContext
from runbook.records import Kind, Launch, LaunchResult, LaunchStatus, Measurement, Outcome, Reason
from runbook.records.evidence import Fact, LaunchEvidence, PhaseEvidence, TrainingLog

if TYPE_CHECKING:
    from runbook.config.limits import LimitSpec
    from runbook.config.profile import Profile


T = TypeVar("T")


@dataclass
class Finding(Exception):
    """Outcome, closed reason code and a sentence; with the number and the limit if there is one.

    An answer returns it; a guard raises it where a row's question has none. `topic` names the
    playbook entry that fixes it; the row's own topic is the default. `follows` as in `Check`: a
    launch, another check, a phase, or what the machine does not have. So are `title` and `clue`.
    A number that a `limit` was held against names all its files as evidence, any other one the
    first.
    """

    outcome: Outcome
    code: Reason
    reason: str
    _: KW_ONLY
    measurement: Measurement | None = None
    limit: Limit | None = None
    evidence: Sequence[str] = ()
    topic: str = ""
    follows: str = ""
    title: str = ""
    clue: str = ""

    def __post_init__(self) -> None:
        files = self.measurement.sources if self.measurement else ()
        paths = [*self.evidence, *(one.path for one in (files if self.limit else files[:1]))]
        self.evidence = tuple(dict.fromkeys(filter(None, paths)))

    def __str__(self) -> str:
        return self.reason


# The answer is yes.
passed = partial(Finding, Outcome.PASS, Reason.OK)
# A fault of the thing under test.
failed = partial(Finding, Outcome.FAIL)
# Not comparable, not plausible, or the environment is wrong.
invalid = partial(Finding, Outcome.INVALID)
# No evidence: not run, or cut off.
incomplete = partial(Finding, Outcome.INCOMPLETE)
# Measured, but not decidable at the declared error rate.
inconclusive = partial(Finding, Outcome.INCONCLUSIVE)
# The question does not arise here; the reason says why.
skipped = partial(Finding, Outcome.SKIPPED)


def warned(reason: str, **more: Any) -> Finding:
    """Nothing is wrong enough to stop, but a person should read it."""
    return Finding(Outcome.PASS, Reason.WARNING, f"WARNING: {reason}", **more)


def listed(problems: Sequence[str], most: int = 20) -> str:
    """All problems in one line; of those of a thousand ranks the first ones, and a count."""
    more = len(problems) - most
    shown = "; ".join(problems[:most])
    return shown if more <= 0 else f"{shown}; and {more} more"


def missing(reason: str, *paths: str, follows: str = "") -> Finding:
    """To be raised where what a row is answered from is not there."""
    return incomplete(Reason.MISSING_ARTIFACT, reason, evidence=paths, follows=follows)


def whole(launch: LaunchEvidence, file: str, kind: str) -> None:
    """Raise INVALID where a part of this file could not be read."""
    if problems := [text for text in launch.problems if file in text]:
        raise invalid(Reason.DAMAGED_ARTIFACT, problems[0], evidence=(launch.path(kind),))


# (outcome, code, topic) of a launch that did not finish. A fault of the trainer is FAIL; what we
# cut off ourselves is missing evidence; a config that the trainer refuses is a wrong environment.
_ENDINGS: dict[LaunchStatus, tuple[Outcome, Reason, str]] = {
    LaunchStatus.CRASHED: (Outcome.FAIL, Reason.CRASH, "crash"),
    LaunchStatus.CONFIG_ERROR: (Outcome.INVALID, Reason.WRONG_ENVIRONMENT, "config"),
    LaunchStatus.ENVIRONMENT_ERROR: (Outcome.INVALID, Reason.WRONG_ENVIRONMENT, "environment"),
    LaunchStatus.HARDWARE_ERROR: (Outcome.INVALID, Reason.WRONG_ENVIRONMENT, "devices"),
    LaunchStatus.NON_FINITE: (Outcome.FAIL, Reason.NON_FINITE, "loss"),
    LaunchStatus.OUT_OF_MEMORY: (Outcome.FAIL, Reason.OUT_OF_MEMORY, "memory"),
    LaunchStatus.HALTED: (Outcome.FAIL, Reason.HALTED, "halted"),
    LaunchStatus.PREEMPTED: (Outcome.INCOMPLETE, Reason.INTERRUPTED, "preempted"),
    LaunchStatus.HUNG: (Outcome.FAIL, Reason.HANG, "stall"),
    LaunchStatus.TIMED_OUT: (Outcome.INCOMPLETE, Reason.TIMEOUT, "timeout"),
    LaunchStatus.SILENT: (Outcome.INCOMPLETE, Reason.MISSING_ARTIFACT, "silent"),
    LaunchStatus.INTERRUPTED: (Outcome.INCOMPLETE, Reason.INTERRUPTED, "interrupted"),
    LaunchStatus.NOT_RUN: (Outcome.INCOMPLETE, Reason.NOT_RUN, "not_run"),
}
# Its cause says the rest of such an end.
_SAID = {LaunchStatus.NON_FINITE: "ended"}
# What one status can stand for asks for different things.
_KINDS = {
    Kind.FROZEN: "frozen",
    Kind.DATA_STALL: "data",
    Kind.DESYNC: "desync",
    Kind.HOST_MEMORY: "host_memory",
    Kind.DISK_FULL: "disk",
    Kind.AT_EXIT: "at_exit",
    Kind.PARTED: "parted",
}


def ending(launch: LaunchEvidence) -> Finding:
    """What the end of a launch says: PASS if it finished; rows follow from any other end."""
    result = launch.result
    paths = (*result.evidence, launch.path("console"))
    name = launch.launch.name
    if result.ok:
        return passed(f"{name} finished in {result.duration_s:.0f} s", evidence=paths)
    outcome, code, topic = _ENDINGS[result.status]
    topic = _KINDS.get(result.kind, topic)
    if result.could_not_start:
        # The same words in each row of each such launch: one cause, told once.
        reason = f'the trainer cannot run here: "{result.cause}"'
    else:
        culprit = "" if result.culprit_rank is None else f", rank {result.culprit_rank}"
        cause = f": {result.cause}" if result.cause else ""
        how = _SAID.get(result.status, result.status.value.replace("_", " "))
        reason = f"{name} {how}{culprit}{cause}"
    clue, follows = _where_it_stopped(result), launch.launch.id
    return Finding(outcome, code, reason, evidence=paths, topic=topic, follows=follows, clue=clue)


def _where_it_stopped(result: LaunchResult) -> str:
    """Where the silent rank was, by its own stack."""
    if not result.stopped_at or result.culprit_rank is None:
        return ""
    return f"Rank {result.culprit_rank} stopped at {', called at '.join(result.stopped_at)}."


def lost_heartbeats(launch: LaunchEvidence) -> list[str]:
    """Heartbeat files that are not there, of ranks that the launcher saw end with exit code 0."""
    present = {rank.rank for rank in launch.ranks}
    return [
        f"{launch.launch.run_dir}/{HEARTBEATS.name(end.rank)}"
        for end in launch.result.ranks
        if end.code == 0 and end.rank not in present
    ]


def _lacking(log: TrainingLog, launch: Launch) -> list[str]:
    """Columns without which a log answers nothing; arms that take turns need those of blocks."""
    wanted = ["step", "loss", "toks_per_s", "tokens", "dt_s"]
    wanted += ["arm", "block", "warmup"] if launch.schedule is not None else []
    return [name for name in wanted if name not in log.frame]


def _impossible(log: TrainingLog) -> str:
    """The first value that no training step can have, or an empty string."""
    for column in ("dt_s", "tokens", "toks_per_s"):
        if column not in log.frame:
            continue
        values = log.frame[column].to_numpy(dtype=float)
        fine = (values > 0.0) & (values < math.inf)
        if not bool(fine.all()):
            row = int(fine.argmin())
            step = int(log.frame["step"].iloc[row])
            return f"{log.path}: {column} is {values[row]} at step {step}, which is impossible"
    return ""


def optional(read: Callable[[], T]) -> T | None:
    """What `read` returns, or None where there is no evidence for it."""
    try:
        return read()
    except Finding:
        return None


def gather(found: Iterable[T | None]) -> tuple[T, ...]:
    """Everything that is there."""
    return tuple(item for item in found if item is not None)


class Case:
    """What a row is judged from. Every getter raises a finding where there is nothing."""

    def __init__(self, *, phase: str, evidence: PhaseEvidence, context: PlanContext) -> None:
        self.phase = phase
        self.evidence = evidence
        self.context = context
        self.known_answers: dict[tuple[object, str], Any] = {}
        self._earlier: dict[str, Case] = {}

    @property
    def profile(self) -> Profile:
        """The profile that the run is judged by."""
        return self.context.profile

    def limit(self, named: str | LimitSpec) -> Limit:
        """A limit with the profile's value, or with that of the toggle that owns it.

        `named` as in `limits.yaml`; of a phase of another package it is the declaration.
        """
        declared = spec(named) if isinstance(named, str) else named
        if not declared.toggle:
            return self.profile.limit(declared)
        given = environment(self.context, self.phase).get(declared.toggle)
        value = TOGGLES[declared.toggle].default if given is None else given
        source = f"toggle {declared.toggle}" + ("" if given is not None else ", its default")
        return Limit(spec=declared, value=float(str(value)), source=source, gated=True)

    def gates_throughput(self, *limits: Limit) -> bool:
        """Do the profile's throughputs, and all of these limits, decide?"""
        return self.profile.throughput_gated and all(limit.gated for limit in limits)

    def launch(self, name: str) -> LaunchEvidence:
        """A launch that was started, however it ended.

        One that config or machine refused has no evidence for any row: it raises that cause.
        """
        found = self.evidence.launches.get(name)
        if found is None or found.result.status is LaunchStatus.NOT_RUN:
            self._refused_before(found)
            cause = f": {found.result.cause}" if found and found.result.cause else ""
            reason = f"not run{cause}" if cause else f"{name} was not run"
            follows = found.launch.id if found else f"{self.phase}/{name}"
            raise incomplete(Reason.NOT_RUN, reason, topic="not_run", follows=follows)
        if found.result.could_not_start:
            raise ending(found)
        return found

    def _refused_before(self, found: LaunchEvidence | None) -> None:
        """A launch that was not started because an equal one was refused has that one's cause."""
        for other in self.evidence.launches.values():
            why = other.result.cause
            if found and why and other.result.could_not_start and why in found.result.cause:
                raise ending(other)

    def fault_of(self, name: str) -> str:
        """The launch's id if it ended badly, so that what it left undone follows from that."""
        found = self.launch(name)
        return "" if found.result.ok else found.launch.id

    def completed(self, name: str) -> LaunchEvidence:
        """A launch that finished; else there is no evidence for the row that asks."""
        found = self.launch(name)
        end = ending(found)
        if end.outcome is not Outcome.PASS:
            reason = f"no evidence: {end.reason}"
            raise replace(end, outcome=Outcome.INCOMPLETE, reason=reason, measurement=None)
        return found

    def log(self, name: str, *, ended: bool = True, sane: bool = True) -> TrainingLog:
        """The training.csv of a launch: undamaged, and of a launch that ended well if `ended`.

        With `sane`, times, tokens and rates have to be finite and above zero, so that every
        statistic can be computed.
        """
        found = self.completed(name) if ended else self.launch(name)
        log = found.training
        if log is None or len(log.frame) == 0:
            own = found.launch.own
            where = "training.csv" if own is None else f"{own.log.path}: no line of it fits the map"
            reason = f"{name} wrote no step to {where}"
            raise missing(reason, found.path("console"), follows=self.fault_of(name))
        if log.damaged:
            reason = f"{log.path} is damaged: {'; '.join(log.problems) or 'rows do not parse'}"
            raise invalid(Reason.DAMAGED_ARTIFACT, reason, evidence=(log.path,))
        if lacking := _lacking(log, found.launch):
            reason = f"{log.path}: the header lacks {', '.join(lacking)}"
            raise invalid(Reason.DAMAGED_ARTIFACT, reason, evidence=(log.path,))
        broken = _impossible(log) if sane else ""
        if broken:
            raise invalid(Reason.NOT_PLAUSIBLE, broken, evidence=(log.path,))
        return log

    def env(self, name: str) -> dict[str, Any]:
        """The env.json of a launch."""
        found = self.launch(name)
        if found.env is not None:
            return dict(found.env)
        whole(found, ENV_JSON, "env")
        reason = f"{name} wrote no env.json"
        raise missing(reason, found.path("console"), follows=self.fault_of(name))

    def fact(self, name: str) -> Fact:
        """A fact of the preflight, whatever its value."""
        found = self.evidence.facts.get(name)
        if found is None and not self.evidence.facts:
            reason = f"{name} is not known: no phase of this run collects facts of the machine"
            topic = "plan_collects_nothing" if self.profile.plan else ""
            raise incomplete(Reason.NOT_RUN, reason, topic=topic)
        if found is None:
            raise missing(f"{name} was not collected on this machine")
        return found

    def known(self, name: str) -> tuple[Fact, Measurement]:
        """A fact that has a value."""
        found = self.fact(name)
        if found.value is None:
            reason = f"{name} is unknown: {found.note or 'no reason recorded'}"
            raise missing(reason, found.path, follows=found.note)
        measurement = Measurement(
            name=found.name,
            value=found.value,
            unit=found.unit,
            n=1,
            window=None,
            path=found.path,
            sha256=found.sha256,
            note=found.note,
        )
        return found, measurement

    def earlier(self, phase: str) -> Case:
        """The same of a phase that ran before in this run."""
        found = self.evidence.earlier.get(phase)
        if found is None:
            reason = f"the {phase} phase was not run in this run"
            raise incomplete(Reason.NOT_RUN, reason, follows=phase)
        if phase not in self._earlier:
            self._earlier[phase] = Case(phase=phase, evidence=found, context=self.context)
        return self._earlier[phase]


def once(answer: Callable[[Case, str], T]) -> Callable[[Case, str], T]:
    """The answer about one launch, worked out for the first row that asks and kept in the case.

    Nothing in a case changes, so every row would get the same. Raises as `answer` does.
    """

    @wraps(answer)
    def kept(case: Case, name: str) -> T:
        key = (answer, name)
        if key not in case.known_answers:
            case.known_answers[key] = answer(case, name)
        found: T = case.known_answers[key]
        return found

    return kept
