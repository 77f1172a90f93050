"""What `inspect` says of the ends of ranks that a launcher wrote down and that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runbook.tools.inspect.folder import inspect_path
from tests.phases import builder, on_disk

WHERE = builder.context("cpu", steps_scale=0.2)


@pytest.mark.parametrize("ranks", [3, [{"rank": "x"}], {"a": 1}])
def test_ends_of_ranks_that_cannot_be_read_are_told(tmp_path: Path, ranks: object) -> None:
    found = builder.evidence("baseline", WHERE, only=["run1"])
    for made in found.launches.values():
        on_disk.write_launch(tmp_path, made)
    path = tmp_path / "baseline/run1/result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "ranks": ranks}))
    said = [remark.message for remark in inspect_path(path.parent).remarks]
    assert "result.json: its `ranks` are no ends of ranks" in said
