"""The command that a red run prints is typed as it stands, and brings the same cause again."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.cli.shell import Ended, runbook

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# No machine is so fast.
_FLOOR = """\
extends: cpu
throughput_gated: true
limits:
  throughput: {value: 1000000000.0, source: "a test", gated: true}
required: [baseline.throughput]
"""
_WHAT = {
    "NaN": (("--phase", "nvtx", "--profile", "cpu", "--set", "train.lr=1e6"), "non_finite"),
    "slow": (
        ("--phase", "baseline", "--profile", "floor.yaml", "--protocol", "single"),
        "below_limit",
    ),
}


def causes(folder: Path) -> list[dict[str, Any]]:
    """The causes that keep the newest run of this folder from GO."""
    newest = max((folder / "artifacts").iterdir(), key=lambda path: path.name)
    found = json.loads((newest / "report.json").read_text("utf-8"))["causes"]
    return [cause for cause in found if cause["blocks"]]


def printed(ended: Ended) -> str:
    """The one command that the output says to type."""
    lines = [line for line in ended.out.splitlines() if line.startswith("    rerun  ")]
    assert len(lines) == 1, ended.out
    assert len(ended.out.splitlines()) <= 15 + 2
    return lines[0].split(maxsplit=1)[1]


@pytest.mark.parametrize("what", _WHAT)
def test_the_printed_command_reproduces_the_cause(tmp_path: Path, what: str) -> None:
    words, code = _WHAT[what]
    (tmp_path / "floor.yaml").write_text(_FLOOR, encoding="utf-8")
    first = runbook("run", *words, cwd=tmp_path, timeout_s=400)
    (before,) = causes(tmp_path)
    assert before["code"] == code
    command = shlex.split(printed(first))
    assert command[0] == "runbook"
    second = runbook(*command[1:], cwd=tmp_path, timeout_s=400)
    assert len(list((tmp_path / "artifacts").iterdir())) == 2
    (after,) = causes(tmp_path)
    assert second.code == first.code
    same = ("code", "outcome", "rows", "launches", "remedy")
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    assert printed(second) == printed(first)
