"""What counts as a proof: a toggle that is shown to have done something, a test that has run.

Nothing is concluded from a toggle that did nothing, and a test that was skipped or not collected
has not passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from nsa.contract import INSTEAD, proof_text
from nsa.toggles import TOGGLES, meaning
from phases.kit.case import Case
from phases.kit.finding import (
    Finding,
    ending,
    failed,
    incomplete,
    invalid,
    missing,
    passed,
    skipped,
)
from phases.kit.measure import in_file
from runbook.records import LaunchStatus, Measurement, Outcome, Reason
from runbook.records.evidence import JUnitCase, JUnitReport, LaunchEvidence

# Toggles that switch logging, watching or limits; their absence changes no number.
PASSIVE = frozenset(
    {
        "NSA_TB_DISABLE",
        "NSA_DISABLE_CSV_LOGS",
        "NSA_DISABLE_AUX_STATS",
        "NSA_HEARTBEAT_EVERY",
        "NSA_MEM_DUMP_EVERY",
        "NSA_PG_TIMEOUT_MIN",
    }
)


def toggles_in_force(env: Mapping[str, str]) -> dict[str, str]:
    """The trainer toggles of a launch that must prove themselves."""
    return {
        name: value
        for name, value in env.items()
        if name in TOGGLES and TOGGLES[name].reader == "trainer" and name not in PASSIVE
    }


# What pytest returns where it ran all tests and some failed.
_TESTS_FAILED = 1


def effect_problem(
    launch: LaunchEvidence, toggle: str, value: str, *, arm: str | None = None
) -> str:
    """Why this toggle is not proven to have taken effect, or an empty string.

    Proven means: at least one rank reports it, and no report says otherwise.
    """
    where = f" in arm {arm}" if arm else ""
    reports = launch.effects(toggle, arm=arm)
    # Two spellings may mean the same: `50` and `50.0`, `1` and `True`.
    wanted = meaning(toggle, {toggle: value})
    found = [one for one in reports if meaning(toggle, {toggle: str(one.value)}) == wanted]
    if not found:
        others = sorted({effect.value for effect in reports})
        seen = f"; reported for {', '.join(others)}" if others else ""
        return f"{toggle}={value}{where}: no proof that it took effect{seen}"
    refused = [effect for effect in found if effect.took_effect is False]
    if refused:
        ranks = [
            one.rank for one in launch.ranks if any(it is r for it in one.effects for r in refused)
        ]
        # One rank alone may run another path: its own file says so.
        of_rank = f" on rank {', '.join(map(str, ranks))}" if len(ranks) < len(launch.ranks) else ""
        told = proof_text(refused[0].evidence)
        return f"{toggle}={value}{where}: did nothing{of_rank} ({told})"
    if not any(effect.took_effect for effect in found):
        return f"{toggle}={value}{where}: the trainer cannot tell whether it took effect"
    return ""


def slow_way(launch: LaunchEvidence, toggle: str) -> str:
    """What ran, and why, where a toggle left the choice to the trainer and the fast way did not
    run; an empty string where it did.
    """
    told = [one.evidence for one in launch.effects(toggle) if isinstance(one.evidence, Mapping)]
    why = dict.fromkeys(str(evidence[INSTEAD]) for evidence in told if INSTEAD in evidence)
    return f"{toggle}=auto is {'; '.join(why)}" if why else ""


def report_of(case: Case, launch: str) -> JUnitReport:
    """The JUnit file of a launch that ended by itself; raises where there is none.

    pytest ends with 1 where tests failed, which the report tells better. One that was ended or
    died is no evidence, even if the report of all its tests lies there already.
    """
    found = case.launch(launch)
    by_itself = found.result.ok or found.result.exit_code == _TESTS_FAILED
    if found.junit is not None and by_itself:
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
    if any(test.status == "passed" and not test.properties.get("device") for test in tests):
        return invalid(
            Reason.NOT_PLAUSIBLE,
            f"the tests of {what} passed on a device that {report.path} does not name",
            evidence=(report.path,),
            topic="unnamed_device",
        )
    devices = {test.properties.get("device", "") for test in tests} - {""}
    elsewhere = sorted(device for device in devices if not device.startswith("cuda"))
    if case.profile.has_gpu and elsewhere:
        reason = f"the tests of {what} ran on {', '.join(elsewhere)}, not on the GPU"
        return invalid(
            Reason.WRONG_ENVIRONMENT,
            reason,
            evidence=(report.path,),
            topic="test_device",
            follows="preflight.cuda",
        )
    if broken := broken_tests(tests):
        text = "; ".join(f"{test.name}: {_first_line(test.message)}" for test in broken)
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


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


def _count(report: JUnitReport, name: str, value: int, *, n: int) -> Measurement:
    return in_file(report.path, report.sha256, name, float(value), "tests", n=n)
