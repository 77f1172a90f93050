"""Old runs go; the newest, what goes on, what others are held against and everything else stays."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from runbook.cli import main
from runbook.errors import RunbookError
from runbook.folder.journal import Journal
from runbook.records import RunRecord, Verdict
from runbook.tools.prune import find_old, remove_run
from tests.engine.test_trends import at

NOW = datetime(2026, 11, 22, tzinfo=UTC)
DAYS = timedelta(days=1)


def made(out: Path, day: int, record: RunRecord | None = None, **fields: object) -> str:
    """A run folder of that day of November with a journal, as the engine leaves it."""
    name = f"202611{day:02d}T000000Z-840303b"
    folder = out / name
    folder.mkdir(parents=True)
    started = f"2026-11-{day:02d}T00:00:00Z"
    whole = (record or at(40.0)).model_copy(
        update={"run_id": name, "started_at": started, **fields}
    )
    with Journal.create(folder) as journal:
        journal.append("run_started", record=whole.model_dump(mode="json"))
    (folder / "run.json").write_text(whole.model_dump_json())
    return name


def kept(out: Path, *, keep: int = 1, days: int = 0, everything: bool = False) -> dict[str, str]:
    found = find_old(out, keep=keep, older_than=days * DAYS, everything=everything, now=NOW)
    return {one.run_id[6:8]: one.kept for one in found}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """NO-GO runs, which nothing is held against."""
    for day in range(1, 9):
        made(tmp_path, day, verdict=Verdict.NO_GO)
    return tmp_path


def test_the_newest_stays_whatever_is_asked(out: Path) -> None:
    assert [day for day, why in kept(out, everything=True).items() if why] == ["08"]
    assert [day for day, why in kept(out, keep=3).items() if why] == ["06", "07", "08"]
    assert [day for day, why in kept(out, days=18).items() if why] == ["05", "06", "07", "08"]
    both = kept(out, keep=2, days=20)
    assert [day for day, why in both.items() if why] == ["03", "04", "05", "06", "07", "08"]


def test_what_later_runs_are_held_against_stays(tmp_path: Path) -> None:
    rates = [50.0, 50.0, 50.0, 50.0, 50.0, 40.0, 41.0, 42.0]
    for day, rate in enumerate(rates, start=1):
        made(tmp_path, day, at(rate))
    made(tmp_path, 9, verdict=Verdict.NO_GO)
    reasons = kept(tmp_path)
    held = [day for day, why in reasons.items() if "held against" in why]
    assert held == ["01", "02", "03", "04", "05", "08"]
    assert reasons["06"] == reasons["07"] == ""
    assert [day for day, why in kept(tmp_path, everything=True).items() if why] == ["09"]


def test_a_run_that_goes_on_stays_and_is_not_removed(out: Path) -> None:
    name = "20261101T000000Z-840303b"
    with Journal.reopen(out / name):
        assert kept(out)["01"] == "still going on"
        with pytest.raises(RunbookError, match="still going on"):
            remove_run(out, name)
        with pytest.raises(RunbookError, match="still going on"):
            Journal.reopen(out / name)
    assert kept(out)["01"] == ""
    assert (out / name / "run.json").exists()


def strangers(out: Path) -> list[Path]:
    """What looks like a run and is none."""
    outside = out.parent / f"{out.name}-outside" / "20261101T000001Z-840303b"
    outside.mkdir(parents=True)
    (outside / "events.jsonl").write_text("precious")
    link = out / outside.name
    link.symlink_to(outside)
    folders = {
        "20261101T000002Z-840303b": None,
        "20261101T000003Z-840303b": "not a journal\n",
        "mine": '{"seq": 1, "event": "run_started", "record": {"run_id": "mine"}}\n',
        "20261101T000004Z-840303b\n": "",
        "20261399T999999Z-840303b": "",
    }
    for name, text in folders.items():
        (out / name).mkdir()
        if text is not None:
            (out / name / "events.jsonl").write_text(text)
    renamed = out / "20261101T000005Z-840303b"
    shutil.copytree(out / "20261101T000000Z-840303b", renamed)
    (out / "notes.txt").write_text("mine")
    linked = out / "20261101T000006Z-840303b"
    linked.mkdir()
    (linked / "events.jsonl").symlink_to(out / "20261101T000000Z-840303b" / "events.jsonl")
    return [link, renamed, linked, out / "notes.txt", outside, *(out / name for name in folders)]


def test_nothing_but_run_folders_is_ever_removed(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = strangers(out)
    target = out.parent / "target"
    target.mkdir()
    (target / "file").write_text("mine")
    (out / "20261102T000000Z-840303b" / "link").symlink_to(target)
    for name in (path.name for path in others):
        with pytest.raises(RunbookError, match="no run folder"):
            remove_run(out, name)
    assert main(["prune", "--keep", "1", "--yes", "--all", "--out", str(out)]) == 0
    assert "7 of 8 runs removed" in capsys.readouterr().out
    assert all(path.exists() for path in others)
    assert (target / "file").read_text() == "mine"
    left = {path.name for path in out.iterdir()} - {path.name for path in others}
    assert left <= {"20261108T000000Z-840303b", "history.sqlite3"}


@pytest.mark.parametrize("name", ["..", "../x", ".", ""])
def test_a_name_never_leads_out_of_the_folder(out: Path, name: str) -> None:
    with pytest.raises(RunbookError, match="no run folder"):
        remove_run(out, name)


def test_without_yes_it_only_prints(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--dry-run"]):
        assert main(["prune", "--keep", "2", "--out", str(out), *more]) == 0
        said = capsys.readouterr().out
        assert "6 of 8 runs would go" in said and "--yes removes them" in said
        assert "stays: one of the newest" in said
    assert len(list(out.glob("2026*"))) == 8


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "say which runs are old"),
        (["--keep", "1", "--yes", "--dry-run"], "give one of them"),
        (["--keep", "0"], "1 or more"),
        (["--older-than", "30"], "must be like 30d"),
    ],
)
def test_wrong_words(
    out: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prune", "--out", str(out), *words]) == 2
    assert says in capsys.readouterr().err
