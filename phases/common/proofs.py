"""Rows from JUnit files: a test that was skipped or not collected has not passed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nsa.contract import COMPRESSION_LINE
from phases.common.case import Case, ending
from phases.common.effects import effect_problem, proof_text
from phases.common.finding import (
    Finding,
    Unanswerable,
    failed,
    incomplete,
    invalid,
    passed,
    skipped,
)
from phases.common.measure import count_of, rank_value
from phases.common.training import first_problem
from runbook.records import LaunchStatus, Reason
from runbook.records.evidence import JUnitCase, JUnitReport

_TOGGLE = "NSA_DDP_COMPRESS"


def compression_active(case: Case, names: Sequence[str]) -> Finding:
    """PASS if every launch proves it and logs `[ddp] gradient compression enabled: TYPE`."""
    return first_problem(_active, case, names)


def _active(case: Case, name: str) -> Finding:
    launch = case.completed(name)
    wanted = launch.launch.env.get(_TOGGLE, "off")
    if wanted == "off":
        return skipped(Reason.NOT_ASKED_FOR, f"{name} was planned with {_TOGGLE}=off")
    line = f"{COMPRESSION_LINE}{wanted}"
    problems = [effect_problem(launch, _TOGGLE, wanted)]
    if not any(line in text for text in launch.console_lines):
        problems.append(f"the log has no line {line!r}")
    found = [problem for problem in problems if problem]
    paths = (launch.console_path, *(rank.path for rank in launch.ranks[:1]))
    if found:
        return invalid(Reason.NO_EFFECT, f"{name}: {'; '.join(found)}", evidence=paths)
    proof = next(effect for effect in launch.effects(_TOGGLE) if effect.took_effect)
    value = rank_value(launch.ranks[0], "gradient_compression", wanted)
    return passed(
        f"{line!r} logged; {proof_text(proof.evidence)}", measurement=value, evidence=paths
    )


def report_of(case: Case, launch: str) -> JUnitReport:
    """The JUnit file of a launch; raises where there is none.

    pytest ends with an error code for failing tests, which the report tells better: only a
    launch without a report counts as one that ended badly.
    """
    found = case.launch(launch)
    if found.junit is not None:
        return found.junit
    if found.result.ok or found.result.status is LaunchStatus.CRASHED:
        reason = f"{launch}: no readable JUnit file; {found.result.cause or 'no cause recorded'}"
        raise Unanswerable(
            incomplete(Reason.MISSING_ARTIFACT, reason, evidence=(found.console_path,))
        )
    end = ending(found)
    raise Unanswerable(incomplete(end.code, f"no evidence: {end.reason}", evidence=end.evidence))


def judge_cases(case: Case, launch: str, what: str, wanted: Callable[[JUnitCase], bool]) -> Finding:
    """PASS only if at least one such test ran and all of them passed."""
    report = report_of(case, launch)
    tests = [test for test in report.cases if wanted(test)]
    if not tests:
        reason = f"{launch}: no test of {what} was collected"
        return incomplete(Reason.NOTHING_COLLECTED, reason, evidence=(report.path,))
    broken = [test for test in tests if test.status in ("failed", "error")]
    if broken:
        text = "; ".join(f"{test.name}: {_first_line(test.message)}" for test in broken)
        value = count_of(report, "tests_failed", len(broken), n=len(tests))
        reason = f"{len(broken)} of {len(tests)} tests of {what} failed: {text}"
        return failed(Reason.TEST_FAILED, reason, measurement=value)
    left_out = [test for test in tests if test.status != "passed"]
    if left_out:
        return _skipped(left_out, tests, what, report.path)
    value = count_of(report, "tests_passed", len(tests), n=len(tests))
    plural = "" if len(tests) == 1 else "s"
    return passed(f"{len(tests)} test{plural} of {what} passed", measurement=value)


def _skipped(
    left_out: Sequence[JUnitCase], tests: Sequence[JUnitCase], what: str, path: str
) -> Finding:
    why = _first_line(left_out[0].message) or "no reason given"
    code = Reason.NEEDS_CUDA if "cuda" in why.lower() else Reason.NOTHING_COLLECTED
    reason = f"{len(left_out)} of {len(tests)} tests of {what} were skipped: {why}"
    return skipped(code, reason, evidence=(path,))


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""
