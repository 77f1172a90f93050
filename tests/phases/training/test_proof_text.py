"""A trainer's evidence in a report is words, not the notation of a programming language."""

from __future__ import annotations

from typing import Any

import pytest

from nsa.contract import proof_text


@pytest.mark.parametrize(
    ("evidence", "text"),
    [
        ({"hook": None}, "hook None"),
        ({"hook": "bf16", "bytes_after": 12}, "hook bf16, bytes_after 12"),
        ({"fused": [True, False], "step_device": ["cpu"]}, "fused yes/no, step_device cpu"),
        ({"ranges": []}, "ranges none"),
        ("the profiler saw it", "the profiler saw it"),
    ],
)
def test_words(evidence: Any, text: str) -> None:
    assert proof_text(evidence) == text
    assert not set("{}[]'") & set(proof_text(evidence))
