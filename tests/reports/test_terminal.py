"""The end of a run on a terminal: short for one cause, whatever it was, and no cause is hidden."""

from __future__ import annotations

import pytest

from reports.terminal import render_terminal
from runbook.records import (
    Check,
    LaunchStatus,
    Outcome,
    PhaseRecord,
    Reason,
    RunRecord,
    Verdict,
)
from runbook.records.run import Screen
from tests.reports.samples import run
from tests.reports.test_causes import WHERE, by_hand, crash, ended, hang, nan, phase, row

BAD = [status for status in LaunchStatus if status is not LaunchStatus.COMPLETED]
PHASES = ("baseline", "bucket_sweep", "sdpa_audit", "nvtx", "fused_adamw", "long_run")


def made(*phases: PhaseRecord, verdict: Verdict = Verdict.NO_GO, **fields: object) -> RunRecord:
    checks = [check for one in phases for check in one.checks if check.required]
    given = {"required": tuple(check.id for check in checks)} | fields
    return run(verdict, phases, **given)


def lines(record: RunRecord) -> list[str]:
    return render_terminal(record, Screen(brief=True)).splitlines()


@pytest.mark.parametrize("status", BAD)
def test_one_end_in_every_phase_takes_at_most_fifteen_lines(status: LaunchStatus) -> None:
    paths = tuple(f"baseline/run1/stackdump_rank{n}_{n}.txt" for n in range(8))
    result = ended(status, "what happened at step 3", culprit_rank=1, evidence=paths)
    shown = lines(made(*(phase(name, result) for name in PHASES)))
    assert len(shown) <= 15, "\n".join(shown)
    told = [line for line in shown if "what happened" in line]
    assert len(told) == 1
    for word in ("rows", "try", "rerun"):
        assert len([line for line in shown if line.startswith(f"    {word} ")]) == 1


@pytest.mark.parametrize("reason", [one for one in Reason if one is not Reason.OK])
@pytest.mark.parametrize("outcome", [Outcome.FAIL, Outcome.INVALID, Outcome.INCONCLUSIVE])
def test_one_row_takes_at_most_ten_lines(reason: Reason, outcome: Outcome) -> None:
    check = row("baseline.x", outcome, reason, "so it was", evidence=tuple("abcdef"))
    shown = lines(made(by_hand("baseline", check)))
    assert len(shown) <= 10
    assert f"{outcome}  baseline.x: so it was" in shown
    assert "    try    do" in shown


def test_two_causes_take_at_most_ten_lines_each() -> None:
    evidence = tuple(f"baseline/run1/{n}" for n in range(5))
    record = made(
        phase("baseline", hang(1, evidence=evidence)),
        phase("nvtx", crash("rank 0 ended: ValueError: x", evidence=evidence)),
        phase("long_run", hang(1)),
    )
    shown = lines(record)
    starts = [n for n, line in enumerate(shown) if line.startswith(("FAIL  ", "INVALID  "))]
    assert len(starts) == 2
    assert starts[1] - starts[0] <= 10 and len(shown) - starts[1] <= 10


def test_the_fourth_cause_is_told_with_its_command() -> None:
    checks = [row(f"baseline.x{n}", Outcome.FAIL, Reason.CRASH, f"fault {n}") for n in range(6)]
    shown = lines(made(by_hand("baseline", *checks)))
    for number in range(6):
        assert f"FAIL  baseline.x{number}: fault {number}" in shown
    assert sum(line.startswith("    try") for line in shown) == 3
    assert sum(line.startswith("    rerun") for line in shown) == 6


def test_what_nobody_required_is_a_line_and_no_more() -> None:
    check = row("baseline.aim", Outcome.FAIL, Reason.BELOW_LIMIT, "low", required=False)
    shown = lines(made(by_hand("baseline", check), required=("preflight.x",)))
    assert "FAIL  baseline.aim: low (not required)" in shown


def test_phases_that_were_not_asked_for_are_one_line_and_no_problem() -> None:
    failed = phase("baseline", nan(3))
    shown = lines(made(failed, *(_left_out(name) for name in ("nvtx", "long_run"))))
    tally = [line for line in shown if line.endswith("60 were not asked for. 84 checks in all.")]
    assert len(tally) == 1
    told = [line for line in shown if "not asked for" in line and line not in tally]
    assert told == ["  60 required checks were not asked for: nvtx, long_run"]
    assert "nvtx" not in "\n".join(line for line in shown if line not in told)


def test_the_terminal_says_what_follows_if_the_shipped_trainer_passes() -> None:
    other = {**WHERE.profile.model_dump(mode="json"), "trainer": "mine.train"}
    shown = lines(made(phase("baseline", hang(1)), profile_document=other))
    (tries,) = (line for line in shown if line.startswith("    try "))
    assert "if the shipped trainer passes, the fault is in your trainer (mine.train)" in tries


def test_a_partial_pass_says_what_is_missing_and_how_to_add_it() -> None:
    good = row("baseline.x", Outcome.PASS, Reason.OK, "fine", remedy="")
    record = made(by_hand("baseline", good), _left_out("nvtx"), verdict=Verdict.PARTIAL)
    shown = lines(record)
    assert shown[0].startswith("PARTIAL PASS 1 of 1, 30 more were not asked for (")
    assert (
        "  add    runbook run --resume 20261121T010203Z-840303b --phase nvtx" in shown
        and len(shown) <= 6
    )
    assert not any(line.startswith("export") for line in shown)


def test_a_disk_that_refused_is_told_beside_the_causes() -> None:
    check = row("baseline.x", Outcome.FAIL, Reason.CRASH, "so it was")
    reasons = ("the run's files cannot be written (/x: full)", "baseline.x is FAIL: so it was")
    shown = lines(made(by_hand("baseline", check), reasons=reasons))
    assert shown[2] == "  the run's files cannot be written (/x: full)"
    assert sum("so it was" in line for line in shown) == 1


def test_what_is_typed_next_begins_with_the_readers_program() -> None:
    good = row("baseline.x", Outcome.PASS, Reason.OK, "fine", remedy="")
    bad = row("baseline.x", Outcome.FAIL, Reason.CRASH, "so it was")
    records = (
        made(by_hand("baseline", good), verdict=Verdict.GO),
        made(by_hand("baseline", bad)),
        made(by_hand("baseline", good), _left_out("nvtx"), verdict=Verdict.PARTIAL),
    )
    for record, word in zip(records, ("next", "rerun", "add"), strict=True):
        shown = render_terminal(record, Screen(brief=True, program="bin/runbook")).splitlines()
        commands = [line.split()[1:3] for line in shown if line.split()[0] == word]
        assert commands and all(one[0] == "bin/runbook" for one in commands), shown
        assert not any("bin/runbook" in line for line in lines(record))


def test_a_command_without_variables_is_typed_so_too() -> None:
    screen = Screen(program="bin/runbook")
    assert screen.typed("env -u NSA_X runbook run") == "env -u NSA_X bin/runbook run"
    assert screen.typed("python3 -m pytest runbook ") == "python3 -m pytest runbook "


def _left_out(name: str) -> PhaseRecord:
    checks = tuple(
        Check(
            id=f"{name}.row{number}",
            phase=name,
            question="(no evidence)",
            outcome=Outcome.SKIPPED,
            code=Reason.NOT_ASKED_FOR,
            reason="this phase was not asked for",
            required=True,
            follows=name,
        )
        for number in range(30)
    )
    return by_hand(name, *checks).model_copy(update={"outcome": Outcome.SKIPPED})
