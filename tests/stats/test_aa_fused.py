"""The real A/A: it goes on where it ended, counts alarms, and leaves no busy loop behind."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import aa_fused


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The numbers that are run; every run is a TIE unless its number is in `alarming`."""
    seen: list[int] = []

    def pretend(number: int, out: Path) -> dict[str, Any]:
        assert out == tmp_path
        seen.append(number)
        code = {3: ("INVALID", "not_plausible"), 4: ("PASS", "warning")}.get(number, ("PASS", "ok"))
        said = {"outcome": code[0], "code": code[1], "reason": "made up"}
        return {"run": number, "neighbor": number % 2 == 1, "wall_s": 0.0, **said}

    monkeypatch.setattr(aa_fused, "one_run", pretend)
    return seen


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["aa_fused.py", *words])
    return aa_fused.main()


def test_it_goes_on_where_it_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runs: list[int]
) -> None:
    assert call(monkeypatch, "--runs", "2", "--out", str(tmp_path)) == 0
    with (tmp_path / "results.jsonl").open("a") as stream:
        stream.write('{"run": 2, "outc')  # cut off by a kill
    assert call(monkeypatch, "--runs", "3", "--out", str(tmp_path)) == 0
    assert runs == [0, 1, 2]
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["run"] for line in lines] == [0, 1, 2]


def test_an_alarm_is_anything_but_a_plain_pass(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    runs: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(monkeypatch, "--runs", "4", "--out", str(tmp_path)) == 0
    assert "1 alarm(s) in 4 runs" in capsys.readouterr().out
    assert call(monkeypatch, "--runs", "5", "--out", str(tmp_path)) == 1
    assert "2 alarm(s) in 5 runs" in capsys.readouterr().out
    assert runs == [0, 1, 2, 3, 4]


def test_the_neighbor_comes_goes_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def kept(words: list[str]) -> subprocess.Popen[bytes]:
        started.append(real(words))
        return started[-1]

    monkeypatch.setattr(aa_fused.subprocess, "Popen", kept)
    monkeypatch.setattr(aa_fused, "SHORTEST_S", 0.05)
    monkeypatch.setattr(aa_fused, "LONGEST_S", 0.2)
    with aa_fused.neighbor(1):
        deadline = time.monotonic() + 20
        while len(started) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(started) >= 3
    assert all(loop.returncode is not None for loop in started)
