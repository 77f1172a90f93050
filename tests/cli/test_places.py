"""Places that cannot be written: exit code 2, what is refused, where, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from runbook.files import data_path
from runbook.folder.journal import Journal
from runbook.folder.manifest import write_manifest
from runbook.records import RunRecord
from tests.cli.shell import Ended, inside
from tests.engine.test_trends import at

# The first two refuse new entries, also to root.
PLACES = ["/proc/x", "/sys/x", "file/x"]
MENDS = "; name a folder that can be written\n"


def made(out: Path, day: int, record: RunRecord) -> str:
    """A run folder of that day of November with a journal, as the engine leaves it."""
    name = f"202611{day:02d}T000000Z-840303b"
    folder = out / name
    folder.mkdir(parents=True)
    started = f"2026-11-{day:02d}T00:00:00Z"
    whole = record.model_copy(update={"run_id": name, "started_at": started})
    with Journal.create(folder) as journal:
        journal.append("run_started", record=whole.model_dump(mode="json"))
    (folder / "run.json").write_text(whole.model_dump_json())
    return name


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with two runs in `artifacts`, and a file that stands where a folder is wanted."""
    made(tmp_path / "artifacts", 1, at(40.0))
    write_manifest(tmp_path / "artifacts" / made(tmp_path / "artifacts", 2, at(41.0)))
    (tmp_path / "file").write_text("")
    return tmp_path


def is_told(ended: Ended, what: str) -> None:
    """One line of stderr that says it, and no traceback anywhere."""
    assert ended.code == 2, ended.err
    assert what in ended.err.splitlines()[-1]
    assert "internal error" not in ended.err and "Traceback" not in ended.err


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "words",
    [
        ("drill", "--faults", "exit", "--out"),
        ("init", "--tokens-per-rank", "8", "--profile", "cpu", "--trainer", "true {steps}", "-o"),
        ("triage", "--steps", "5", "--ranks", "1", "config.yaml", "--out"),
    ],
    ids=lambda words: words[0],
)
def test_a_folder_that_cannot_be_made(here: Path, words: tuple[str, ...], place: str) -> None:
    config = data_path("configs") / "cpu_smoke.yaml"
    (here / "config.yaml").write_text(config.read_text())
    ended = inside(*words, place, cwd=here)
    is_told(ended, f"--out {place if words[0] == 'init' else here / place}")
    assert ended.err.endswith(MENDS) and "no folder can be made there: " in ended.err


@pytest.mark.parametrize("place", ["/proc/x", "/sys/x"])
@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (("export", "--to", "csv"), "--to csv"),
        (("export", "--to", "prometheus"), "--to prometheus"),
        (("export", "--to", "bundle"), "--to bundle"),
        (("history", "--html"), "--html"),
        (("compare", "20261101", "20261102", "--html"), "--html"),
    ],
)
def test_a_file_that_cannot_be_written(
    here: Path, words: tuple[str, ...], flag: str, place: str
) -> None:
    target = f"{place}.prom" if "prometheus" in words else place
    ended = inside(*words, target, cwd=here)
    is_told(ended, f"{flag} {target}: cannot be written: ")
    assert ended.err.endswith("; name a place that can be written\n")


def test_a_new_folder_that_is_there_already(here: Path) -> None:
    ended = inside("drill", "--faults", "exit", "--out", "artifacts", cwd=here)
    is_told(ended, f"--out {here / 'artifacts'}: is there already; name a new folder")
