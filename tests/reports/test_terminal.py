"""The end of a run on a terminal: short for one cause, whatever it was, and no cause is hidden."""

from __future__ import annotations

import pytest

from reports.formats.terminal import render_terminal
from runbook.records import (
    LaunchStatus,
    Outcome,
    PhaseRecord,
    Reason,
    RunRecord,
    Verdict,
)
from runbook.records.run import Screen
from tests.factory.records import check
from tests.reports.samples import run
from tests.reports.test_causes import by_hand, ended, phase, row

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
    for word in ("rows", "try", "next"):
        assert len([line for line in shown if line.startswith(f"    {word} ")]) == 1


@pytest.mark.parametrize("reason", [one for one in Reason if one is not Reason.OK])
@pytest.mark.parametrize("outcome", [Outcome.FAIL, Outcome.INVALID, Outcome.INCONCLUSIVE])
def test_one_row_takes_at_most_eleven_lines(reason: Reason, outcome: Outcome) -> None:
    check = row("baseline.x", outcome, reason, "so it was", evidence=tuple("abcdef"))
    shown = lines(made(by_hand("baseline", check)))
    assert len(shown) <= 11 and shown[-1].startswith("  then   runbook run ")
    assert f"{outcome}  baseline.x: so it was" in shown
    assert "    try    do" in shown


def test_advice_is_wrapped_under_its_first_word_and_a_command_is_not() -> None:
    advice = " ".join(["look"] * 40)
    rerun = f"runbook run --phase {','.join(PHASES)}"
    check = row("baseline.x", Outcome.FAIL, Reason.CRASH, "fault", remedy=advice, rerun=rerun)
    shown = render_terminal(made(by_hand("baseline", check)), Screen(brief=True, width=50))
    lines = shown.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("    try    look"))
    told = lines[first : first + 5]
    assert all(line.startswith("           look") for line in told[1:]), told
    assert all(len(line) <= 50 for line in told) and shown.count("look") == 40
    assert f"    next   {rerun}" in lines and len(rerun) > 50


def test_the_fourth_cause_is_told_with_its_command() -> None:
    checks = [row(f"baseline.x{n}", Outcome.FAIL, Reason.CRASH, f"fault {n}") for n in range(6)]
    shown = lines(made(by_hand("baseline", *checks)))
    for number in range(6):
        assert f"FAIL  baseline.x{number}: fault {number}" in shown
    assert sum(line.startswith("    try") for line in shown) == 3
    assert sum(line.startswith("    next") for line in shown) == 6


def test_a_partial_pass_says_what_is_missing_and_how_to_add_it() -> None:
    good = row("baseline.x", Outcome.PASS, Reason.OK, "fine", remedy="")
    record = made(by_hand("baseline", good), _left_out("nvtx"), verdict=Verdict.PARTIAL)
    shown = lines(record)
    assert shown[0].startswith("PARTIAL PASS 1 of 1, 30 more were not asked for (")
    assert (
        "  next   runbook run --resume 20261121T010203Z-840303b --phase nvtx" in shown
        and len(shown) <= 6
    )
    assert not any(line.startswith("export") for line in shown)


def test_phases_are_numbered_as_while_they_ran_and_others_not_at_all() -> None:
    good = row("baseline.x", Outcome.PASS, Reason.OK, "fine", remedy="")
    left = (_left_out("sdpa_audit"), _left_out("nvtx"))
    record = made(by_hand("baseline", good), *left, verdict=Verdict.PARTIAL)
    head, *shown = render_terminal(record, Screen()).splitlines()[:4]
    assert head.endswith("  1 phase")
    assert [line.split()[:2] for line in shown] == [
        ["1/1", "baseline"], ["-", "sdpa_audit"], ["-", "nvtx"]
    ]  # fmt: skip


def test_a_command_within_advice_is_typed_by_the_readers_program_too() -> None:
    advice = "`runbook triage` finds it; the runbook says so"
    check = row("baseline.x", Outcome.FAIL, Reason.CRASH, "fault", remedy=advice)
    shown = render_terminal(made(by_hand("baseline", check)), Screen(program="bin/runbook"))
    assert "    try    `bin/runbook triage` finds it; the runbook says so\n" in shown


def test_what_is_typed_next_begins_with_the_readers_program() -> None:
    good = row("baseline.x", Outcome.PASS, Reason.OK, "fine", remedy="")
    bad = row("baseline.x", Outcome.FAIL, Reason.CRASH, "so it was")
    records = (
        made(by_hand("baseline", good), verdict=Verdict.GO),
        made(by_hand("baseline", bad)),
        made(by_hand("baseline", good), _left_out("nvtx"), verdict=Verdict.PARTIAL),
    )
    for record, word in zip(records, ("next", "next", "next"), strict=True):
        shown = render_terminal(record, Screen(brief=True, program="bin/runbook")).splitlines()
        commands = [line.split()[1:3] for line in shown if line.split()[0] == word]
        assert commands and all(one[0] == "bin/runbook" for one in commands), shown
        assert not any("bin/runbook" in line for line in lines(record))


def _left_out(name: str) -> PhaseRecord:
    told = {"question": "(no evidence)", "reason": "this phase was not asked for"}
    told |= {"required": True, "follows": name}
    checks = tuple(
        check(f"{name}.row{number}", Outcome.SKIPPED, Reason.NOT_ASKED_FOR, **told)
        for number in range(30)
    )
    return by_hand(name, *checks).model_copy(update={"outcome": Outcome.SKIPPED})
