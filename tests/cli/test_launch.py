"""`runbook run` and `runbook launch` for real; a plan pre-empted and killed; what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from runbook.config import registry
from runbook.engine.plan import prepare as needs
from runbook.folder import run_folders
from runbook.folder.manifest import load_record
from runbook.records import Outcome, Verdict
from tests.cli.shell import ESCAPE, Ended, environment, inside, runbook
from tests.engine.test_interrupt_and_resume import digests
from tests.executed import note
from tests.shared import once

PLAN = """\
extends: production
name: short
phases:
  preflight: null
  smoke:
    checks: [completed, accounts, heartbeats, past_step_5, loss_finite, toggles_effective, gates]
  extended: {checks: [completed, as_planned, loss_finite, plausible, accounts, gates, resumed]}
  production:
    checks: [completed, ranks_alive, as_planned, accounts, gradients, checkpoint_time, goodput]
"""
WORDS = ("--profile", "cpu", "--steps-scale", "0.02", "--out", "runs")


def launched(folder: Path) -> Path:
    """The short plan, its first half, then the rest: pre-empted and killed in the last leg.

    Returns the run's folder.
    """
    (folder / "short.yaml").write_text(PLAN)
    words = ("--plan", "short.yaml", "--without-go", *WORDS, "--until", "smoke")
    begun = runbook("launch", *words, cwd=folder, timeout_s=500)
    assert begun.code == 4, begun.out + begun.err
    (run,) = (path.parent for path in folder.glob("runs/*/run.json"))
    resume = ("--resume", run.name, "--out", "runs")
    assert f"runbook launch --resume {run.name} --until production" in begun.out
    assert ended(folder, (*resume, "--until", "production"), begun_leg, preempt) == 3
    assert not (run / "production/leg2/checkpoints/step_100").exists()
    kept = digests(run / "production" / "leg1")
    assert ended(folder, resume, begun_leg_again, kill) == -signal.SIGKILL
    done = runbook("launch", *resume, cwd=folder, timeout_s=500)
    assert done.code == 0, done.out + done.err
    assert digests(run / "production" / "leg1") == kept, "what had finished is not repeated"
    return run


def ended(
    folder: Path,
    words: Sequence[str],
    when: Callable[[Path], Path | None],
    how: Callable[[subprocess.Popen[bytes], Path], None],
) -> int:
    """The exit code of a launch that is ended in the middle of a leg."""
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "runbook", "launch", *words, "--quiet"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
    ) as harness:
        give_up = time.monotonic() + 500
        while (leg := when(folder)) is None:
            assert harness.poll() is None and time.monotonic() < give_up
            time.sleep(0.02)
        note(("runbook", "launch", *words))
        how(harness, leg)
        return harness.wait(timeout=300)


def begun_leg(folder: Path) -> Path | None:
    """The last leg, once it has trained a step."""
    rows = list(folder.glob("runs/*/production/leg2/training.csv"))
    return rows[0].parent if rows and rows[0].read_bytes().count(b"\n") > 1 else None


def begun_leg_again(folder: Path) -> Path | None:
    again = list(folder.glob("runs/*/production/leg2.unfinished1"))
    return begun_leg(folder) if again else None


def preempt(_harness: subprocess.Popen[bytes], leg: Path) -> None:
    """SIGTERM to one rank, as who wants the machine sends it."""
    first = (leg / "heartbeat_rank1.jsonl").read_text().partition("\n")[0]
    os.kill(json.loads(first)["pid"], signal.SIGTERM)


def kill(harness: subprocess.Popen[bytes], _leg: Path) -> None:
    harness.kill()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "launched", launched)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.executes(
    "runbook launch --until", "runbook launch --resume", "runbook launch --resume --until"
)
def test_a_launch_that_was_cut_off_twice_goes_on(run: Path) -> None:
    record = load_record(run)
    assert record.verdict is Verdict.GO, record.reasons
    names = [phase.name for phase in record.phases]
    assert names == ["sanity", "smoke", "extended", "production"]
    assert record.said.startswith("GO, STARTED WITHOUT A GO (of this configuration")
    assert "plan short" in record.caveats and "steps x 0.02" in record.caveats
    assert any("production/leg2 begun 3 times" in text for text in record.caveats)
    steps = (run / "production/leg2/training.csv").read_text().splitlines()[1:]
    assert [line.split(",")[0] for line in steps] == [str(n) for n in range(51, 101)]
    preempted, killed = (run / f"production/leg2.unfinished{number}" for number in (1, 2))
    last = (preempted / "heartbeat_rank1.jsonl").read_text().splitlines()[-1]
    assert (json.loads(last)["event"], json.loads(last)["code"]) == ("exit", 13)
    assert killed.is_dir()
    assert (run / "production/leg2/checkpoints/step_100").is_dir()
    resumed = next(check for check in record.checks() if check.id == "extended.resumed")
    assert resumed.outcome is Outcome.PASS
    assert "steps 196 to 200 give the same losses, bit for bit; the check" in resumed.reason
    spent = next(check for check in record.checks() if check.id == "production.goodput")
    assert spent.measurement and 0.01 < float(spent.measurement.value) < 0.5, spent.reason
    assert "in 4 start(s); shown, not gated" in spent.reason and ", lost 0 s" not in spent.reason
    assert list(run.glob("production/leg*/tb/*")), "TensorBoard is on in production only"
    assert not list(run.glob("smoke/run/tb/*"))


@pytest.mark.slow
@pytest.mark.e2e
def test_behind_it_every_number_recomputes_and_it_goes_no_further(run: Path) -> None:
    kept = hashlib.sha256((run / "run.json").read_bytes()).hexdigest()[:32]
    done = runbook("verify", str(run), "--fingerprint", kept, cwd=run.parent)
    assert done.code == 0, done.out
    assert done.out.splitlines()[-1] == f"fingerprint  {kept} (the one asked for)"
    for words, told in (((), "is finished: GO"), (("--until", "smoke"), "leave out --until")):
        done = runbook("launch", "--resume", run.name, "--out", "runs", *words, cwd=run.parents[1])
        assert done.code == 2
        assert told in done.err


@pytest.mark.executes("runbook launch --dry-run")
def test_a_refused_start_names_all_that_its_dry_run_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GO that it lacks, and what its documents do."""
    monkeypatch.setattr(
        needs, "_problems", lambda documents, *_: iter([f"{documents} is not there"])
    )
    for words in (("--dry-run",), ()):
        done = inside("launch", "--profile", "a100x2_pcie4", *words, cwd=tmp_path)
        said = done.out if words else done.err
        for told in (
            "needs a GO of this configuration",
            "fineweb_edu is not there (planned in smoke",
        ):
            assert told in said, said


NINE = [name for name, phase in registry.phases().items() if not phase.optional]


@pytest.mark.e2e
def test_one_phase_alone_is_told_on_both_streams_and_can_never_be_a_go(
    one_phase: tuple[str, Path, Ended],
) -> None:
    phase, folder, ended = one_phase
    (root,) = run_folders(folder / "artifacts")
    record = load_record(root)
    assert (record.verdict, ended.code) == (Verdict.PARTIAL, 4)
    lines = ended.out.splitlines()
    asked = len(record.required) - len(record.left_out())
    assert lines[0] == (
        f"PARTIAL PASS {asked} of {asked}, {len(record.left_out())} more were not asked for "
        "(no training ran; function only, throughput not gated)"
    )
    others = [one for one in NINE if one != phase]
    assert f"runbook run --resume {root.name} --phase {','.join(others)}" in ended.out
    assert "export " not in ended.out
    assert root.stat().st_mode & 0o077 == 0, "for its owner only"
    where = f"artifacts/{root.name}"
    written = hashlib.sha256((root / "run.json").read_bytes()).hexdigest()
    assert lines[-3:] == [
        f"fingerprint  {written[:32]}",
        f"report  {where}/report.html",
        f"report  {where}/report.md",
    ]
    progress = ended.err.splitlines()
    assert progress[1].strip().startswith("not passed on: HF_TOKEN: no launch gets them")
    assert progress[2] == f"runbook 1.0.0  run {root.name}  1 phase  -> {where}"
    assert progress[-1].startswith(f" 1/1 {phase}  ")
    assert ESCAPE not in ended.out + ended.err


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.executes("runbook run")
def test_without_a_gpu_preflight_stops_a_gpu_run_before_its_first_launch(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: a100x2_pcie4\nbranch: null\n", encoding="utf-8")
    ended = runbook("run", "--profile", str(mine), cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    (root,) = run_folders(tmp_path / "artifacts")
    record = load_record(root)
    assert (ended.code, record.verdict) == (3, Verdict.INCOMPLETE)
    assert ended.out.startswith("INCOMPLETE (no training ran)\n")
    outcomes = {check.id: check.outcome for check in record.checks()}
    assert outcomes["preflight.cuda"] is Outcome.INVALID
    assert Outcome.FAIL not in outcomes.values()
    assert "later phases start nothing: preflight.cuda is INVALID: " in ended.err
    later = [phase for phase in record.phases if phase.name != "preflight"]
    assert len(later) == 8 and not any((root / phase.name).exists() for phase in later)
