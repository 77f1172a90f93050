"""The page of exports: its examples run against the real clients, its names are the program's."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from runbook.cli import COMMANDS
from runbook.cli._parser import parse_all
from runbook.folder.manifest import record_text
from runbook.tools.export import prometheus_text
from tests.reports import samples

PAGE = Path(__file__).resolve().parents[2] / "docs" / "exporting.md"
TEXT = PAGE.read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"```python\n# (\w+)\n(.*?)```", TEXT, re.DOTALL))


# What a client needs for a store on this machine; mlflow-skinny comes without the last two.
NEEDS = {"mlflow": ("mlflow", "sqlalchemy", "alembic")}


def ran(name: str, folder: Path, **variables: str) -> None:
    """The page's example in a process of its own, on a run that was NO-GO."""
    for module in NEEDS[name]:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed here")
    (folder / "run.json").write_text(record_text(samples.no_go()))
    (folder / "example.py").write_text(EXAMPLES[name])
    done = subprocess.run(
        [sys.executable, "example.py", "run.json"],
        cwd=folder,
        env={**os.environ, "HOME": str(folder), **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_example_has_at_most_twenty_lines() -> None:
    assert sorted(EXAMPLES) == ["mlflow"]
    assert all(len(code.splitlines()) <= 20 for code in EXAMPLES.values())
    for code in EXAMPLES.values():
        compile(code, "example", "exec")


def test_mlflow_keeps_verdict_and_numbers(tmp_path: Path) -> None:
    ran("mlflow", tmp_path)
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        metrics = dict(database.execute("SELECT key, value FROM latest_metrics"))
        tags = dict(database.execute("SELECT key, value FROM tags"))
    database.close()
    assert metrics == {"baseline.throughput": 23.0, "long_run.no_halt": 1200.0}
    assert tags["verdict"] == "NO-GO"


def test_every_command_on_the_page_is_taken() -> None:
    lines = re.findall(r"runbook (?:run|export|history)\b[^`;|\n]*", TEXT)
    assert len(lines) >= 5
    for line in lines:
        _, name, *words = shlex.split(line)
        assert parse_all(COMMANDS[name].parser(), words)[1] == [], line


def test_every_metric_on_the_page_is_written_and_the_other_way_round() -> None:
    record = samples.go()
    phases = tuple(
        one.model_copy(update={"started_at": record.started_at}) for one in record.phases
    )
    text = prometheus_text(record.model_copy(update={"phases": phases}))
    written = set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))
    assert set(re.findall(r"\brunbook_\w+", TEXT)) == written
