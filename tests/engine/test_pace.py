"""The pace of a GO is that of its plain launch with the most steps, or none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runbook.engine.plan import forecast as pace
from runbook.records import LaunchEntry, LaunchResult, LaunchStatus, RankExit
from tests.engine.test_forecast import BASE


def plain(name: str, steps: int, done: int) -> LaunchEntry:
    changed = {"name": name, "run_dir": f"long_run/{name}", "steps": steps}
    launch = BASE.model_copy(update=changed)
    ends = (RankExit(rank=0, code=0, steps_done=done),)
    result = LaunchResult(status=LaunchStatus.COMPLETED, ranks=ends, duration_s=100.0)
    return LaunchEntry(launch=launch, result=result)


def told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **launches: tuple[int, int, float]
) -> pace.Pace | None:
    """The pace of a run with these launches: planned steps, steps done, and seconds of each."""
    entries = []
    for name, (steps, done, seconds) in launches.items():
        entries.append(plain(name, steps, done))
        folder = tmp_path / "runs" / "id" / "long_run" / name
        folder.mkdir(parents=True)
        rows = [f"{step},5.0,0.1,{100 / seconds},100,{seconds}" for step in range(done)]
        head = "step,loss,lr,toks_per_s,tokens,dt_s"
        (folder / "training.csv").write_text("\n".join([head, *rows]) + "\n")
    monkeypatch.setattr(pace, "go_record", lambda folder: object())
    monkeypatch.setattr(pace, "ground_of", lambda record, ranks: entries)
    profile = SimpleNamespace(plan=SimpleNamespace(go="id: GO"), ranks=1)
    setup: Any = SimpleNamespace(profile=profile, options=SimpleNamespace(out=tmp_path / "runs"))
    return pace.pace_of_the_go(setup)


def test_the_launch_with_the_most_steps_of_its_own_gives_the_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that goes on from step 240 until it is stopped is told of 600, and does 4."""
    found = told(tmp_path, monkeypatch, stopped=(600, 4, 0.5), run=(400, 400, 0.25))
    assert found is not None and found.step_s == pytest.approx(0.25)
    assert found.launch.name == "run" and found.startup_s == pytest.approx(0.0)


@pytest.mark.parametrize(("steps", "known"), [(22, False), (23, True)])
def test_fewer_than_twenty_steps_after_the_first_ones_give_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, known: bool
) -> None:
    assert (told(tmp_path, monkeypatch, run=(400, steps, 0.25)) is not None) is known
