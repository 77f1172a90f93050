"""Rows from JUnit files: a test that was skipped or not collected has not passed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phases.common.case import Case, ending
from phases.common.finding import Finding, Unanswerable, failed, incomplete, passed, skipped
from phases.common.measure import count_of
from runbook.evidence import JUnitCase, JUnitReport
from runbook.records import LaunchStatus, Reason

__all__ = ["judge_cases", "report_of"]


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
