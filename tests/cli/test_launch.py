"""`runbook launch`: a whole plan for real, killed on its way, and what is refused before."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runbook.records import Check, Outcome, RunRecord, Verdict
from tests.cli.shell import runbook
from tests.shared import once

# Without the rows that hold clocks against each other, which is not what this is about.
PLAN = """\
extends: production
name: short
phases:
  preflight: null
  smoke: {checks: [completed, heartbeats, past_step_5, loss_finite, toggles_effective, gates]}
  extended: {checks: [completed, as_planned, loss_finite, plausible, gates, resumed]}
  production:
    checks: [completed, ranks_alive, as_planned, plausible, gradients, oracle, checkpoint_time]
"""
WORDS = ("--profile", "cpu", "--steps-scale", "0.02", "--out", "runs")


def launched(folder: Path) -> Path:
    """The whole short plan, killed in its last leg and continued; returns the run's folder."""
    (folder / "short.yaml").write_text(PLAN)
    words = ("launch", "--plan", "short.yaml", "--without-go", *WORDS)
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "runbook", *words, "--quiet"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={k: v for k, v in os.environ.items() if not k.startswith("NSA_")},
    ) as harness:
        give_up = time.monotonic() + 500
        while not (rows := list(folder.glob("runs/*/production/leg2/training.csv"))):
            assert harness.poll() is None and time.monotonic() < give_up
            time.sleep(0.05)
        os.kill(harness.pid, signal.SIGKILL)
    run = rows[0].parents[2]
    kept = digests(run / "production" / "leg1")
    done = runbook("launch", "--resume", run.name, "--out", "runs", cwd=folder, timeout_s=500)
    assert done.code == 0, done.out + done.err
    assert digests(run / "production" / "leg1") == kept, "what had finished is not repeated"
    return run


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "launched", launched)


def record_of(run: Path) -> RunRecord:
    return RunRecord.model_validate_json((run / "run.json").read_text())


def row(run: Path, name: str) -> Check:
    return next(check for check in record_of(run).checks() if check.id == name)


@pytest.mark.slow
@pytest.mark.e2e
def test_it_is_go_and_says_what_is_less_than_usual(run: Path) -> None:
    record = record_of(run)
    assert record.verdict is Verdict.GO, record.reasons
    assert [phase.name for phase in record.phases] == [
        "sanity",
        "smoke",
        "extended",
        "production",
    ]
    assert record.said.startswith("GO, STARTED WITHOUT A GO (of this configuration")
    assert "plan short" in record.caveats and "steps x 0.02" in record.caveats
    assert any("production/leg2 begun 2 times" in text for text in record.caveats)


@pytest.mark.slow
@pytest.mark.e2e
def test_a_leg_that_was_killed_goes_on_from_the_checkpoint_before_it(run: Path) -> None:
    steps = (run / "production/leg2/training.csv").read_text().splitlines()[1:]
    assert [line.split(",")[0] for line in steps] == [str(n) for n in range(51, 101)]
    assert (run / "production/leg2.unfinished1").is_dir()
    assert (run / "production/leg2/checkpoints/step_100").is_dir()


@pytest.mark.slow
@pytest.mark.e2e
def test_a_resumed_launch_trains_the_same_losses(run: Path) -> None:
    found = row(run, "extended.resumed")
    assert found.outcome is Outcome.PASS
    assert "steps 56 to 60 give the same losses, bit for bit; the checkpoint took" in found.reason


@pytest.mark.slow
@pytest.mark.e2e
def test_tensorboard_is_on_in_production_only(run: Path) -> None:
    assert list(run.glob("production/leg*/tb/*"))
    assert not list(run.glob("smoke/run/tb/*"))


@pytest.mark.slow
@pytest.mark.e2e
def test_every_number_can_be_computed_again(run: Path) -> None:
    done = runbook("verify", str(run), cwd=run.parent)
    assert done.code == 0, done.out


@pytest.mark.slow
@pytest.mark.e2e
def test_a_launch_that_is_over_goes_no_further(run: Path) -> None:
    for words, told in (((), "is finished: GO"), (("--until", "smoke"), "leave out --until")):
        done = runbook("launch", "--resume", run.name, "--out", "runs", *words, cwd=run.parents[1])
        assert done.code == 2
        assert told in done.err


def test_production_is_refused_without_a_go_before_anything_starts(tmp_path: Path) -> None:
    done = runbook("launch", *WORDS, cwd=tmp_path)
    assert (done.code, list(tmp_path.iterdir())) == (2, [])
    assert "production starts only behind a GO" in done.err
    assert "runbook run --phase all --profile cpu --out" in done.err
    assert "--until extended" in done.err


def test_until_needs_none_and_shows_its_phases_alone(tmp_path: Path) -> None:
    done = runbook("launch", *WORDS, "--until", "smoke", "--dry-run", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "# 3/3 smoke" in done.out and "# plan     production\n" in done.out
    assert "extended" not in done.out.partition("# 1/3")[2]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--until", "smok"), "did you mean 'smoke'?); there are: preflight, sanity, smoke"),
        (("--plan", "prod"), "there are: production, validation"),
        (("--plan", "bad.yaml", "--without-go"), "phases.smoke.legs: 7 do not divide 300 steps"),
        (("--config", "none.yaml", "--until", "smoke"), "no trainer config 'none.yaml'"),
        (("--keep-going",), "unknown option --keep-going"),
    ],
)
def test_what_is_wrong_is_told_with_what_is_allowed(
    tmp_path: Path, words: tuple[str, ...], told: str
) -> None:
    (tmp_path / "bad.yaml").write_text("extends: production\nphases: {smoke: {legs: 7}}\n")
    done = runbook("launch", *WORDS, *words, cwd=tmp_path)
    assert done.code == 2
    assert told in done.err
    assert not (tmp_path / "runs").exists()
