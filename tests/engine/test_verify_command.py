"""`runbook verify` and `runbook judge` on a real run of the first phase."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from runbook.cli import main
from runbook.config.load import load_profile
from runbook.folder import run_folders
from runbook.records import Outcome, RunRecord, Verdict
from tests.cli.shell import Ended, inside

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.parametrize("one_phase", ["preflight"], indirect=True),
]


@pytest.mark.executes("runbook judge")
def test_a_real_run_is_verified_judged_again_and_edited(
    one_phase: tuple[str, Path, Ended], tmp_path: Path
) -> None:
    (made,) = run_folders(one_phase[1] / "artifacts")
    folder = Path(shutil.copytree(made, tmp_path / made.name))
    record = RunRecord.model_validate_json((folder / "run.json").read_bytes())
    assert record.verdict is Verdict.PARTIAL  # eight phases were not asked for
    phase = next(phase for phase in record.phases if phase.name == "preflight")
    assert phase.outcome is Outcome.PASS, phase.checks
    verified = inside("verify", str(folder), cwd=tmp_path)
    assert verified.code == 0 and "nothing differs" in verified.out
    judged = inside("judge", str(folder), "--profile", "h200x1", "--json", cwd=tmp_path)
    assert judged.code == 3 and json.loads(judged.out)
    report = folder / "report.md"
    report.write_bytes(report.read_bytes().replace(b"PASS", b"pass", 1))
    verified = inside("verify", str(folder), "--json", cwd=tmp_path)
    found = json.loads(verified.out)
    assert verified.code == 1 and found["ok"] is False
    assert any(text.startswith("report.md: line") for text in found["differences"])


def test_a_gpu_profile_that_requires_one_check_does_not_make_a_cpu_run_a_gpu_one(
    one_phase: tuple[str, Path, Ended], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under the shipped profile's own name and title, which nobody measured here."""
    (folder,) = run_folders(one_phase[1] / "artifacts")
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: a100x2_pcie4\nrequired: [preflight.torch]\n", encoding="utf-8")
    checks = len(load_profile("a100x2_pcie4").required)
    assert main(["judge", str(folder), "--profile", str(mine)]) == 0
    out = capsys.readouterr().out
    first = next(line for line in out.splitlines() if line.startswith("GO"))
    assert first == (
        f"GO for 1 of {checks} checks (no training ran; function only, throughput not gated)"
    )
