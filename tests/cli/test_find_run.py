"""A run is found by nothing, its id, the start of it, or a path; damage is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runbook.cli._runs import find_run
from runbook.errors import RunbookError, UsageError
from runbook.folder.manifest import load_record
from tests.reports import samples

OLD, NEW = "20261120T000000Z-aaaaaaa", "20261121T010203Z-840303b"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, record in ((OLD, samples.no_go()), (NEW, samples.go())):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(record.model_dump_json())
    (tmp_path / "20269999T000000Z-not-a-run").mkdir()
    (tmp_path / "latest.txt").write_text("x")
    return tmp_path


@pytest.mark.parametrize("text", [OLD, "20261120", "202611200"[:8] + "T"])
def test_an_id_or_its_start(runs: Path, text: str) -> None:
    assert find_run(text, runs).name == OLD


def test_a_folder_or_its_record_anywhere(runs: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "nowhere"
    assert find_run(str(runs / OLD), elsewhere) == runs / OLD
    assert find_run(str(runs / OLD / "run.json"), elsewhere) == runs / OLD


_NEWEST = """
import sys
from pathlib import Path
from runbook.cli._runs import find_run
print(find_run(None, Path(sys.argv[1])).name)
"""


def test_a_run_that_only_another_user_may_look_into_hides_no_other(runs: Path) -> None:
    (runs / NEW).chmod(0)
    asked = [sys.executable, "-c", _NEWEST, str(runs)]
    if os.access(runs / NEW, os.X_OK):
        # Root may look everywhere, but not from a namespace that does not know the owner.
        asked = ["unshare", "-U", *asked]
        if subprocess.run([*asked[:2], "true"], check=False).returncode:
            pytest.skip("this machine does not permit a namespace of users (unshare -U)")
    told = subprocess.run(
        asked,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    (runs / NEW).chmod(0o700)
    assert told.stdout == f"{OLD}\n", told.stderr


def test_a_start_that_fits_two_names_both(runs: Path) -> None:
    with pytest.raises(UsageError, match=f"fits several runs in .*: {OLD}, {NEW}"):
        find_run("2026112", runs)


def test_an_unknown_one_names_the_nearest_and_the_last(runs: Path) -> None:
    with pytest.raises(UsageError) as caught:
        find_run("20261121T010203Z-840303a", runs)
    assert f"did you mean '{NEW}'?" in str(caught.value)
    assert f"{OLD}, {NEW}" in str(caught.value)


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"schema_version": 2}', "\x00"])
def test_a_damaged_record_is_an_error_in_words(runs: Path, damage: str) -> None:
    (runs / NEW / "run.json").write_text(damage)
    with pytest.raises(RunbookError, match=r"run\.json is not a run record of this version"):
        load_record(runs / NEW)


def test_an_unknown_field_is_not_skipped(runs: Path) -> None:
    document = json.loads((runs / NEW / "run.json").read_text())
    document["verdct"] = "GO"
    (runs / NEW / "run.json").write_text(json.dumps(document))
    with pytest.raises(RunbookError, match="verdct"):
        load_record(runs / NEW)
