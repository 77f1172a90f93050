"""Injected defects: the list fits the source, what counts as noticed, and a few for real."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planted import __main__ as planted
from benchmarks.planted.__main__ import EIGHT, HEALTHY, Bench, healthy, judge
from benchmarks.planted.copy import ROOT, AnchorError, Copy, Defect, Edit, broken_anchors, load_all
from runbook.config.load import load_profile
from runbook.config.registry import known_checks

DEFECTS = load_all()
BY_NAME = {defect.name: defect for defect in DEFECTS}
# Each needs one short launch, and each is noticed by another account.
QUICK = ("lr-0", "selected-branch-zero", "dt-halved", "rank-1-reads-rank-0s-data")
SOME = Defect(
    name="some",
    area="time",
    what="an example",
    edits=(Edit(path="nsa/step/numbers.py", old="wall = now", new="wall = 2 * now"),),
    phases=("baseline",),
    rows=("baseline.accounts", "baseline.oracle"),
    says=("sums to 0", "is off"),
)


def record(
    rows: Mapping[str, tuple[str, str]], verdict: str = "NO-GO", required: bool = True
) -> dict[str, Any]:
    """A run.json with these rows of the baseline: outcome and reason."""
    checks = [
        {"id": name, "outcome": outcome, "reason": reason, "remedy": None, "required": required}
        for name, (outcome, reason) in rows.items()
    ]
    return {"verdict": verdict, "phases": [{"name": "baseline", "checks": checks}]}


NOTICED = {
    "baseline.accounts": ("FAIL", "dt_s sums to 0.5"),
    "baseline.oracle": ("FAIL", "attention is off"),
    "baseline.completed": ("PASS", ""),
}


def test_every_defect_fits_the_source() -> None:
    assert broken_anchors(ROOT, [*DEFECTS, EIGHT]) == []


def test_there_are_enough_of_them_and_all_are_described() -> None:
    assert len(DEFECTS) >= 43
    known = set(known_checks(load_profile("cpu")))
    for defect in DEFECTS:
        assert defect.edits and defect.rows and defect.says and defect.what and defect.area
        assert {row.split(".")[0] for row in defect.rows} <= set(defect.phases)
    assert {row for defect in (*DEFECTS, EIGHT) for row in defect.rows} <= known


def test_the_shipped_tests_that_shall_notice_one_are_there() -> None:
    """A test that has another name now notices a defect in words that nobody waits for."""
    shipped = "".join(file.read_text() for file in (ROOT / "nsa" / "tests").glob("*.py"))
    named = {word for one in DEFECTS for text in one.says for word in re.findall(r"test_\w+", text)}
    assert len(named) > 50
    assert [word for word in sorted(named) if f"def {word}" not in shipped] == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [("no such text", "other", "0 times"), ("wall = now", "wall = (now", "would not be Python")],
)
def test_a_text_that_moved_is_an_error(old: str, new: str, problem: str) -> None:
    edits = (Edit(path="nsa/step/numbers.py", old=old, new=new),)
    (found,) = broken_anchors(ROOT, [replace(SOME, edits=edits)])
    assert found.startswith("some: nsa/step/numbers.py") and problem in found


@pytest.mark.parametrize(
    "rows",
    [
        dict.fromkeys(NOTICED, ("PASS", "")),
        {**NOTICED, "baseline.oracle": ("PASS", "")},
        {**NOTICED, "baseline.oracle": ("FAIL", "something else")},
        {"baseline.completed": ("FAIL", "crashed: sums to 0, is off")},
    ],
)
def test_it_is_noticed_by_every_row_for_its_reason_and_not_by_luck(
    rows: dict[str, tuple[str, str]],
) -> None:
    assert judge(SOME, record(NOTICED))[1:] == (list(SOME.says), True)
    assert not judge(SOME, record(rows))[2]
    assert not judge(SOME, record(NOTICED, required=False))[2]


@pytest.mark.parametrize(("remedy", "good"), [("clear the .*", True), ("other", False), ("", True)])
def test_a_remedy_that_is_named_has_to_be_given(remedy: str, good: bool) -> None:
    found = record(NOTICED)
    found["phases"][0]["checks"][0]["remedy"] = "clear the gradients"
    assert judge(replace(SOME, remedy=remedy), found)[2] is good


def test_the_unchanged_copy_has_to_pass() -> None:
    (none,) = healthy([SOME])
    assert judge(none, record({"baseline.accounts": ("PASS", "")}))[2]
    assert not judge(none, record(NOTICED))[2]


def test_all_at_once_is_no_go_and_at_least_six_are_named() -> None:
    reasons = (
        "did not move; read the same data; rank 1: 400 MiB; takes the loss at 64; "
        "dt_s sums to 0.500; no gradient reaches attention.k_cmp"
    )
    six = {"baseline.accounts": ("FAIL", reasons)}
    assert judge(EIGHT, record(six))[2]
    assert not judge(EIGHT, record(six, verdict="GO"))[2]
    five = {"baseline.accounts": ("FAIL", reasons.replace("did not move", ""))}
    assert not judge(EIGHT, record(five))[2]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    made = Copy(tmp_path_factory.mktemp("planted") / "copy")
    made.check(DEFECTS)
    return made


def test_a_copy_is_as_before_when_a_defect_is_over(copy: Copy) -> None:
    path = copy.root / SOME.edits[0].path
    before = path.read_bytes()
    with copy.injected(SOME.edits):
        assert b"wall = 2 * now" in path.read_bytes()
        inside = path.stat().st_mtime_ns
    assert path.read_bytes() == before
    assert path.stat().st_mtime_ns != inside  # or Python would take the compiled file
    with pytest.raises(AnchorError), copy.injected([*SOME.edits, *SOME.edits]):
        pass
    assert path.read_bytes() == before


def _ran(monkeypatch: pytest.MonkeyPatch, found: dict[str, Any]) -> list[str]:
    """The program's runs are replaced; the names of those that were asked for."""
    names: list[str] = []

    def run(_copy: Copy, defect: Defect, out: Path) -> dict[str, Any]:
        names.append(defect.name)
        out.mkdir(parents=True)
        passed = dict.fromkeys(NOTICED, ("PASS", ""))
        return record(passed, verdict="GO") if defect.name == HEALTHY else found

    monkeypatch.setattr(planted, "run", run)
    return names


def test_the_exit_code_says_whether_all_were_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = record({"baseline.gradients": ("FAIL", "12 groups did not move")})
    asked = _ran(monkeypatch, moved)
    words = ["--only", "lr-0", "--results"]
    for _ in range(2):  # the second time from what was kept
        assert planted.main([*words, str(tmp_path / "a")]) == 0
    assert asked == [HEALTHY, "lr-0"]
    _ran(monkeypatch, record({"baseline.gradients": ("PASS", "")}, verdict="GO"))
    assert planted.main([*words, str(tmp_path / "b")]) == 1
    assert f"| lr-0 | {BY_NAME['lr-0'].what} | nothing | NO |" in capsys.readouterr().out


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_defect_is_noticed_for_real(name: str, copy: Copy, tmp_path: Path) -> None:
    result = Bench(copy, tmp_path / "kept", tmp_path).result(BY_NAME[name])
    assert result.good, result


@pytest.mark.e2e
@pytest.mark.slow
def test_all_at_once_is_no_go_for_real(copy: Copy, tmp_path: Path) -> None:
    """The baseline alone names six of the eight; the leak on rank 1 takes a long run."""
    found = planted.run(copy, replace(EIGHT, phases=("baseline",)), tmp_path)
    rows, named, good = judge(EIGHT, found)
    assert good, (found["verdict"], named)
    wanted = {row for row in EIGHT.rows if row.startswith("baseline.")}
    assert wanted <= {row["id"] for row in rows if row["outcome"] == "FAIL"}
