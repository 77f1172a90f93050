"""From a table of results to checks, contradictions and a verdict. Pure: no files, no clock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from runbook.config.limits import IDLE_MFU
from runbook.records.measurement import TOKENS_PER_SECOND, Measurement, Record
from runbook.records.outcome import Check, Comparator, Outcome, Reason, Verdict, judge_run
from runbook.records.run import Invocation
from runbook.stats.decision import Decided
from runbook.stats.launches import MOST_SCALING, meets_target
from runbook.tools.replay.models import PHASE_NAMES, ReplayFile, Result, Status
from runbook.tools.replay.rules_numbers import (
    NUMBER_RULES,
    arms_decision,
    efficiency,
    mfu,
    paired_scaling,
)
from runbook.tools.replay.rules_rows import OPTIONAL_PHASES, ROW_RULES, Contradiction, rates

_REASONS = {
    Status.CUT_OFF: Reason.INTERRUPTED,
    Status.TIMED_OUT: Reason.TIMEOUT,
    Status.CRASHED: Reason.CRASH,
    Status.NOT_RUN: Reason.NOT_RUN,
}
_SCALING_REASONS = {
    Outcome.PASS: Reason.OK,
    Outcome.FAIL: Reason.BELOW_LIMIT,
    Outcome.INVALID: Reason.NOT_PLAUSIBLE,
    Outcome.INCONCLUSIVE: Reason.UNDECIDED,
}
# Check of each phase that only asks whether it completed.
_PLAIN = {
    "preflight": ("sanity", "Were environment and sanity tests recorded?"),
    "sdpa_audit": ("completed", "Did the SDPA audit complete?"),
    "nvtx": ("completed", "Did profiling show the selection ranges?"),
    "long_run": ("completed", "Did the long run complete?"),
}


class ReplayRecord(Record):
    """What a replayed report amounts to."""

    title: str
    source: str
    claimed_verdict: str
    verdict: Verdict
    checks: tuple[Check, ...]
    contradictions: tuple[Contradiction, ...]


def judge_replay(replay: ReplayFile, *, path: str, sha256: str) -> ReplayRecord:
    """Judge a report's own numbers by the rules of a run.

    Args:
        replay: the table.
        path: where it came from, the provenance of its numbers.
        sha256: digest of that file.

    Returns:
        Checks (one or two per phase), every contradiction with the rule it breaks, and the
        verdict: NO-GO if a required check or phase fails, GO only if all checks pass and nothing
        in the report contradicts another part of it, else INCOMPLETE.
    """
    checks = tuple(_checks(replay, path, sha256))
    required = [check.id for check in checks if check.required]
    found = tuple(item for rule in (*ROW_RULES, *NUMBER_RULES) for item in rule(replay))
    return ReplayRecord(
        title=replay.title,
        source=replay.source,
        claimed_verdict=replay.claimed_verdict,
        verdict=_verdict(judge_run(checks, required), found),
        checks=checks,
        contradictions=found,
    )


def _verdict(by_rows: Verdict, found: tuple[Contradiction, ...]) -> Verdict:
    """The rows' verdict, which no contradiction leaves a GO."""
    if any(item.outcome is Outcome.FAIL and item.phase not in OPTIONAL_PHASES for item in found):
        return Verdict.NO_GO
    return Verdict.INCOMPLETE if found and by_rows is Verdict.GO else by_rows


def _checks(replay: ReplayFile, path: str, sha256: str) -> Iterator[Check]:
    for phase in PHASE_NAMES:
        if phase in _PLAIN:
            yield _plain(replay, _Asked(phase, *_PLAIN[phase]))
        elif phase == "baseline":
            yield _throughput(replay, path, sha256)
        elif phase == "v2_parity":
            same = _Asked(phase, "parity", "Is selection v2 equal to v1?")
            yield _plain(replay, same, speed=False)
            quicker = _Asked(phase, "faster", "Is selection v2 faster?")
            yield _plain(replay, quicker, speed=True)
        elif phase == "single_gpu":
            yield _scaling(replay)
        elif phase != "fineweb":
            yield _choice(replay, phase)


class _Asked(NamedTuple):
    """A question to one phase of the report, and the row that answers it."""

    phase: str
    what: str
    question: str

    def answer(self, outcome: Outcome, code: Reason, reason: str, **more: Any) -> Check:
        passed = outcome in (Outcome.PASS, Outcome.SKIPPED)
        return Check(
            id=f"{self.phase}.{self.what}",
            phase=self.phase,
            question=self.question,
            outcome=outcome,
            code=code,
            reason=reason,
            remedy="" if passed else f"run the phase {self.phase} on that machine",
            rerun=Invocation(profile="auto").line([self.phase]),
            required=self.phase not in OPTIONAL_PHASES,
            **more,
        )

    def not_completed(self, status: Status) -> Check:
        outcome = Outcome.FAIL if status is Status.CRASHED else Outcome.INCOMPLETE
        return self.answer(outcome, _REASONS[status], status.value.replace("_", " "))


def _plain(replay: ReplayFile, asked: _Asked, *, speed: bool | None = None) -> Check:
    """Completed, nothing failed, nothing left out. `speed` takes only the speed tests' part."""
    table = replay.table(asked.phase)

    def mine(parts: tuple[str, ...]) -> str:
        return ", ".join(one for one in parts if speed is None or speed == ("performance" in one))

    if failed := mine(table.failed):
        return asked.answer(Outcome.FAIL, Reason.TEST_FAILED, f"{failed} failed")
    if table.status is not Status.COMPLETED:
        return asked.not_completed(table.status)
    if missing := mine(table.not_run):
        return asked.answer(Outcome.INCOMPLETE, Reason.NOT_RUN, f"no result of {missing}")
    return asked.answer(Outcome.PASS, Reason.OK, "the report says so")


def _throughput(replay: ReplayFile, path: str, sha256: str) -> Check:
    acceptance = replay.acceptance
    question = f"Does {acceptance.config} reach {acceptance.min_toks_per_s:g} tok/s?"
    asked = _Asked("baseline", "throughput", question)
    lines = [line for line in replay.results("baseline") if line.config == acceptance.config]
    line = next((line for line in lines if line.span), None)
    if line is None or line.span is None:
        what = "only warm-up rows" if lines else "not measured on this config"
        return asked.answer(Outcome.INCOMPLETE, Reason.TOO_FEW_SAMPLES, what)
    measured = Measurement(
        name="throughput",
        value=line.span[0],
        unit=TOKENS_PER_SECOND,
        n=max(len(line.after_first), len(line.launches), 1),
        window=None,
        path=path,
        sha256=sha256,
        note="lowest value that the report states",
    )
    return asked.answer(
        *_against_floor(replay, line, line.span),
        measurement=measured,
        comparator=Comparator.AT_LEAST,
        limit=acceptance.min_toks_per_s,
        limit_source=acceptance.source,
    )


def _against_floor(
    replay: ReplayFile, line: Result, span: tuple[float, float]
) -> tuple[Outcome, Reason, str]:
    """Of a range, the end that the answer must hold for: FAIL by the best, PASS by the worst."""
    floor = replay.acceptance.min_toks_per_s
    best = meets_target(line.launches or [span[1]], floor)
    worst = meets_target(line.launches or [span[0]], floor)
    text = f"{rates(span)} tok/s, floor {floor:g}"
    if best.outcome is Decided.FAIL:
        return Outcome.FAIL, Reason.BELOW_LIMIT, text
    share = mfu(replay, span[1], line.devices)
    if not IDLE_MFU <= share <= 1.0:
        return Outcome.INVALID, Reason.NOT_PLAUSIBLE, f"{text}; {share:.2%} of the machine's peak"
    if not (line.csv and line.window):
        return Outcome.INCOMPLETE, Reason.MISSING_ARTIFACT, f"{text}; no CSV file and window"
    if worst.outcome is Decided.PASS:
        return Outcome.PASS, Reason.OK, f"{text}; {line.csv}, {line.window}"
    return Outcome.INCONCLUSIVE, Reason.TOO_FEW_SAMPLES, f"{text}; {worst.reason}"


def _scaling(replay: ReplayFile) -> Check:
    asked = _Asked("single_gpu", "scaling", "Does throughput scale with the devices?")
    found = efficiency(replay)
    if found is None:
        code = _REASONS.get(replay.table("single_gpu").status, Reason.NOT_COMPARABLE)
        what = "no config was measured on one and on all devices"
        return asked.answer(Outcome.INCOMPLETE, code, what)
    low, high, text = found
    reason = f"{text}: E = {low:.2f} to {high:.2f}"
    if low > MOST_SCALING:
        return asked.answer(Outcome.INVALID, Reason.NOT_PLAUSIBLE, reason)
    if (decision := paired_scaling(replay)) is None:
        return asked.answer(Outcome.INCONCLUSIVE, Reason.TOO_FEW_SAMPLES, reason)
    outcome = decision.outcome.as_check
    return asked.answer(outcome, _SCALING_REASONS[outcome], decision.reason)


def _choice(replay: ReplayFile, phase: str) -> Check:
    asked = _Asked(phase, "choice", "Is the choice between the arms borne out?")
    table = replay.table(phase)
    if table.status is not Status.COMPLETED:
        return asked.not_completed(table.status)
    rows = min((len(line.rows) for line in table.results), default=0)
    if rows < replay.window_rows and not all(line.launches for line in table.results):
        what = f"{rows} rows per arm, {replay.window_rows} are needed"
        return asked.answer(Outcome.INCONCLUSIVE, Reason.TOO_FEW_SAMPLES, what)
    decision, wins = arms_decision(table.results)
    settled = decision.winner is not None or decision.outcome is Decided.TIE
    if settled and wins == table.chosen:
        return asked.answer(Outcome.PASS, Reason.OK, decision.reason)
    return asked.answer(Outcome.INCONCLUSIVE, Reason.UNDECIDED, decision.reason)
