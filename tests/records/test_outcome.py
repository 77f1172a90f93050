"""The verdict rule: GO is earned by every required row, and by nothing else."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runbook.records import Check, Outcome, Reason, Verdict, judge_run, outcome
from runbook.records.outcome import WORST_FIRST


@dataclass(frozen=True)
class Row:
    id: str
    outcome: Outcome
    code: Reason = Reason.NOT_ASKED_FOR
    left_out: bool = False


IDS = ("a.x", "b.y", "c.z")


@pytest.mark.parametrize("missing", IDS)
def test_a_required_row_that_vanished_is_never_go(missing: str) -> None:
    rows = [Row(name, Outcome.PASS) for name in IDS if name != missing]
    assert judge_run(rows, IDS) is Verdict.INCOMPLETE


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.PASS])
def test_any_other_outcome_of_a_required_row_is_not_go(outcome: Outcome) -> None:
    rows = [Row("a.x", outcome), Row("b.y", Outcome.PASS), Row("c.z", Outcome.PASS)]
    wanted = Verdict.NO_GO if outcome is Outcome.FAIL else Verdict.INCOMPLETE
    assert judge_run(rows, IDS) is wanted


def test_only_the_want_of_an_accepted_run_may_be_skipped() -> None:
    rows = [Row(name, Outcome.PASS) for name in IDS[:2]]
    for code in Reason:
        wanted = Verdict.GO if code is Reason.NO_ACCEPTED_RUN else Verdict.INCOMPLETE
        assert judge_run([*rows, Row("c.z", Outcome.SKIPPED, code)], IDS) is wanted
    failed = Row("c.z", Outcome.FAIL, Reason.NO_ACCEPTED_RUN)
    assert judge_run([*rows, failed], IDS) is Verdict.NO_GO


def test_a_row_that_is_not_required_does_not_decide() -> None:
    rows = [Row("a.x", Outcome.PASS), Row("b.y", Outcome.FAIL)]
    assert judge_run(rows, ["a.x"]) is Verdict.GO


def test_a_second_row_under_the_same_id_cannot_hide_a_failure() -> None:
    rows = [Row("a.x", Outcome.PASS), Row("a.x", Outcome.FAIL)]
    assert judge_run(rows, ["a.x"]) is Verdict.NO_GO


def test_a_profile_that_requires_nothing_proves_nothing() -> None:
    assert judge_run([Row("a.x", Outcome.PASS)], []) is Verdict.INCOMPLETE


@given(st.dictionaries(st.sampled_from(IDS), st.sampled_from(list(Outcome))))
def test_go_if_and_only_if_every_required_row_passed(outcomes: dict[str, Outcome]) -> None:
    rows = [Row(name, outcome) for name, outcome in outcomes.items()]
    all_passed = set(outcomes) == set(IDS) and set(outcomes.values()) == {Outcome.PASS}
    assert (judge_run(rows, IDS) is Verdict.GO) == all_passed


def test_all_that_was_asked_for_and_passed_is_a_partial_pass_and_never_go() -> None:
    passed, rest = Row("a.x", Outcome.PASS), Row("b.y", Outcome.SKIPPED, left_out=True)
    assert judge_run([passed, rest], ["a.x", "b.y"]) is Verdict.PARTIAL
    assert judge_run([passed, rest], ["a.x"]) is Verdict.GO


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        (Outcome.FAIL, Verdict.NO_GO),
        (Outcome.INVALID, Verdict.INCOMPLETE),
        (Outcome.INCOMPLETE, Verdict.INCOMPLETE),
        (Outcome.INCONCLUSIVE, Verdict.INCOMPLETE),
        (Outcome.SKIPPED, Verdict.INCOMPLETE),
    ],
)
def test_what_was_asked_for_and_did_not_pass_is_no_partial_pass(
    outcome: Outcome, verdict: Verdict
) -> None:
    rest = Row("b.y", Outcome.SKIPPED, left_out=True)
    assert judge_run([Row("a.x", outcome), rest], ["a.x", "b.y"]) is verdict
    assert judge_run([Row("c.z", Outcome.PASS), rest], ["a.x", "b.y"]) is Verdict.INCOMPLETE


def test_nothing_that_was_asked_for_proves_nothing() -> None:
    assert judge_run([Row("b.y", Outcome.SKIPPED, left_out=True)], ["b.y"]) is Verdict.INCOMPLETE


def test_an_answer_outranks_being_left_out() -> None:
    rows = [Row("a.x", Outcome.PASS), Row("b.y", Outcome.SKIPPED, left_out=True)]
    assert judge_run([*rows, Row("b.y", Outcome.FAIL)], ["a.x", "b.y"]) is Verdict.NO_GO


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


def test_one_order_of_severity() -> None:
    """Three tables disagreed about whether SKIPPED or PASS is the worse."""
    assert sorted(Outcome, key=lambda outcome: outcome.rank) == list(WORST_FIRST)
    assert Outcome.FAIL.rank < Outcome.INVALID.rank < Outcome.INCOMPLETE.rank
    assert Outcome.INCONCLUSIVE.rank < Outcome.SKIPPED.rank < Outcome.PASS.rank


def test_nothing_else_orders_outcomes() -> None:
    owner = Path(outcome.__file__)
    root = owner.parents[2]
    for path in (
        p for room in ("runbook", "phases", "reports") for p in (root / room).rglob("*.py")
    ):
        text = "".join(path.read_text("utf-8").split())
        listed = re.search(r"FAIL[\"'],[\"']INVALID|Outcome\.FAIL(:\d+)?,Outcome\.INVALID", text)
        assert listed is None or path == owner, path
