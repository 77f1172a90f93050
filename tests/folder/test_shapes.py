"""Documents of another shape: what is left out, what is said of it, what stays."""

from __future__ import annotations

import math
from typing import Any

import pytest

from runbook.folder.launch.shapes import (
    EVENTS,
    Each,
    Fields,
    Items,
    is_count,
    is_number,
    is_text,
    shaped,
)

SHAPE = Fields({"n": is_count, "deep": Fields({"t": is_text}), "each": Each(is_number),
                "items": Items(is_text)})  # fmt: skip


@pytest.mark.parametrize(
    "good",
    [
        {},
        {"n": 1, "deep": {"t": "x", "other": [1]}, "each": {"a": 1.0}, "items": ["x"], "more": 3},
        {"n": None, "deep": {"t": None}, "each": None, "items": None},
        {"each": {}, "items": []},
    ],
)
def test_what_fits_stays_as_it_is(good: dict[str, Any]) -> None:
    assert shaped(good, SHAPE, "d") == (good, [])


@pytest.mark.parametrize(
    ("bad", "kept", "says"),
    [
        ({"n": "1", "m": 2}, {"m": 2}, ["d.n has an unexpected value: '1'"]),
        ({"deep": [1]}, {}, ["d.deep has an unexpected value: '[1]'"]),
        ({"deep": {"t": 1, "u": 2}}, {"deep": {"u": 2}}, ["d.deep.t has an unexpected value: '1'"]),
        ({"each": {"a": 1, "b": "x"}}, {}, ["d.each.b has an unexpected value: 'x'"]),
        ({"each": {"a": 1, "b": None}}, {}, ["d.each holds a null"]),
        ({"each": 5}, {}, ["d.each has an unexpected value: '5'"]),
        ({"items": ["x", 1]}, {}, ["d.items has an unexpected value: '1'"]),
        ({"items": ["x", None]}, {}, ["d.items holds a null"]),
        ({"items": "x"}, {}, ["d.items has an unexpected value: 'x'"]),
        ({"n": "y" * 50}, {}, [f"d.n has an unexpected value: {'y' * 40!r}"]),
    ],
)
def test_what_does_not_fit_is_left_out(
    bad: dict[str, Any], kept: dict[str, Any], says: list[str]
) -> None:
    assert shaped(bad, SHAPE, "d") == (kept, says)


@pytest.mark.parametrize(
    ("event", "fields"),
    [
        ("exit", {"updates": [1, 1], "moved": {"a": math.nan}, "largest_lr": 1, "param_hash": "h"}),
        ("proof", {"positions": 8, "missing": [], "wire": "fp32", "loss": math.nan}),
        ("ddp_buckets", {"arm": "25", "sizes_mib": [1.5], "bytes": [9], "last_bytes": [8]}),
        ("exit", {"in_force": {"timeout_s": 9.5, "threads": 1, "cpus": 2, "variables": {}}}),
        ("halt", {"reason": "asked"}),
        ("nonfinite", {"step": 9}),
    ],
)
def test_a_heartbeat_as_the_trainer_writes_it_fits(event: str, fields: dict[str, Any]) -> None:
    assert shaped(fields, EVENTS[event], event) == (fields, [])
    wrong = dict.fromkeys(fields, object())
    kept, problems = shaped(wrong, EVENTS[event], event)
    assert kept == {} and len(problems) == len(fields)
