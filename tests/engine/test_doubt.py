"""No command repeats the verdict of a run.json that nothing beside it vouches for."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runbook.cli import main
from runbook.folder.manifest import write_manifest
from tests.cli.shell import Ended, inside
from tests.frozen import corpus
from tests.shared import once


def verdict_in(report: str) -> str:
    found = re.search(r"^(GO|INCOMPLETE|PARTIAL PASS)\b", report, re.MULTILINE)
    return found[0] if found else ""


def edit(folder: Path) -> None:
    path = folder / "run.json"
    text = path.read_text()
    assert '"verdict": "GO"' in text
    path.write_text(text.replace('"verdict": "GO"', '"verdict": "PARTIAL PASS"'))


def remade(folder: Path) -> None:
    edit(folder)
    write_manifest(folder)


def removed(folder: Path) -> None:
    (folder / "MANIFEST.sha256").unlink()


def nonsense(folder: Path) -> None:
    (folder / "MANIFEST.sha256").write_text("no digest\n")


def damaged(folder: Path) -> None:
    path = folder / "events.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"seq":2,', b'"seq":9,'))
    write_manifest(folder)


SPOILED = {
    "edited": (edit, "is another file than its MANIFEST.sha256 has"),
    "edited, with a manifest made anew": (remade, "contradicts its events.jsonl, which gives GO"),
    "without its manifest": (removed, "has no MANIFEST.sha256 beside it (removed, or cut off"),
    "with a manifest of no digests": (nonsense, "is another file than its MANIFEST.sha256 has"),
    "beside a damaged journal": (damaged, "line 2 is damaged or out of order"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_what_nothing_vouches_for_is_told_in_the_place_of_its_verdict(
    folder: Path, name: str
) -> None:
    spoil, why = SPOILED[name]
    before = inside("report", str(folder), cwd=folder.parent)
    assert (before.code, verdict_in(before.out)) == (0, "GO")
    spoil(folder)
    out = ("--out", str(folder.parent))
    report = inside("report", *out, cwd=folder.parent)
    assert (report.code, verdict_in(report.out)) == (3, "INCOMPLETE") and why in report.out
    named = "MANIFEST.sha256" if spoil is removed else "run.json"
    assert f"warning: changed since the run: {named}" in report.err
    (_, row) = inside("history", *out, cwd=folder.parent).out.splitlines()
    assert "  INCOMPLETE  " in row and why in row and " GO " not in row and "PASS" not in row
    history = inside("history", "baseline.rate", *out, cwd=folder.parent)
    assert history.code == 2 and "no run has recorded any" in history.err
    for target in ("-", "x.csv"):
        export = inside("export", *out, "--to", "csv", target, cwd=folder.parent)
        assert (export.code, export.out) == (2, "") and why in export.err
    assert f"`runbook verify {folder.name}` names what differs" in export.err
    assert not (folder.parent / "x.csv").exists()
    compared = inside("compare", str(folder), str(folder), cwd=folder.parent)
    assert compared.code == 3 and "NOT COMPARABLE" in compared.out and why in compared.out
    assert f"A  {folder.name}  INCOMPLETE" in compared.out


def alone(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name not in ("run.json", "report.html"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("change", [lambda _: None, alone])
def test_a_run_as_it_was_and_a_record_sent_on_alone_are_believed(
    folder: Path, change: Callable[[Path], object]
) -> None:
    change(folder)
    report = inside("report", str(folder), cwd=folder.parent)
    assert (report.code, verdict_in(report.out), report.err) == (0, "GO", "")
    (_, row) = inside("history", "--out", str(folder.parent), cwd=folder.parent).out.splitlines()
    assert "  GO  " in row


BASE = "baseline/run1"


@pytest.fixture
def folder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a real run of one phase, which was a PARTIAL PASS."""
    whole = once(tmp_path_factory, "judged", lambda new: corpus.unpack("partial", new))
    return Path(shutil.copytree(whole, tmp_path / whole.name))


def edited(name: str, old: str, new: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return spoil


def replaced(name: str, text: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / name).write_text(text)

    return spoil


SPOILED_JUDGE_ANYTHING: dict[str, Callable[[Path], None]] = {
    "spaces in the header": edited(f"{BASE}/training.csv", "step,loss,lr", "step, loss, lr"),
    "no loss": edited(f"{BASE}/training.csv", ",loss,", ",los,"),
    "an empty CSV": replaced(f"{BASE}/training.csv", ""),
    "env.json a list": replaced(f"{BASE}/env.json", "[]"),
    "effective a word": edited(f"{BASE}/env.json", '"effective": {', '"effective": "x", "e": {'),
    "numbers as text": edited(f"{BASE}/env.json", '"vocab_size": 256', '"vocab_size": "256"'),
    "toggles a number": edited(f"{BASE}/env.json", '"toggles": [', '"toggles": 3, "t": ['),
    "heartbeats a list": replaced(f"{BASE}/heartbeat_rank1.jsonl", "[]\n[1]\n"),
    "a proof of words": edited(
        f"{BASE}/heartbeat_rank0.jsonl", '"own_gradient": {', '"own_gradient": "x", "o": {'
    ),
}


@pytest.mark.parametrize("name", SPOILED_JUDGE_ANYTHING)
def test_a_spoiled_file_is_judged(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    SPOILED_JUDGE_ANYTHING[name](folder)
    # Spaces beside the commas change no value; everything else is damage.
    expected = (4,) if name == "spaces in the header" else (1, 3)
    assert main(["judge", str(folder)]) in expected
    assert "internal error" not in capsys.readouterr().err
    assert main(["inspect", str(folder)]) in (0, 1, 3)
    assert "internal error" not in capsys.readouterr().err


@pytest.mark.executes("runbook judge")
def test_limits_that_were_written_into_the_record_give_no_verdict(folder: Path) -> None:
    def judged() -> Ended:
        return inside("judge", str(folder), cwd=folder.parent)

    assert judged().code == 4 and "another file" not in judged().out
    text = (folder / "run.json").read_text()
    (folder / "run.json").write_text(text.replace('"title": "', '"title": "my ', 1))
    assert judged().code == 3 and "is another file than its MANIFEST.sha256 has" in judged().out
    (folder / "MANIFEST.sha256").unlink()
    assert judged().code == 3 and "has no MANIFEST.sha256 beside it" in judged().out


@pytest.mark.parametrize("facts", ["{", '{"a": {"name": 3}}'])
def test_verify_of_a_spoiled_record_is_an_answer(
    folder: Path, capsys: pytest.CaptureFixture[str], facts: str
) -> None:
    (folder / "facts.json").write_text(facts)
    (folder / "events.jsonl").write_text('{"seq":1,"event":"run_started","record":5}\n')
    assert main(["judge", str(folder)]) == 2
    assert main(["verify", str(folder)]) == 1
    assert "internal error" not in capsys.readouterr().err
