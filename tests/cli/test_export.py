"""`runbook export` writes where it is told, and says what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runbook.cli import main
from runbook.folder.manifest import record_text
from tests.cli.shell import runbook
from tests.reports import samples


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    run = tmp_path / "artifacts" / samples.go().run_id
    run.mkdir(parents=True)
    (run / "run.json").write_text(record_text(samples.go()))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_each_format_in_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "x.prom").write_text("old")
    old = (folder / "x.prom").stat().st_ino
    assert main(["export", "--to", "csv", "x.csv"]) == 0
    assert main(["export", "--to", "prometheus", "x.prom"]) == 0
    assert capsys.readouterr().out == "x.csv\nx.prom\n"
    assert (folder / "x.csv").read_text().startswith("run_id,")
    assert 'runbook_verdict{verdict="GO"} 1.0\n' in (folder / "x.prom").read_text()
    # Replaced, not written into: a collector never reads half a file.
    assert (folder / "x.prom").stat().st_ino != old
    assert sorted(path.name for path in folder.iterdir()) == ["artifacts", "x.csv", "x.prom"]


def test_stdout_and_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "2026", "--to", "csv", "-"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) == 4
    assert main(["export", "--to", "csv", "x.csv", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["exports"] == [{"format": "csv", "written": ["x.csv"]}]


def test_without_the_package_the_error_says_what_to_install(folder: Path) -> None:
    hidden = folder / "hidden"
    hidden.mkdir()
    (hidden / "prometheus_client.py").write_text("raise ImportError('not here')\n")
    words = ("export", "--to", "prometheus", "b.prom")
    ended = runbook(*words, cwd=folder, PYTHONPATH=str(hidden))
    assert ended.code == 2
    assert "pip install 'nsa-runbook[prometheus]'" in ended.err
    assert not (folder / "b.prom").exists()
