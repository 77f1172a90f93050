"""One phase's evidence, with guards that say what is missing instead of failing on it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nsa.toggles import TOGGLES
from phases.common.commands import environment
from phases.common.finding import Finding, Unanswerable, failed, incomplete, invalid, passed
from runbook.config.limits import Limit
from runbook.records import LaunchStatus, Measurement, Outcome, Reason
from runbook.records.evidence import Fact, LaunchEvidence, PhaseEvidence, TrainingLog
from runbook.records.phase import PlanContext

if TYPE_CHECKING:
    from runbook.config.limits import LimitSpec
    from runbook.config.profile import PhaseSettings, Profile


# (outcome, code) of a launch that did not finish. A fault of the trainer is FAIL; what we
# cut off ourselves is missing evidence; a config that the trainer refuses is a wrong environment.
_ENDINGS: dict[LaunchStatus, tuple[Outcome, Reason]] = {
    LaunchStatus.CRASHED: (Outcome.FAIL, Reason.CRASH),
    LaunchStatus.CONFIG_ERROR: (Outcome.INVALID, Reason.WRONG_ENVIRONMENT),
    LaunchStatus.NON_FINITE: (Outcome.FAIL, Reason.NON_FINITE),
    LaunchStatus.OUT_OF_MEMORY: (Outcome.FAIL, Reason.OUT_OF_MEMORY),
    LaunchStatus.HALTED: (Outcome.FAIL, Reason.HALTED),
    LaunchStatus.PREEMPTED: (Outcome.INCOMPLETE, Reason.INTERRUPTED),
    LaunchStatus.HUNG: (Outcome.FAIL, Reason.HANG),
    LaunchStatus.TIMED_OUT: (Outcome.INCOMPLETE, Reason.TIMEOUT),
    LaunchStatus.SILENT: (Outcome.INCOMPLETE, Reason.MISSING_ARTIFACT),
    LaunchStatus.INTERRUPTED: (Outcome.INCOMPLETE, Reason.INTERRUPTED),
    LaunchStatus.NOT_RUN: (Outcome.INCOMPLETE, Reason.NOT_RUN),
}


def ending(launch: LaunchEvidence) -> Finding:
    """What the end of a launch says: PASS if it finished."""
    result = launch.result
    paths = (*result.evidence, launch.console_path)
    name = launch.launch.name
    if result.ok:
        return passed(f"{name} finished in {result.duration_s:.0f} s", evidence=paths)
    outcome, code = _ENDINGS[result.status]
    culprit = "" if result.culprit_rank is None else f", rank {result.culprit_rank}"
    cause = f": {result.cause}" if result.cause else ""
    reason = f"{name} {result.status.value.replace('_', ' ')}{culprit}{cause}"
    if outcome is Outcome.FAIL:
        return failed(code, reason, evidence=paths)
    if outcome is Outcome.INVALID:
        return invalid(code, reason, evidence=paths)
    return incomplete(code, reason, evidence=paths)


def fact_measurement(fact: Fact) -> Measurement | None:
    """A fact as a measurement; None where the machine has no such thing."""
    if fact.value is None:
        return None
    return Measurement(
        name=fact.name,
        value=fact.value,
        unit=fact.unit,
        n=1,
        window=None,
        path=fact.path,
        sha256=fact.sha256,
        note=fact.note,
    )


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


class Case:
    """What a row is judged from. Every getter raises Unanswerable where there is nothing."""

    def __init__(self, *, phase: str, evidence: PhaseEvidence, context: PlanContext) -> None:
        self.phase = phase
        self.evidence = evidence
        self.context = context

    @property
    def profile(self) -> Profile:
        """The profile that the run is judged by."""
        return self.context.profile

    @property
    def settings(self) -> PhaseSettings:
        """The profile's settings of this phase."""
        return self.profile.phases[self.phase]

    def limit(self, spec: LimitSpec) -> Limit:
        """A limit with the profile's value, or with that of the toggle that owns it."""
        if not spec.toggle:
            return self.profile.limit(spec)
        given = environment(self.context, self.phase).get(spec.toggle)
        value = TOGGLES[spec.toggle].default if given is None else given
        source = f"toggle {spec.toggle}" + ("" if given is not None else ", its default")
        return Limit(spec=spec, value=float(str(value)), source=source, gated=True)

    def launch(self, name: str) -> LaunchEvidence:
        """A launch that was started, however it ended."""
        found = self.evidence.launches.get(name)
        if found is None or found.result.status is LaunchStatus.NOT_RUN:
            cause = f": {found.result.cause}" if found and found.result.cause else ""
            raise Unanswerable(incomplete(Reason.NOT_RUN, f"{name} was not run{cause}"))
        return found

    def completed(self, name: str) -> LaunchEvidence:
        """A launch that finished; else there is no evidence for the row that asks."""
        found = self.launch(name)
        end = ending(found)
        if end.outcome is not Outcome.PASS:
            reason = f"no evidence: {end.reason}"
            raise Unanswerable(
                replace(end, outcome=Outcome.INCOMPLETE, reason=reason, measurement=None)
            )
        return found

    def log(self, name: str, *, whole: bool = True, sane: bool = True) -> TrainingLog:
        """The training.csv of a launch: undamaged, and of a launch that ended if `whole`.

        With `sane`, times, tokens and rates have to be finite and above zero, so that every
        statistic can be computed.
        """
        found = self.completed(name) if whole else self.launch(name)
        log = found.training
        if log is None or len(log.frame) == 0:
            raise Unanswerable(
                incomplete(
                    Reason.MISSING_ARTIFACT,
                    f"{name} wrote no step to training.csv",
                    evidence=(found.console_path,),
                )
            )
        if log.damaged:
            raise Unanswerable(
                invalid(
                    Reason.DAMAGED_ARTIFACT,
                    f"{log.path} is damaged: {'; '.join(log.problems) or 'rows do not parse'}",
                    evidence=(log.path,),
                )
            )
        broken = _impossible(log) if sane else ""
        if broken:
            raise Unanswerable(invalid(Reason.NOT_PLAUSIBLE, broken, evidence=(log.path,)))
        return log

    def env(self, name: str) -> dict[str, Any]:
        """The env.json of a launch."""
        found = self.launch(name)
        if found.env is not None:
            return dict(found.env)
        problems = [problem for problem in found.problems if "env.json" in problem]
        if problems:
            broken = invalid(Reason.DAMAGED_ARTIFACT, problems[0], evidence=(found.env_path,))
            raise Unanswerable(broken)
        paths = (found.console_path,)
        missing = incomplete(Reason.MISSING_ARTIFACT, f"{name} wrote no env.json", evidence=paths)
        raise Unanswerable(missing)

    def fact(self, name: str) -> Fact:
        """A fact of the preflight, whatever its value."""
        found = self.evidence.facts.get(name)
        if found is None:
            raise Unanswerable(
                incomplete(Reason.MISSING_ARTIFACT, f"{name} was not collected on this machine")
            )
        return found

    def known(self, name: str) -> tuple[Fact, Measurement]:
        """A fact that has a value."""
        found = self.fact(name)
        measurement = fact_measurement(found)
        if measurement is None:
            note = found.note or "no reason recorded"
            raise Unanswerable(
                incomplete(
                    Reason.MISSING_ARTIFACT, f"{name} is unknown: {note}", evidence=(found.path,)
                )
            )
        return found, measurement

    def earlier(self, phase: str) -> Case:
        """The same of a phase that ran before in this run."""
        found = self.evidence.earlier.get(phase)
        if found is None:
            raise Unanswerable(
                incomplete(Reason.NOT_RUN, f"the {phase} phase was not run in this run")
            )
        return Case(phase=phase, evidence=found, context=self.context)
