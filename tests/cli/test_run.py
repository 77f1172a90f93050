"""`runbook run` for real, in processes of its own: what it prints, leaves behind and exits with."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from runbook.config import registry
from runbook.folder import run_folders
from runbook.records import LaunchStatus, Outcome, RunRecord, Verdict
from tests.cli.shell import ESCAPE, Ended, runbook

pytestmark = pytest.mark.e2e
NINE = [name for name, phase in registry.phases().items() if not phase.optional]


def test_one_phase_alone_can_never_be_a_go(one_phase: tuple[str, Path, Ended]) -> None:
    phase, folder, ended = one_phase
    (root,) = run_folders(folder / "artifacts")
    record = RunRecord.model_validate_json((root / "run.json").read_bytes())
    assert record.verdict is Verdict.PARTIAL
    assert ended.code == 4
    lines = ended.out.splitlines()
    asked = len(record.required) - len(record.left_out())
    assert lines[0] == (
        f"PARTIAL PASS {asked} of {asked}, {len(record.left_out())} more were not asked for "
        "(no training ran; function only, throughput not gated)"
    )
    others = [one for one in NINE if one != phase]
    assert f"runbook run --resume {root.name} --phase {','.join(others)}" in ended.out
    assert len(lines) < 10 and "export " not in ended.out and "GO" not in lines[0]
    assert root.stat().st_mode & 0o077 == 0, "for its owner only"


def test_the_result_on_stdout_and_the_progress_on_stderr(
    one_phase: tuple[str, Path, Ended],
) -> None:
    phase, folder, ended = one_phase
    out, err = ended.out, ended.err
    (root,) = run_folders(folder / "artifacts")
    where = f"artifacts/{root.name}"
    assert re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-z]{7}", root.name)
    written = hashlib.sha256((root / "run.json").read_bytes()).hexdigest()
    assert out.splitlines()[-3:] == [
        f"fingerprint  {written[:32]}",
        f"report  {where}/report.html",
        f"report  {where}/report.md",
    ]
    for name in ("report.html", "report.md", "junit.xml", "ctrf.json", "report.txt"):
        assert (root / name).stat().st_size > 0
    lines = err.splitlines()
    assert lines[1].strip().startswith("not passed on: HF_TOKEN: no launch gets them")
    assert lines[2] == f"runbook 0.1.0  run {root.name}  1 phase  -> {where}"
    assert re.fullmatch(
        rf" 1/1 {phase}  [A-Z]+ +checks: \d+ of \d+(?:, \d+ skipped)? +\d.*s", lines[-1]
    )
    assert ESCAPE not in out + err


def _without_a_gpu(cwd: Path, *asked: str) -> tuple[RunRecord, Ended, Path]:
    """The record of a run for two GPUs, on a machine that has none to offer."""
    mine = cwd / "mine.yaml"
    mine.write_text("extends: a100x2_pcie4\nbranch: null\n", encoding="utf-8")
    words = ("run", *asked, "--profile", str(mine), "--protocol", "single")
    ended = runbook(*words, cwd=cwd, timeout_s=300, CUDA_VISIBLE_DEVICES="")
    (root,) = run_folders(cwd / "artifacts")
    return RunRecord.model_validate_json((root / "run.json").read_bytes()), ended, root


@pytest.mark.slow
@pytest.mark.executes("runbook run")
def test_without_a_gpu_preflight_stops_a_gpu_run_before_its_first_launch(tmp_path: Path) -> None:
    record, ended, root = _without_a_gpu(tmp_path)
    assert (ended.code, record.verdict) == (3, Verdict.INCOMPLETE)
    assert ended.out.startswith("INCOMPLETE (no training ran)\n")
    rows = {check.id: check for check in record.checks()}
    assert rows["preflight.cuda"].outcome is Outcome.INVALID
    assert Outcome.FAIL not in {check.outcome for check in rows.values()}
    assert "later phases start nothing: preflight.cuda is INVALID: " in ended.err
    later = [phase for phase in record.phases if phase.name != "preflight"]
    ends = {entry.result.status for phase in later for entry in phase.launches}
    assert len(later) == 8 and ends == {LaunchStatus.NOT_RUN}
    assert not any((root / phase.name).exists() for phase in later)
