"""After a run: the same commands in the same order wherever they are told."""

from __future__ import annotations

import html
import re

import pytest

from reports.view import build_view
from runbook.engine.derive import render
from runbook.records import LaunchStatus, Outcome, PhaseRecord, Ran, Reason, RunRecord, Verdict
from runbook.records.run import Screen
from tests.factory.records import check
from tests.reports.printed import commands_in_markdown
from tests.reports.samples import go, run
from tests.reports.test_causes import by_hand, ended, nan, phase, row

RUN = "20261121T010203Z-840303b"
MINE = {"profile": "/home/me/mine.yaml", "out": "/runs"}
HERE = "runbook run --profile /home/me/mine.yaml --out /runs"
BAD = row(
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
TABLE = {
    "no evidence": (
        of(Verdict.INCOMPLETE, by_hand("preflight", BAD), TRAINED),
        ["runbook x", f"runbook run --failed {RUN} --out /runs"],
    ),
    "nothing that is worth keeping": (
        of(Verdict.INCOMPLETE, by_hand("preflight", BAD)),
        ["runbook x", HERE],
    ),
    "a failure": (
        of(Verdict.NO_GO, by_hand("preflight", BAD)),
        ["runbook x", HERE],
    ),
    "what was set by hand is left out of both": (
        of(Verdict.NO_GO, phase("baseline", nan(4)), settings={"train.lr": "1e6"}),
        ["runbook run --phase baseline --profile cpu", HERE],
    ),
    "a required check that was skipped has no command of its own": (
        of(Verdict.INCOMPLETE, by_hand("baseline", SKIPPED)),
        [HERE],
    ),
    "interrupted": (
        of(Verdict.INCOMPLETE, by_hand("preflight", BAD), interrupted=True),
        [f"runbook run --resume {RUN} --out /runs"],
    ),
    "not finished": (
        of(Verdict.INCOMPLETE, by_hand("preflight", BAD), finished_at=None),
        [f"runbook run --resume {RUN} --out /runs"],
    ),
    "a part": (
        of(Verdict.PARTIAL, by_hand("nvtx", LEFT_OUT)),
        [f"runbook run --resume {RUN} --phase nvtx --out /runs"],
    ),
    "a launch after a crash": (
        of(Verdict.NO_GO, CRASHED, **STOPS),
        ["runbook run --phase baseline --profile cpu", f"runbook launch --resume {RUN}"],
    ),
    "a launch after a finding": (
        of(Verdict.INCOMPLETE, by_hand("preflight", BAD), **STOPS),
        ["runbook x", "runbook launch --profile /home/me/mine.yaml"],
    ),
    "GO": (go(), [go().invocation.production_line()]),
    "GO of a launch": (go().model_copy(update={"options": {"plan": "production"}}), []),
}


@pytest.mark.parametrize("what", TABLE)
def test_what_to_type_after_a_run(what: str) -> None:
    record, commands = TABLE[what]
    assert [step.command for step in build_view(record).following] == commands


@pytest.mark.parametrize("what", TABLE)
def test_every_place_names_the_same(what: str) -> None:
    record, commands = TABLE[what]
    screen = render(record, "terminal", Screen(brief=True))
    told = re.findall(r"^ +(?:next|then) +(.*)$", screen, flags=re.MULTILINE)
    assert told == commands
    page = html.unescape(render(record, "html"))
    for command in commands:
        assert command in told
        assert command in commands_in_markdown(render(record, "md"))
        assert command in page
        assert command in render(record, "github").replace("%0A", "\n")
