"""Fused AdamW: kept, dropped or undecided, and whose fault an ended launch is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from runbook.config.phase import Judgement
from runbook.records import LaunchStatus, Outcome, Reason, Verdict, judge_run
from runbook.records.evidence import LaunchEvidence
from tests.phases import builder, spoil
from tests.phases.answers import (
    FINE,
    NO_EFFECT,
    UNDECIDED,
    WARNED,
    WHERE,
    get,
    said,
)

CPU = builder.context("cpu")


def fused(change: spoil.Change | None = None, where: Any = WHERE, **options: Any) -> Judgement:
    found = builder.evidence("fused_adamw", where, change=change, **options)
    return builder.judge("fused_adamw", found, where)


def row(judgement: Judgement, what: str) -> Any:
    return get(judgement, f"fused_adamw.{what}")


def refused(made: LaunchEvidence) -> LaunchEvidence:
    """The fused arm could not run, and the others went on."""
    failure = ({"arm": "fused", "error": "fused=True needs CUDA"},)
    table = made.training.frame[made.training.frame["arm"] != "fused"]
    table = table.assign(step=range(1, len(table) + 1))
    spoken = spoil.every_rank(arm_failures=failure, last_step=len(table))(made)
    return spoil.at("training.frame", table)(spoken)


def ended(status: LaunchStatus, rows: int = 34) -> spoil.Change:
    """By default after 24 rows of the control and 10 of the fused arm."""
    return spoil.ended(status, rows=rows)


WORSE = spoil.columns(loss=lambda table: table["loss"] + 0.3 * (table["arm"] == "fused"))
FASTER, SLOWER, NEAR = ({"rates": {"fused": rate}} for rate in (1.05e5, 0.9e5, 0.98e5))
BY_HALVES = {"where": builder.context(protocol="launches")}
FUSED_HUNG = {**BY_HALVES, "only": ["fused_r1"]}
CONTROL_HUNG = {**BY_HALVES, "only": ["baseline_r1"]}
DROPPED, NONE = (WARNED, "WARNING: DROP"), (Outcome.INCOMPLETE, "")
HANG, TIMEOUT = (Outcome.FAIL, Reason.HANG), (Outcome.INCOMPLETE, Reason.TIMEOUT)
SLOW_SAID = "not gated on profile cpu, nothing was decided: "


@pytest.mark.parametrize(("change", "options", "rows"), [
    (None, FASTER, {"keep": (FINE, "KEEP")}),
    (None, SLOWER, {"keep": (FINE, "DROP")}),
    (spoil.jitter(0.25), NEAR, {"keep": (UNDECIDED, "")}),
    # On a CPU an undecided speed leaves the toggle unset and passes.
    (spoil.jitter(0.3), {"where": CPU}, {"keep": ((Outcome.PASS, Reason.NOT_GATED), SLOW_SAID)}),
    (WORSE, {}, {"keep": DROPPED, "loss_parity": (WARNED, "")}),
    *((ended(status), {}, {"completed": (WARNED, ""), "keep": DROPPED}) for status in
      (LaunchStatus.HUNG, LaunchStatus.CRASHED, LaunchStatus.NON_FINITE)),
    (refused, {}, {"completed": (FINE, ""), "plausible": (FINE, ""), "keep": DROPPED}),
    # An end that is not the fused arm's leaves nothing to keep, nor what we cut off ourselves.
    (ended(LaunchStatus.HUNG, 10), {}, {"completed": (HANG, ""), "keep": NONE}),
    (ended(LaunchStatus.TIMED_OUT), {}, {"completed": (TIMEOUT, ""), "keep": NONE}),
    (ended(LaunchStatus.HUNG, 20), FUSED_HUNG, {"completed": (WARNED, ""), "keep": DROPPED}),
    (ended(LaunchStatus.HUNG, 20), CONTROL_HUNG, {"completed": (HANG, "")}),
    # An A/B of identical code is invalid.
    *((spoil.without_effect("NSA_OPT_FUSED", arm=arm), {"rates": {"fused": 2e5}},
       {"took_effect": (NO_EFFECT, ""), "keep": (NO_EFFECT, "")}) for arm in ("baseline", "fused")),
])  # fmt: skip
def test_fused_is_kept_unless_it_is_slower_and_stays_unset_near_the_margin(
    change: spoil.Change | None, options: dict[str, Any], rows: dict[str, Any]
) -> None:
    judgement = fused(change, **options)
    for what, (wanted, begins) in rows.items():
        check = row(judgement, what)
        assert wanted in (said(check), check.outcome), check.reason
        assert check.reason.startswith(begins)
    kept = rows.get("keep", ("", ""))[1] == "KEEP"
    assert judgement.choices == ({"NSA_OPT_FUSED": "1"} if kept else {})


def test_the_table_has_the_two_arms() -> None:
    (table,) = fused(**SLOWER).tables
    assert [one[0] for one in table.rows] == ["baseline", "fused"]
    assert [one[1] for one in table.rows] == pytest.approx([1e5, 0.9e5])


def test_fused_that_ends_the_launch_leaves_a_phase_that_passes() -> None:
    outcomes = {check.outcome for check in fused(ended(LaunchStatus.CRASHED)).checks}
    assert outcomes == {Outcome.PASS, Outcome.SKIPPED}
    assert "fused=True needs CUDA" in row(fused(refused), "keep").reason


def test_what_is_not_decided_on_a_cpu_says_so() -> None:
    reason = row(fused(spoil.jitter(0.3), CPU), "keep").reason
    assert "INCONCLUSIVE" not in reason and "NSA_OPT_FUSED stays as it is" in reason


def test_the_safe_mode_leaves_nothing_to_compare_and_never_a_go() -> None:
    judgement = fused(where=replace(WHERE, toggles={"NSA_DDP_SAFE_MODE": "1"}))
    assert {said(check) for check in judgement.checks} == {(Outcome.SKIPPED, Reason.NOT_COMPARABLE)}
    keep = row(judgement, "keep")
    assert keep.required and "NSA_DDP_SAFE_MODE=1 forbids NSA_OPT_FUSED=1" in keep.reason
    assert judge_run(judgement.checks, [keep.id]) is Verdict.INCOMPLETE
