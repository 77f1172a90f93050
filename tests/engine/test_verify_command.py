"""`runbook verify` and `runbook judge` on a real run of the first phase."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from runbook.cli import main
from runbook.records import Outcome, RunRecord, Verdict
from tests.cli.shell import Ended

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_a_real_run_is_verified_judged_again_and_edited(
    preflight: tuple[Path, Ended], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (made,) = (preflight[0] / "artifacts").iterdir()
    folder = Path(shutil.copytree(made, tmp_path / made.name))
    record = RunRecord.model_validate_json((folder / "run.json").read_bytes())
    assert record.verdict is Verdict.INCOMPLETE  # eight phases were not asked for
    phase = next(phase for phase in record.phases if phase.name == "preflight")
    assert phase.outcome is Outcome.PASS, phase.checks
    assert main(["verify", str(folder)]) == 0
    assert "nothing differs" in capsys.readouterr().out
    assert main(["judge", str(folder), "--profile", "h200x1", "--json"]) == 3
    judged = json.loads(capsys.readouterr().out)
    assert judged
    report = folder / "report.md"
    report.write_bytes(report.read_bytes().replace(b"PASS", b"pass", 1))
    assert main(["verify", str(folder), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert any(text.startswith("report.md: line") for text in found["differences"])


@pytest.mark.parametrize(
    "words", [["verify", "nothing"], ["judge", "nothing"], ["judge", "--format", "pfd"]]
)
def test_what_is_not_there_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main([*words, "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("runbook: error: ")
