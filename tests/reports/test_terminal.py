"""The end of a run on a terminal: short for one cause, whatever it was, and no cause is hidden."""

from __future__ import annotations

import html
import re

import pytest

from reports.terminal import render_github, render_terminal
from reports.view import build_view
from runbook.engine.derive import render
from runbook.records import LaunchStatus, Outcome, PhaseRecord, Ran, Reason, RunRecord, Verdict
from runbook.records.run import Screen
from tests.factory.records import check
from tests.reports.printed import commands_in_markdown
from tests.reports.samples import go, run
from tests.reports.test_causes import by_hand, ended, nan, phase, row

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


def test_a_terse_one_keeps_verdict_causes_and_what_to_type() -> None:
    checks = [row(f"baseline.x{n}", Outcome.FAIL, Reason.CRASH, f"fault {n}") for n in range(2)]
    optional = row("baseline.y", Outcome.FAIL, Reason.CRASH, "beside", required=False)
    record = made(by_hand("baseline", *checks, optional))
    first, *shown = render_terminal(record, Screen(brief=True, terse=True)).splitlines()
    assert first.startswith("NO-GO (")
    assert [line.split()[0] for line in shown] == ["FAIL", "next", "FAIL", "next", "then"]


# After a run: the same commands in the same order wherever they are told.

RUN = "20261121T010203Z-840303b"
MINE = {"profile": "/home/me/mine.yaml", "out": "/runs"}
HERE = "runbook run --profile /home/me/mine.yaml --out /runs"
BEFORE_ALL = row(
    "preflight.x", Outcome.INCOMPLETE, Reason.MISSING_ARTIFACT, "so it was", rerun="runbook x"
)
STOPS = {"profile_document": {"plan": {"stops": True}}, "options": {"plan": "production"}}


def of(verdict: Verdict, *phases: PhaseRecord, **fields: object) -> RunRecord:
    made = run(verdict, phases, required=tuple(c.id for one in phases for c in one.checks))
    return made.model_copy(update={"options": MINE, "profile": MINE["profile"], **fields})


RAN = Ran(
    device="cpu", name="a CPU", ranks=2, parameters=1, seq_len=8, global_batch=2, accumulation=1,
    dtype="fp32",
)  # fmt: skip
TRAINED = phase("baseline").model_copy(
    update={"ran": (RAN,), "outcome": Outcome.PASS, "checks": ()}
)
SKIPPED = check(
    "baseline.x", Outcome.SKIPPED, Reason.NOT_GATED, reason="no peak is known", required=True
)
LEFT_OUT = check(
    "nvtx.completed", Outcome.SKIPPED, Reason.NOT_ASKED_FOR, reason="not asked", required=True,
    follows="nvtx",
)  # fmt: skip
CRASHED = phase("baseline", *[ended(LaunchStatus.CRASHED, "rank 0 ended")] * 3).model_copy(
    update={"started_at": "2026-11-21T01:02:03Z"}
)
RESUMED = f"runbook run --resume {RUN} --out /runs"
AGAIN = "runbook run --phase baseline --profile cpu"
TABLE = {
    "no evidence": (of(Verdict.INCOMPLETE, by_hand("preflight", BEFORE_ALL), TRAINED),
                    ["runbook x", RESUMED]),
    "nothing that is worth keeping": (of(Verdict.INCOMPLETE, by_hand("preflight", BEFORE_ALL)),
                                      ["runbook x", HERE]),
    "what was set by hand is left out of both": (
        of(Verdict.NO_GO, phase("baseline", nan(4)), settings={"train.lr": "1e6"}), [AGAIN, HERE]),
    "a required check that was skipped has no command of its own": (
        of(Verdict.INCOMPLETE, by_hand("baseline", SKIPPED)), [HERE]),
    "interrupted": (of(Verdict.INCOMPLETE, by_hand("preflight", BEFORE_ALL), interrupted=True),
                    [RESUMED]),
    "a part": (of(Verdict.PARTIAL, by_hand("nvtx", LEFT_OUT)),
               [f"runbook run --resume {RUN} --phase nvtx --out /runs"]),
    "a launch after a crash": (of(Verdict.NO_GO, CRASHED, **STOPS),
                               [AGAIN, f"runbook launch --resume {RUN}"]),
    "a launch after a finding": (of(Verdict.INCOMPLETE, by_hand("preflight", BEFORE_ALL), **STOPS),
                                 ["runbook x", "runbook launch --profile /home/me/mine.yaml"]),
    "GO": (go(), [go().invocation.production_line()]),
    "GO of a launch": (go().model_copy(update={"options": {"plan": "production"}}), []),
}  # fmt: skip


@pytest.mark.parametrize("what", TABLE)
def test_every_place_names_the_same(what: str) -> None:
    record, commands = TABLE[what]
    assert [step.command for step in build_view(record).following] == commands
    screen = render(record, "terminal", Screen(brief=True))
    assert re.findall(r"^ +(?:next|then) +(.*)$", screen, flags=re.MULTILINE) == commands
    page = html.unescape(render(record, "html"))
    own = render(record, "terminal", Screen(brief=True, program="bin/runbook"))
    typed = [re.sub("^runbook ", "bin/runbook ", command) for command in commands]
    assert re.findall(r"^ +(?:next|then) +(.*)$", own, flags=re.MULTILINE) == typed
    for command in commands:
        assert command in commands_in_markdown(render(record, "md"))
        assert command in page
        assert command in render(record, "github").replace("%0A", "\n")


def test_github_is_never_given_more_than_it_shows() -> None:
    rows = [row(f"baseline.x{n}", Outcome.FAIL, Reason.CRASH, f"fault {n}") for n in range(20)]
    shown = render_github(made(by_hand("baseline", *rows)), Screen()).splitlines()
    errors = [line for line in shown if line.startswith("::error title=")]
    assert len(errors) == 10 and "more errors::" in errors[-1]
