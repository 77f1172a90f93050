"""From a table of results to checks, contradictions and a verdict. Pure: no files, no clock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from runbook.records.invocation import Invocation
from runbook.records.measurement import TOKENS_PER_SECOND, Measurement, Record
from runbook.records.outcome import Check, Comparator, Outcome, Reason, Verdict, judge_run
from runbook.stats import Decided, meets_target
from runbook.stats.launches import MOST_SCALING
from runbook.tools.replay.models import PHASE_NAMES, ReplayFile, Result, Status
from runbook.tools.replay.rules_numbers import (
    NUMBER_RULES,
    arms_decision,
    efficiency,
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
    "preflight": ("preflight.sanity", "Were environment and sanity tests recorded?"),
    "sdpa_audit": ("sdpa_audit.completed", "Did the SDPA audit complete?"),
    "nvtx": ("nvtx.completed", "Did profiling show the selection ranges?"),
    "long_run": ("long_run.completed", "Did the long run complete?"),
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
        verdict: NO-GO if a required check fails, GO only if all pass, else INCOMPLETE.
    """
    checks = tuple(_checks(replay, path, sha256))
    required = [check.id for check in checks if check.required]
    found = tuple(item for rule in (*ROW_RULES, *NUMBER_RULES) for item in rule(replay))
    return ReplayRecord(
        title=replay.title,
        source=replay.source,
        claimed_verdict=replay.claimed_verdict,
        verdict=judge_run(checks, required),
        checks=checks,
        contradictions=found,
    )


def _checks(replay: ReplayFile, path: str, sha256: str) -> Iterator[Check]:
    for phase in PHASE_NAMES:
        if phase != "fineweb":
            yield from _phase_checks(replay, phase, path, sha256)


def _phase_checks(replay: ReplayFile, phase: str, path: str, sha256: str) -> Iterator[Check]:
    if phase in _PLAIN:
        yield _plain(replay, phase, *_PLAIN[phase])
    elif phase == "baseline":
        yield _throughput(replay, path, sha256)
    elif phase == "v2_parity":
        yield _plain(replay, phase, "v2_parity.parity", "Is selection v2 equal to v1?", speed=False)
        yield _plain(replay, phase, "v2_parity.faster", "Is selection v2 faster?", speed=True)
    elif phase == "single_gpu":
        yield _scaling(replay)
    else:
        yield _choice(replay, phase)


def _row(
    phase: str,
    name: str,
    question: str,
    outcome: Outcome,
    code: Reason,
    reason: str,
    **more: Any,
) -> Check:
    passed = outcome in (Outcome.PASS, Outcome.SKIPPED)
    return Check(
        id=name,
        phase=phase,
        question=question,
        outcome=outcome,
        code=code,
        reason=reason,
        remedy="" if passed else f"run the phase {phase} on that machine",
        rerun=Invocation(profile="auto").line([phase]),
        required=phase not in OPTIONAL_PHASES,
        **more,
    )


def _plain(
    replay: ReplayFile, phase: str, name: str, question: str, *, speed: bool | None = None
) -> Check:
    """Completed, nothing failed, nothing left out. `speed` takes only the speed tests' part."""
    table, status = replay.table(phase), replay.table(phase).status

    def mine(part: str) -> bool:
        return speed is None or speed == ("performance" in part)

    failed = [part for part in table.failed if mine(part)]
    missing = [part for part in table.not_run if mine(part)]
    if failed:
        what = f"{', '.join(failed)} failed"
        return _row(phase, name, question, Outcome.FAIL, Reason.TEST_FAILED, what)
    if status is not Status.COMPLETED:
        return _not_completed(phase, name, question, status)
    if missing:
        what = f"no result of {', '.join(missing)}"
        return _row(phase, name, question, Outcome.INCOMPLETE, Reason.NOT_RUN, what)
    return _row(phase, name, question, Outcome.PASS, Reason.OK, "the report says so")


def _not_completed(phase: str, name: str, question: str, status: Status) -> Check:
    outcome = Outcome.FAIL if status is Status.CRASHED else Outcome.INCOMPLETE
    reason = status.value.replace("_", " ")
    return _row(phase, name, question, outcome, _REASONS[status], reason)


def _throughput(replay: ReplayFile, path: str, sha256: str) -> Check:
    acceptance = replay.acceptance
    question = f"Does {acceptance.config} reach {acceptance.min_toks_per_s:g} tok/s?"
    lines = [line for line in replay.results("baseline") if line.config == acceptance.config]
    line = next((line for line in lines if line.span), None)
    if line is None or line.span is None:
        what = "only warm-up rows" if lines else "not measured on this config"
        outcome, code = Outcome.INCOMPLETE, Reason.TOO_FEW_SAMPLES
        return _row("baseline", "baseline.throughput", question, outcome, code, what)
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
    outcome, code, reason = _against_floor(replay, line, line.span)
    return _row(
        "baseline",
        "baseline.throughput",
        question,
        outcome,
        code,
        reason,
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
    if not (line.csv and line.window):
        return Outcome.INCOMPLETE, Reason.MISSING_ARTIFACT, f"{text}; no CSV file and window"
    if worst.outcome is Decided.PASS:
        return Outcome.PASS, Reason.OK, f"{text}; {line.csv}, {line.window}"
    return Outcome.INCONCLUSIVE, Reason.TOO_FEW_SAMPLES, f"{text}; {worst.reason}"


def _scaling(replay: ReplayFile) -> Check:
    question = "Does throughput scale with the devices?"
    found = efficiency(replay)
    if found is None:
        status = replay.table("single_gpu").status
        code = _REASONS.get(status, Reason.NOT_COMPARABLE)
        what = "no config was measured on one and on all devices"
        outcome = Outcome.INCOMPLETE
        return _row("single_gpu", "single_gpu.scaling", question, outcome, code, what)
    low, high, text = found
    reason = f"{text}: E = {low:.2f} to {high:.2f}"
    outcome, code = Outcome.INCONCLUSIVE, Reason.TOO_FEW_SAMPLES
    if low > MOST_SCALING:
        outcome, code = Outcome.INVALID, Reason.NOT_PLAUSIBLE
    elif (decision := paired_scaling(replay)) is not None:
        outcome, reason = decision.outcome.as_check, decision.reason
        code = _SCALING_REASONS[outcome]
    return _row("single_gpu", "single_gpu.scaling", question, outcome, code, reason)


def _choice(replay: ReplayFile, phase: str) -> Check:
    question = "Is the choice between the arms borne out?"
    name = f"{phase}.choice"
    status, table = replay.table(phase).status, replay.table(phase)
    if status is not Status.COMPLETED:
        return _not_completed(phase, name, question, status)
    rows = min((len(line.rows) for line in table.results), default=0)
    if rows < replay.window_rows and not all(line.launches for line in table.results):
        what = f"{rows} rows per arm, {replay.window_rows} are needed"
        outcome, code = Outcome.INCONCLUSIVE, Reason.TOO_FEW_SAMPLES
        return _row(phase, name, question, outcome, code, what)
    decision = arms_decision(table.results)
    # TIE is an answer too: then nothing but the configured value can be chosen.
    settled = decision.winner is not None or decision.outcome is Decided.TIE
    kept = next((line.arm for line in table.results if line.control), "")
    if settled and (decision.winner or kept) == table.chosen:
        return _row(phase, name, question, Outcome.PASS, Reason.OK, decision.reason)
    return _row(phase, name, question, Outcome.INCONCLUSIVE, Reason.UNDECIDED, decision.reason)
