"""`runbook judge` on a run whose files were spoiled: an answer, never a defect of the program."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runbook.cli import main
from tests.cli.shell import Ended, inside
from tests.frozen import corpus
from tests.shared import once

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


SPOILED: dict[str, Callable[[Path], None]] = {
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


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_file_is_judged(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    SPOILED[name](folder)
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
