"""An attempt: what its end means, and what goes on with it when its harness is gone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runbook.folder import LAUNCH_JSON, RESULT_JSON
from runbook.folder.launch.evidence import read_launch
from runbook.launch import LaunchOptions, adopt_launch
from runbook.launch.launcher_api import Running, Start
from runbook.launch.local import Local, LocalRun
from runbook.launch.observer import Observer
from runbook.records import Begun, LaunchResult, LaunchStatus, Stop
from tests.launch.helpers import fake_launch, run, trainer


@pytest.mark.parametrize(
    ("body", "code", "status"),
    [
        ("def test_a(): pass", 0, LaunchStatus.COMPLETED),
        pytest.param("def test_a(): assert 0", 1, LaunchStatus.COMPLETED, marks=pytest.mark.slow),
        pytest.param("", 5, LaunchStatus.COMPLETED, marks=pytest.mark.slow),
        ("import nothing_of_that_name", 2, LaunchStatus.CRASHED),
        ("import os; os._exit(0)", 0, LaunchStatus.CRASHED),
    ],
    ids=["passes", "fails", "nothing there", "broken", "ends before its report"],
)
def test_pytest_is_completed_if_its_report_can_say_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, code: int, status: LaunchStatus
) -> None:
    # A configuration of the current folder that no pytest could work with must not matter.
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    monkeypatch.chdir(tmp_path)
    test = tmp_path / "test_one.py"
    test.write_text(body + "\n")
    launch = trainer("python", "-m", "pytest", "-q", str(test), kind="pytest", timeout_s=60)
    result = run(launch, tmp_path)
    assert (result.status, result.exit_code) == (status, code)
    evidence = read_launch(tmp_path, launch, result)
    if status is LaunchStatus.COMPLETED:
        assert evidence.junit is not None
        statuses = [case.status for case in evidence.junit.cases]
        assert statuses == {0: ["passed"], 1: ["failed"], 5: []}[code]


class Outlived(Local):
    """A place where commands outlive their harness: one is there for whoever asks."""

    def adopt(self, start: Start) -> Running | None:
        """The same command in the same folder, with the token that its launch.json names."""
        return LocalRun(start)


def test_what_is_adopted_says_from_which_checkpoint_it_went_on(tmp_path: Path) -> None:
    launch = fake_launch(name="leg2", steps=8).model_copy(update={"resumes": "leg1", "after": 5})
    begun = Begun(
        path="baseline/leg1/checkpoints/step_4", step=4, sha256="ab" * 32, refused=("step_5: torn",)
    )
    (tmp_path / begun.path).mkdir(parents=True)
    first = run(launch, tmp_path, begun=begun)
    assert (first.status, first.begun) == (LaunchStatus.COMPLETED, begun)
    folder = tmp_path / launch.run_dir
    for path in folder.iterdir():  # as the killed harness left it, before the command wrote
        if path.name != LAUNCH_JSON:
            path.unlink()
    document = json.loads((folder / LAUNCH_JSON).read_text())
    assert document["argv"][-2:] == ["--resume", str(tmp_path / begun.path)]
    how = LaunchOptions(run_root=tmp_path, observer=Observer(), retry=False, launcher=Outlived())
    adopted = adopt_launch(launch, how)
    assert adopted is not None and adopted.status is LaunchStatus.COMPLETED, adopted
    assert (adopted.begun, adopted.run_token) == (begun, first.run_token)
    assert LaunchResult.model_validate_json((folder / RESULT_JSON).read_text()) == adopted
    assert read_launch(tmp_path, launch, adopted).after == 4


@pytest.mark.parametrize("words", [(), ("--deaf",)], ids=["it ends", "it is deaf"])
def test_a_launch_that_its_plan_stops_is_told_to_end_and_that_is_its_good_end(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    """Whether its ranks did so at once is judged from their exit codes, and not here."""
    launch = fake_launch(*words, nproc=1, steps=40).model_copy(
        update={"stop": Stop(by="SIGTERM", steps=2)}
    )
    result = run(launch, tmp_path)
    assert result.status is LaunchStatus.COMPLETED, result
    assert result.stopped is not None and 2 <= result.stopped.step < 40
    (rank,) = result.ranks
    assert rank.steps_done is not None
    assert (rank.code, rank.steps_done < 40) == ((0, False) if words else (13, True))


def test_a_launch_that_its_plan_halts_finds_the_file(tmp_path: Path) -> None:
    launch = fake_launch(nproc=1, steps=40).model_copy(update={"stop": Stop(by=".HALT", steps=2)})
    result = run(launch, tmp_path)
    assert result.stopped is not None
    text = (tmp_path / launch.run_dir / ".HALT").read_text()
    assert text == "planned, after 2 steps\n"


def test_an_end_before_the_planned_one_is_no_good_end(tmp_path: Path) -> None:
    launch = fake_launch("--fault", "sigkill", "--on-rank", "0", nproc=1, steps=20)
    late = launch.model_copy(update={"stop": Stop(by="SIGTERM", steps=19)})
    result = run(late, tmp_path)
    assert (result.stopped, result.ok) == (None, False), result
