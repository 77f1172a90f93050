"""Records refuse what would make a report unbelievable, and numbers have one spelling."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from reports.text import value_text
from runbook.records import (
    ArmSchedule,
    Check,
    Measurement,
    Outcome,
    Reason,
    Table,
    Verdict,
    Window,
    judge_run,
    thin_points,
)
from runbook.records.measurement import Scalar, json_ready, plain_number

DIGEST = "0" * 64


def measurement(**changes: Any) -> Measurement:
    fields: dict[str, Any] = {
        "name": "throughput",
        "value": 847.2,
        "unit": "tok/s",
        "n": 50,
        "window": Window(first_step=251, last_step=300),
        "path": "baseline/training.csv",
        "sha256": DIGEST,
        "stdev": 4.1,
    }
    return Measurement(**{**fields, **changes})


def check(**changes: Any) -> Check:
    fields: dict[str, Any] = {
        "id": "baseline.throughput",
        "phase": "baseline",
        "question": "Is it fast enough?",
        "measurement": measurement(),
        "limit": 39.0,
        "limit_source": "requirement B3",
        "outcome": Outcome.PASS,
        "code": Reason.OK,
        "reason": "847 >= 39",
    }
    return Check(**{**fields, **changes})


def test_a_measurement_prints_with_everything_needed_to_believe_it() -> None:
    wanted = "847.2 +- 4.1 tok/s (n=50, steps 251-300, baseline/training.csv)"
    assert str(measurement()) == wanted


@pytest.mark.parametrize("changes", [{"n": 0}, {"path": ""}, {"sha256": "Z" * 64}, {"window": 3}])
def test_a_measurement_without_a_receipt_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        measurement(**changes)
    with pytest.raises(ValidationError, match="before it begins"):
        Window(first_step=300, last_step=251)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"measurement": None}, "without a measurement"),
        ({"limit_source": ""}, "without its source"),
        ({"outcome": Outcome.FAIL}, "without saying what to do"),
        ({"id": "other.throughput"}, "does not begin with its phase"),
    ],
)
def test_a_check_that_could_mislead_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        check(**changes)


def test_a_schedule_with_an_arm_that_nobody_described_is_refused() -> None:
    with pytest.raises(ValidationError, match="without settings"):
        ArmSchedule(settings={"25": {}}, rounds=(("25", "50"),), steps=1, warmup_steps=0)
    both = ArmSchedule(
        settings={"a": {}, "b": {}}, rounds=(("a", "b"),) * 2, steps=20, warmup_steps=3
    )
    assert both.total_steps == 4 * 23


# Curves keep their dips and peaks, and records survive being stored.


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=900), st.integers(2, 60))
def test_thinning_keeps_order_extremes_and_only_real_points(ys: list[float], keep: int) -> None:
    xs = [float(index) for index in range(len(ys))]
    thin = thin_points(xs, ys, keep=keep)
    assert 1 <= len(thin) <= keep
    assert list(thin) == sorted(thin)
    assert set(thin) <= set(zip(xs, ys, strict=True))
    values = [y for _, y in thin]
    assert (min(values), max(values)) == (min(ys), max(ys))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_stored_number_that_is_none_comes_back_as_a_number(value: float) -> None:
    measured = Measurement(
        name="x", value=value, unit="", n=1, window=None, path="p", sha256="0" * 64
    )
    again = Measurement.model_validate_json(measured.model_dump_json())
    table = Table(title="t", columns=("a",), rows=((value,),))
    cell = Table.model_validate_json(table.model_dump_json()).rows[0][0]
    assert str(again.value) == str(value)
    assert str(cell) == str(value)


ROOT = Path(__file__).parents[2]
SHOWN = ("nsa", "runbook", "phases", "reports", "templates", "configs", "docs")
OTHER_SPELLINGS = re.compile(r"\b(toks/s|tokens/s)")


@pytest.mark.parametrize("folder", SHOWN)
def test_throughput_has_one_unit(folder: str) -> None:
    files = [
        path
        for suffix in ("*.py", "*.md", "*.yaml", "*.j2")
        for path in (ROOT / folder).rglob(suffix)
    ]
    wrong = [str(path) for path in files if OTHER_SPELLINGS.search(path.read_text("utf-8"))]
    assert wrong == []


@pytest.mark.parametrize(("value", "text"), [
    (math.nan, "NaN"),
    (-math.inf, "-Infinity"),
    (847.24, "847.2"),
    (12_345.6, "12346"),
    (12_345, "12345"),
    (True, "yes"),
    (None, "-"),
    ("2.13.0", "2.13.0"),
])  # fmt: skip
def test_a_number_has_one_spelling_everywhere(value: Scalar | None, text: str) -> None:
    """It was nan in a report, NaN in its JSON and -inf in the JSON of inspect."""
    assert plain_number(value) == text
    if value is None:
        return
    measured = Measurement(
        name="x", value=value, unit="", n=1, window=None, path="a.csv", sha256="0" * 64
    )
    assert str(measured) == f"{text} (n=1, a.csv)"
    assert value_text(measured) == text
    if isinstance(value, float) and not math.isfinite(value):
        assert json_ready({"rows": (value,)}) == {"rows": [text]}
        assert json.loads(measured.model_dump_json())["value"] == text


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
