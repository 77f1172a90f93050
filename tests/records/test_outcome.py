"""The verdict rule: GO is earned by every required row, and by nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runbook.records import Check, Outcome, Reason, Verdict, judge_run


@dataclass(frozen=True)
class Row:
    id: str
    outcome: Outcome
    code: Reason = Reason.NOT_ASKED_FOR
    left_out: bool = False


IDS = ("a.x", "b.y", "c.z")
PASSED = Row("a.x", Outcome.PASS)
REST = Row("b.y", Outcome.SKIPPED, left_out=True)
LIMITS = dict.fromkeys(Outcome, Verdict.INCOMPLETE) | {Outcome.FAIL: Verdict.NO_GO}
CASES = {
    "a row that is not required does not decide": (
        [PASSED, Row("b.y", Outcome.FAIL)], ["a.x"], Verdict.GO,
    ),
    "a second row under the same id cannot hide a failure": (
        [PASSED, Row("a.x", Outcome.FAIL)], ["a.x"], Verdict.NO_GO,
    ),
    "a profile that requires nothing proves nothing": ([PASSED], [], Verdict.INCOMPLETE),
    "all that was asked for passed": ([PASSED, REST], ["a.x", "b.y"], Verdict.PARTIAL),
    "what was left out is not required": ([PASSED, REST], ["a.x"], Verdict.GO),
    "nothing that was asked for proves nothing": ([REST], ["b.y"], Verdict.INCOMPLETE),
    "a required row vanished beside what was left out": (
        [Row("c.z", Outcome.PASS), REST], ["a.x", "b.y"], Verdict.INCOMPLETE,
    ),
    "an answer outranks being left out": (
        [PASSED, REST, Row("b.y", Outcome.FAIL)], ["a.x", "b.y"], Verdict.NO_GO,
    ),
    **{
        f"{outcome} is no partial pass": ([Row("a.x", outcome), REST], ["a.x", "b.y"], verdict)
        for outcome, verdict in LIMITS.items() if outcome is not Outcome.PASS
    },
}  # fmt: skip


@pytest.mark.parametrize(("rows", "required", "verdict"), CASES.values(), ids=CASES)
def test_a_verdict(rows: list[Row], required: list[str], verdict: Verdict) -> None:
    assert judge_run(rows, required) is verdict


def test_only_the_want_of_an_accepted_run_may_be_skipped() -> None:
    rows = [Row(name, Outcome.PASS) for name in IDS[:2]]
    for code in Reason:
        wanted = Verdict.GO if code is Reason.NO_ACCEPTED_RUN else Verdict.INCOMPLETE
        assert judge_run([*rows, Row("c.z", Outcome.SKIPPED, code)], IDS) is wanted
    failed = Row("c.z", Outcome.FAIL, Reason.NO_ACCEPTED_RUN)
    assert judge_run([*rows, failed], IDS) is Verdict.NO_GO


@given(st.dictionaries(st.sampled_from(IDS), st.sampled_from(list(Outcome))))
def test_go_if_and_only_if_every_required_row_passed(outcomes: dict[str, Outcome]) -> None:
    """NO-GO if one failed; a row that vanished, or any other outcome, is no answer."""
    rows = [Row(name, outcome) for name, outcome in outcomes.items()]
    all_passed = set(outcomes) == set(IDS) and set(outcomes.values()) == {Outcome.PASS}
    wanted = Verdict.NO_GO if Outcome.FAIL in outcomes.values() else Verdict.INCOMPLETE
    assert judge_run(rows, IDS) is (Verdict.GO if all_passed else wanted)


def test_a_check_skipped_for_a_reason_of_its_own_is_not_left_out() -> None:
    given = {"id": "a.x", "phase": "a", "question": "?", "reason": "off", "outcome": "SKIPPED",
             "code": "not_asked_for"}  # fmt: skip
    assert not Check.model_validate(given).left_out
    assert Check.model_validate(given | {"follows": "a"}).left_out
    failed = given | {"follows": "a", "outcome": "FAIL", "remedy": "x"}
    assert not Check.model_validate(failed).left_out


def test_exit_codes_are_the_documented_ones() -> None:
    codes = {verdict.name: verdict.exit_code for verdict in Verdict}
    assert codes == {"GO": 0, "NO_GO": 1, "INCOMPLETE": 3, "PARTIAL": 4}
