"""A night for real: cut off, continued, each side with the code of its own commit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runbook.errors import ProgramExit
from runbook.folder.manifest import check_manifest
from runbook.launch.command import CHECKOUTS
from runbook.process.reaper import carriers
from runbook.records import Outcome, RunRecord
from tests.cli.shell import environment
from tests.engine.test_interrupt_and_resume import wait_for
from tests.executed import note
from tests.factory.programs import git

ROOT = Path(__file__).parents[2]
LOOP = "nsa/train/loop.py"
ANCHOR = "        posted = self._post(outcome)\n"
# The reference is so much slower that no loss of HEAD can be suspected: the night stays short.
SLOWER = """\
        if self.step == 1:
            print("MARKER of the reference", flush=True)
        until = process_time() + 0.05
        while process_time() < until:
            pass
"""
pytestmark = [pytest.mark.slow, pytest.mark.e2e]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This program as committed, in which the commit before HEAD is slower and says so."""
    folder = tmp_path_factory.mktemp("night") / "clone"
    git(ROOT, "clone", "--quiet", "--shared", str(ROOT), str(folder))
    path = folder / LOOP
    text = path.read_text()
    assert text.count(ANCHOR) == 1
    for content in (text.replace(ANCHOR, SLOWER + ANCHOR), text):
        path.write_text(content)
        git(folder, "commit", "--quiet", "--all", "--message", "another trainer")
    return folder


def start(clone: Path, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "runbook", "nightly", "--quiet", *words],
        cwd=clone,
        env=environment(PYTHONPATH=str(clone), OMP_NUM_THREADS="1"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.executes("runbook nightly")
def test_a_cancelled_night_is_readable_and_goes_on_with_each_sides_own_code(
    clone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "artifacts"
    what = ("--phase", "regression", "--profile", "cpu", "--reference", "HEAD~1")
    night = start(clone, *what, "--steps-scale", "0.25", "--out", str(out))
    beats = wait_for(out, "*/regression/round02_*/heartbeat_rank0.jsonl")
    folder = beats.parents[2]
    night.send_signal(signal.SIGTERM)
    assert night.wait(timeout=60) == 143
    tokens = [json.loads(one.read_text())["run_token"] for one in out.rglob("launch.json")]
    assert [pid for token in tokens for pid in carriers(token)] == []
    cut = RunRecord.model_validate_json((folder / "run.json").read_text())
    assert cut.interrupted and not (folder / CHECKOUTS).exists()
    assert check_manifest(folder) == []

    words = ("--resume", str(folder), "--out", str(out))
    code = start(clone, *words).wait(timeout=500)
    note(("runbook", "nightly", *words), code)
    record = RunRecord.model_validate_json((folder / "run.json").read_text())
    (phase,) = [one for one in record.phases if one.name == "regression"]
    wrong = [f"{one.id}: {one.reason}" for one in phase.checks if one.outcome is not Outcome.PASS]
    assert wrong == []
    assert code in (ProgramExit.INCOMPLETE, ProgramExit.PARTIAL)
    commits = {side: git(clone, "rev-parse", name) for side, name in SIDES.items()}
    for entry in phase.launches:
        side = entry.launch.name.partition("_")[2]
        console = (folder / entry.launch.run_dir / "console.log").read_text()
        assert ("MARKER" in console) is (side == "reference")
        env = json.loads((folder / entry.launch.run_dir / "env.json").read_text())
        assert env["git"]["sha"] == entry.launch.commit == commits[side]
    assert len(phase.launches) == 6, "no loss was suspected, so no more rounds were run"
    assert git(clone, "status", "--porcelain") == ""
    assert not (folder / CHECKOUTS).exists()


SIDES = {"reference": "HEAD~1", "head": "HEAD"}
