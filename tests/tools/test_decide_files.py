"""Files that `runbook decide` is asked about: which columns it needs, which line is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runbook.errors import UsageError
from runbook.stats.decision import Decision
from runbook.tools.decide import QUESTIONS, read_table

PAIRS = ["25,0,100", "50,0,110", "25,1,101", "50,1,112", "25,2,99", "50,2,108"]


def ask(folder: Path, question: str, header: str, rows: list[str], **given: object) -> Decision:
    path = folder / "f.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    return QUESTIONS[question](read_table(path), given)


def refused(folder: Path, question: str, header: str, rows: list[str], **given: object) -> str:
    with pytest.raises(UsageError) as caught:
        ask(folder, question, header, rows, **given)
    return re.sub(r"\S*/f\.csv", "f.csv", str(caught.value))


def test_what_is_no_file_is_named_in_the_words_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_table(tmp_path)
    assert str(caught.value) == f"{tmp_path}: Is a directory"


def test_blank_lines_and_spaces_around_cells_are_nothing(tmp_path: Path) -> None:
    rows = ["", " , ,", *PAIRS, "", "25,3,x"]
    assert "f.csv line 11, column value: 'x'; allowed: finite numbers above 0" in refused(
        tmp_path, "best-arm", " arm ,block, value", rows
    )
    decision = ask(tmp_path, "best-arm", "arm,block,value", ["", *PAIRS, " , , "])
    assert (decision.winner, decision.n) == ("50", 3)


@pytest.mark.parametrize(
    ("question", "header", "says"),
    [
        ("best-arm", "arm,block,speed", "no column 'value'"),
        ("best-arm", "arm,block,tokens", "no column 'value'"),
        ("best-arm", "arm,tokens,dt_s", "no column 'block'"),
        ("faster", "a,c,d", "no column 'baseline'"),
        ("faster", "arm,block,tokens", "no column 'variant'"),
        ("non-inferiority", "arm,value,x", "no column 'baseline'"),
        ("target", "x,y,z", "needed: one row per launch"),
        ("steady", "x,y,z", "needed: one row per step, its seconds"),
        ("memory", "x,y,z", "needed: one row per step, memory"),
        ("scaling", "x,y,z", "needed: one row per pair of launches"),
    ],
)
def test_what_a_question_needs(tmp_path: Path, question: str, header: str, says: str) -> None:
    message = refused(tmp_path, question, header, ["1,2,3"], target=1.0, devices=2)
    assert says in message
    assert f"columns there: {header.replace(',', ', ')}" in message
    if question in ("faster", "non-inferiority"):
        assert "(one row per round), or arm,block,value, or a training.csv" in message


def test_blocks_may_have_names(tmp_path: Path) -> None:
    named = [row.replace(",0,", ",z,").replace(",1,", ",y,") for row in PAIRS]
    decision = ask(tmp_path, "best-arm", "arm,block,value", named)
    assert decision == ask(tmp_path, "best-arm", "arm,block,value", PAIRS)
    assert "line 2, column block: ' '; allowed: a name" in refused(
        tmp_path, "best-arm", "arm,block,value", ["25, ,100", *PAIRS]
    )


def test_a_comparison_has_two_arms_and_a_baseline(tmp_path: Path) -> None:
    long = ("arm,block,value", PAIRS)
    three = [*PAIRS, "100,0,90", "100,1,90", "100,2,90"]
    assert "f.csv: arms 25, 50, 100; exactly two can be compared" in refused(
        tmp_path, "faster", long[0], three, baseline="25"
    )
    assert "no arm '26'; arms: 25, 50" in refused(tmp_path, "faster", *long, baseline="26")
    assert "f.csv does not say which arm is the baseline" in refused(tmp_path, "faster", *long)
    named = [row.replace("25,", "baseline,") for row in PAIRS]
    found = ask(tmp_path, "non-inferiority", long[0], named)
    assert found.estimate == ask(tmp_path, "non-inferiority", *long, baseline="25").estimate
    assert found.estimate is not None and found.estimate > 1.05


def test_options_reach_the_decision(tmp_path: Path) -> None:
    wide = ("baseline,variant", ["100,97.00", "101,98.01", "99,95.99", "100,97.01"])
    assert ask(tmp_path, "non-inferiority", *wide).outcome == "DROP"
    assert ask(tmp_path, "non-inferiority", *wide, margin=0.05).outcome == "KEEP"
    asked = {
        "best-arm": ("arm,block,value", PAIRS),
        "non-inferiority": wide,
        "faster": ("a,b", ["2,1", "2.1,1", "2.2,1"]),
        "scaling": ("t1,tN", ["100,190", "101,191", "99,189"]),
        "target": ("value", ["40", "41", "42"]),
    }
    published = {"best-arm": 0.01, "non-inferiority": 0.05, "faster": 0.01, "scaling": 0.01,
                 "target": 0.05}  # fmt: skip
    more = {"scaling": {"devices": 2}, "target": {"target": 38.0}}
    for question, file in asked.items():
        given = more.get(question, {})
        assert ask(tmp_path, question, *file, **given).error_rate == published[question]
        assert ask(tmp_path, question, *file, error=0.2, **given).error_rate == 0.2
    faster = ask(tmp_path, "faster", "variant,baseline", ["2,1", "2.1,1", "2.2,1"])
    assert (faster.outcome, faster.error_rate) == ("PASS", 0.01)


@pytest.mark.parametrize(("rows", "refuses"), [(9, False), (10, True)])
def test_ten_times_that_were_measured_are_not_all_equal(
    tmp_path: Path, rows: int, refuses: bool
) -> None:
    equal = ["0.5"] * rows
    if refuses:
        assert f"column dt_s is 0.5 in each of {rows} rows" in refused(
            tmp_path, "steady", "dt_s", equal
        )
        equal[4] = "0.6"
    assert ask(tmp_path, "steady", "dt_s", equal).outcome == "INCONCLUSIVE"


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([0, 2, 4], ""),
        ([5], ""),
        ([-1, 0, 1], "line 2, column step: '-1'; allowed: whole numbers from 0"),
        ([1.5, 2.5], "line 2, column step: '1.5'; allowed: whole numbers from 0"),
        ([1, 2, 2], "line 4, column step: 2 after 2; allowed: rising steps of one run;"),
        (
            [1, 2, 3, 5],
            "line 5, column step: 5 after 3; allowed: rising steps of one run, none missing;",
        ),
        ([1, 3, 2, 9], "line 4, column step: 2 after 3; allowed: rising steps of one run;"),
    ],
)
def test_the_steps_of_one_run_rise_by_the_same(
    tmp_path: Path, steps: list[float], says: str
) -> None:
    rows = [f"{step},{0.5 + at / 100}" for at, step in enumerate(steps)]
    if says:
        message = refused(tmp_path, "steady", "step,dt_s", rows)
        assert says in message
        assert ("two runs in one file" in message) is says.endswith("run;")
        assert ("rows without a gap" in message) is says.endswith("missing;")
    else:
        ask(tmp_path, "steady", "step,dt_s", rows)


def test_the_first_step_of_another_workload_is_named(tmp_path: Path) -> None:
    rows = ["0.5,100", "0.6,100", "0.5,200", "0.4,300"]
    assert "line 4, column tokens: 200 after 100; allowed: the same tokens" in refused(
        tmp_path, "steady", "dt_s,tokens", rows
    )


def test_memory_may_be_read_from_step_0_on(tmp_path: Path) -> None:
    rows = [f"{step},{1000 + step % 2}" for step in range(40)]
    asked = {"project_to_step": 50.0, "limit": 2000.0}
    assert ask(tmp_path, "memory", "step,mem_mib", rows, **asked).outcome == "PASS"


def test_warm_up_is_no_time_of_a_block(tmp_path: Path) -> None:
    header = "arm,block,tokens,dt_s,warmup"
    rows = []
    for block in range(3):
        for arm, seconds in (("a", 1.0), ("b", 2.0)):
            rows += [f"{arm},{block},100,9,1", f"{arm},{block},100,9,2"]
            rows += [f"{arm},{block},100,{seconds + at},0" for at in range(2)]
    decision = ask(tmp_path, "best-arm", header, rows)
    assert (decision.winner, decision.n) == ("a", 3)
    assert decision.estimate == pytest.approx(5 / 3)
    assert decision.details["typical"] == pytest.approx({"a": 200 / 3, "b": 40.0})


@pytest.mark.parametrize(("bad", "more"), [(10, ""), (11, "and 1 more"), (13, "and 3 more")])
def test_ten_cells_that_cannot_be_read_are_named(tmp_path: Path, bad: int, more: str) -> None:
    message = refused(tmp_path, "target", "value", ["1", *["x"] * bad], target=1.0)
    assert message.count("column value: 'x'") == 10
    assert "line 12, " in message and "line 13, " not in message
    assert ("more" in message) is bool(more) and more in message
    rows = refused(tmp_path, "target", "value", ["1,2"] * bad, target=1.0)
    assert rows.count("2 cell(s), the header has 1") == min(bad, 11)


def test_a_file_without_a_header_or_with_a_column_twice(tmp_path: Path) -> None:
    assert "line 1: 1,2 are numbers; needed: a header line" in refused(
        tmp_path, "target", "1,2", ["3,4"], target=1.0
    )
    message = refused(tmp_path, "target", "b,a,b,value,a", ["1,2,3,4,5"], target=1.0)
    assert "line 1: column 'a' is there more than once" in message
    assert message.index("column 'a'") < message.index("column 'b'")
    assert "column 'value'" not in message
    assert "number" not in refused(tmp_path, "steady", "value,1", ["3,4"])
