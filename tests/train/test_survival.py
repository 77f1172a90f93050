"""A run that is killed and pre-empted ends with the numbers of one that was left alone."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from nsa.contract import HEARTBEATS
from tests.train import survival

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STEPS = 40
ENDS = [(signal.SIGKILL, 19), (signal.SIGKILL, 21), (signal.SIGTERM, 27)]


def test_two_kills_and_a_sigterm_change_no_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = survival.compare(tmp_path, STEPS, 1, ENDS)
    told, pieces = capsys.readouterr().out, tmp_path / "pieces"
    console = (pieces / "console.log").read_text()
    assert code == 0, told + console
    assert re.findall(r"exit code (-?\d+)", told) == ["-9", "-9", "13", "0", "0"]
    runs = survival.runs(pieces)
    end = json.loads((runs[2] / HEARTBEATS.name(0)).read_text().split("\n")[-2])
    assert (end["event"], end["code"]) == ("exit", 13) and "SIGTERM" in end["reason"]
    begun = re.findall(r"\[resume\] .*\(step (\d+)\)", console)
    assert len(begun) == 3 and begun[2] == str(end["step"]), "saved where it was stopped"
    kept = sorted(path.name for path in (tmp_path / "whole/latest/checkpoints").iterdir())
    assert kept == ["step_36", "step_38", "step_40"]
    # And what differs is told: in one digit of one step, or at the end alone.
    table = pieces / "latest/training.csv"
    text = table.read_text()
    table.write_text(re.sub(r"\n40,(\d)", "\n40,9\\1", text))
    assert not survival.same(tmp_path / "whole", pieces, STEPS)
    assert "DIFFERENT: steps, step 40: " in capsys.readouterr().out
    table.write_text(text)
    beats = pieces / "latest" / HEARTBEATS.name(0)
    digest = end_of(beats)["param_hash"]
    beats.write_text(beats.read_text().replace(digest, "0" * len(digest)))
    assert not survival.same(tmp_path / "whole", pieces, STEPS)
    assert f"DIFFERENT: parameters: {digest} and 000" in capsys.readouterr().out


def end_of(beats: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(beats.read_text().split("\n")[-2])
    return found
