"""FineWeb: skipped without its package, and judged by its loader and its loss."""

from __future__ import annotations

import pytest

from runbook.records import LaunchStatus, Outcome, Reason
from tests.phases import builder, spoil
from tests.phases.answers import TOO_MUCH, WHERE, row, says
from tests.phases.test_stage import instead

NO_PACKAGE = spoil.ended(
    LaunchStatus.CONFIG_ERROR, cause="dataset fineweb_edu needs the package datasets"
)
falling = spoil.columns(loss=lambda table: 5.5 - 0.005 * table["step"])


def test_the_loader_is_tried_in_three_short_steps_before_the_launch() -> None:
    smoke, train = builder.PHASES["fineweb"].plan(WHERE)
    tried = "--ddp 0 --steps 3 --seq-len 1024 --batch-size 1 --loader-timeout 60 "
    assert f"--dataset fineweb_edu {tried}" in smoke.command_line()
    trained = "--ddp 1 --steps 200 --loader-timeout 120 "
    assert f"--dataset fineweb_edu {trained}" in train.command_line()


def test_without_the_package_fineweb_is_skipped_with_its_name() -> None:
    found = builder.evidence("fineweb", WHERE, change=NO_PACKAGE)
    checks = builder.judge("fineweb", found, WHERE).checks
    assert {check.outcome for check in checks} == {Outcome.SKIPPED}
    assert all("datasets" in check.reason for check in checks)


@pytest.mark.parametrize(
    ("what", "change", "expected"),
    [
        ("progress", falling, (Outcome.PASS, Reason.OK)),
        ("progress", spoil.columns(loss=5.5), (Outcome.FAIL, Reason.MISMATCH)),
        ("loader", None, (Outcome.PASS, Reason.OK)),
        ("loader", spoil.columns(fetch_s=61.0), TOO_MUCH),
        ("loader", spoil.ended(LaunchStatus.HUNG), (Outcome.FAIL, Reason.HANG)),
        ("loader", instead, (Outcome.INVALID, Reason.MISMATCH)),
        ("as_planned", instead, (Outcome.INVALID, Reason.MISMATCH)),
    ],
)
def test_fineweb_rows(
    what: str, change: spoil.Change | None, expected: tuple[Outcome, Reason]
) -> None:
    says(row("fineweb", what, change), expected)
