"""What a row is answered from: one phase's evidence, behind guards that say what is missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial, wraps
from typing import Any, TypeVar

from nsa.contract import ENV_JSON
from nsa.toggles import TOGGLES
from phases.kit import spec
from phases.kit.commands import environment
from phases.kit.finding import (
    Finding,
    ending,
    failed,
    incomplete,
    invalid,
    missing,
    passed,
    skipped,
    whole,
)
from phases.kit.measure import in_file
from runbook.config import Limit, LimitSpec, Profile
from runbook.config.registry import PlanContext
from runbook.records import LaunchStatus, Measurement, Outcome, Reason
from runbook.records.evidence import (
    Fact,
    JUnitCase,
    JUnitReport,
    LaunchEvidence,
    PhaseEvidence,
    TrainingLog,
)
from runbook.records.run import NODE_NAMES

T = TypeVar("T")


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

    def require_gpu(self, verb: str = "uses") -> None:
        """Raise that it is SKIPPED on a profile without GPUs."""
        if not self.profile.has_gpu:
            reason = f"profile {self.profile.name} {verb} no GPU"
            raise skipped(Reason.NEEDS_CUDA, reason)

    def require_ranks(self) -> None:
        """Raise that it is SKIPPED on a profile with one rank."""
        if self.profile.ranks < 2:
            raise skipped(Reason.NEEDS_GPUS, f"profile {self.profile.name} has one rank")

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

    def launch(self, name: str) -> LaunchEvidence:
        """A launch that was started, however it ended.

        One that config or machine refused has no evidence for any row: it raises that cause.
        """
        found = self.evidence.launches.get(name)
        if found is None or found.result.status is LaunchStatus.NOT_RUN:
            for other in self.evidence.launches.values():
                # One that was not started because an equal one was refused has that one's cause.
                why = other.result.cause
                if found and why and other.result.could_not_start and why in found.result.cause:
                    raise ending(other)
            cause = f": {found.result.cause}" if found and found.result.cause else ""
            reason = f"not run{cause}" if cause else f"{name} was not run"
            follows = found.launch.id if found else f"{self.phase}/{name}"
            raise incomplete(Reason.NOT_RUN, reason, topic="not_run", follows=follows)
        if found.result.could_not_start:
            raise ending(found)
        return found

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
        # Without these it answers nothing; arms that take turns need those of blocks.
        wanted = ["step", "loss", "toks_per_s", "tokens", "dt_s"]
        wanted += ["arm", "block", "warmup"] if found.launch.schedule is not None else []
        if lacking := [name for name in wanted if name not in log.frame]:
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
            nodes = self.evidence.facts.get(NODE_NAMES)
            # Where no node could be asked, that is the one thing to mend.
            unasked = "preflight.nodes" if nodes and nodes.value is None else ""
            raise missing(f"{name} was not collected on this machine", follows=unasked)
        return found

    def told(self, name: str) -> str | float | bool | None:
        """What a fact says; None where it is unknown, or was not collected."""
        found = self.evidence.facts.get(name)
        return None if found is None else found.value

    def known(self, name: str) -> Measurement:
        """A fact that has a value, as a measurement."""
        found = self.fact(name)
        if found.value is None:
            reason = f"{name} is unknown: {found.note or 'no reason recorded'}"
            raise missing(reason, found.path, follows=found.note)
        where = found.path, found.sha256
        return in_file(*where, found.name, found.value, found.unit, note=found.note)

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


# -- tests that a launch ran: one that was skipped or not collected has not passed -----------------

# What pytest returns where it ran all tests and some failed.
_TESTS_FAILED = 1


def report_of(case: Case, launch: str) -> JUnitReport:
    """The JUnit file of a launch that ended by itself; raises where there is none.

    pytest ends with 1 where tests failed, which the report tells better, and has to tell. One that
    was ended or died is no evidence, even if the report of all its tests lies there already.
    """
    found = case.launch(launch)
    some_failed = found.result.exit_code == _TESTS_FAILED
    by_itself = found.result.ok or some_failed
    if found.junit is not None and by_itself:
        if some_failed and not broken_tests(found.junit.cases):
            reason = f"{launch}: pytest ended with 1, and {found.junit.path} names no failed test"
            raise invalid(Reason.NOT_PLAUSIBLE, reason, evidence=(found.junit.path,))
        return found.junit
    if found.junit is None and (by_itself or found.result.status is LaunchStatus.CRASHED):
        reason = f"{launch}: no readable JUnit file; {found.result.cause or 'no cause recorded'}"
        raise missing(reason, found.path("console"), follows=case.fault_of(launch))
    end = ending(found)
    raise replace(end, outcome=Outcome.INCOMPLETE, reason=f"no evidence: {end.reason}")


def broken_tests(tests: Iterable[JUnitCase]) -> list[JUnitCase]:
    """Those that failed, or could not be run."""
    return [test for test in tests if test.status in ("failed", "error")]


def judge_cases(case: Case, launch: str, what: str, wanted: Callable[[JUnitCase], bool]) -> Finding:
    """PASS only if at least one such test ran, all of them passed, and on the profile's device.

    A test that passed on a device that it does not name proves nothing, on any machine.
    """
    report = report_of(case, launch)
    tests = [test for test in report.cases if wanted(test)]
    if not tests:
        reason = f"{launch}: no test of {what} was collected"
        return incomplete(Reason.NOTHING_COLLECTED, reason, evidence=(report.path,))
    unfit = partial(invalid, evidence=(report.path,))
    if any(test.status == "passed" and not test.properties.get("device") for test in tests):
        reason = f"the tests of {what} passed on a device that {report.path} does not name"
        return unfit(Reason.NOT_PLAUSIBLE, reason, topic="unnamed_device")
    devices = {test.properties.get("device", "") for test in tests} - {""}
    elsewhere = sorted(device for device in devices if not device.startswith("cuda"))
    if case.profile.has_gpu and elsewhere:
        reason = f"the tests of {what} ran on {', '.join(elsewhere)}, not on the GPU"
        follows = "preflight.cuda"
        return unfit(Reason.WRONG_ENVIRONMENT, reason, topic="test_device", follows=follows)
    if broken := broken_tests(tests):
        text = _told(broken)
        value = _count(report, "tests_failed", len(broken), n=len(tests))
        reason = f"{len(broken)} of {len(tests)} tests of {what} failed: {text}"
        return failed(Reason.TEST_FAILED, reason, measurement=value)
    left_out = [test for test in tests if test.status != "passed"]
    if left_out:
        why = _first_line(left_out[0].message) or "no reason given"
        code = Reason.NEEDS_CUDA if "cuda" in why.lower() else Reason.NOTHING_COLLECTED
        reason = f"{len(left_out)} of {len(tests)} tests of {what} were skipped: {why}"
        return skipped(code, reason, evidence=(report.path,))
    value = _count(report, "tests_passed", len(tests), n=len(tests))
    plural = "" if len(tests) == 1 else "s"
    return passed(f"{len(tests)} test{plural} of {what} passed", measurement=value)


def _told(broken: Iterable[JUnitCase]) -> str:
    """Each test once: its cases that failed, and what the first of them says."""
    told: dict[str, tuple[str, str]] = {}
    for test in broken:
        name, bracket, case = test.name.partition("[")
        cases, message = told.get(name, ("", _first_line(test.message)))
        told[name] = (f"{cases}, {bracket}{case}" if cases else test.name, message)
    return "; ".join(f"{cases}: {message}" for cases, message in told.values())


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


def _count(report: JUnitReport, name: str, value: int, *, n: int) -> Measurement:
    return in_file(report.path, report.sha256, name, float(value), "tests", n=n)
