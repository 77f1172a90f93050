"""NVTX: the range is there, the trace is kept, and Python does not dominate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runbook.records import Outcome, Reason
from runbook.records.evidence import LaunchEvidence
from tests.phases import spoil
from tests.phases.answers import FEW, NOTHING, TOO_MUCH, row, said


def profiled(**values: Any) -> spoil.Change:
    def change(made: LaunchEvidence) -> LaunchEvidence:
        return replace(made, profile={**(made.profile or {}), **values})

    return change


V1 = {"ranges": {"nsa.sel.ranges_v1": {"count": 9}}}


@pytest.mark.parametrize(
    ("what", "change", "expected"),
    [
        ("range_present", profiled(**V1), (Outcome.FAIL, Reason.MISMATCH)),
        ("range_present", profiled(ranges={}), (Outcome.INVALID, Reason.NO_EFFECT)),
        (
            "range_present",
            spoil.without_effect("NSA_NVTX"),
            (Outcome.INVALID, Reason.NO_EFFECT),
        ),
        (
            "range_present",
            spoil.parts(profile=None),
            NOTHING,
        ),
        ("trace_kept", spoil.parts(trace_path=""), NOTHING),
        ("python_share", profiled(python_share=0.6), TOO_MUCH),
        ("python_share", profiled(python_share=1.2), (Outcome.INVALID, Reason.NOT_PLAUSIBLE)),
        (
            "python_share",
            profiled(python_share=None),
            NOTHING,
        ),
        (
            "python_hotspot",
            profiled(top_python=[{"name": "loop", "share": 0.5}]),
            TOO_MUCH,
        ),
        ("python_hotspot", profiled(top_python=[]), NOTHING),
    ],
)
def test_nvtx_rows(what: str, change: spoil.Change, expected: tuple[Outcome, Reason]) -> None:
    assert row("nvtx", what).outcome is Outcome.PASS
    assert said(row("nvtx", what, change)) == expected


def test_the_hotspot_is_named() -> None:
    top = [{"name": "a", "share": 0.01}, {"name": "sequential_prefill", "share": 0.4}]
    check = row("nvtx", "python_hotspot", profiled(top_python=top))
    assert "sequential_prefill: 40%" in check.reason and "NSA_PREFILL_BATCHED=1" in check.remedy


@FEW
@given(st.floats(0.0, 1.0))
def test_pythons_share_may_be_a_quarter(share: float) -> None:
    check = row("nvtx", "python_share", profiled(python_share=share))
    assert (check.outcome is Outcome.PASS) == (share <= 0.25)
