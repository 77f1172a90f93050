"""`runbook judge` on a run whose files were spoiled: an answer, never a defect of the program."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runbook import __version__
from runbook.cli import main
from runbook.config.load import load_profile
from runbook.config.setup import RunOptions
from runbook.engine.judge import record_of
from runbook.folder.manifest import record_text, write_manifest
from runbook.records import LaunchEntry, RunRecord, Verdict
from tests.phases import builder, on_disk
from tests.shared import once

WHERE = builder.context("cpu")
NAMES = ("baseline", "long_run")


@pytest.fixture
def folder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    whole = once(tmp_path_factory, "judged", judged)
    return Path(shutil.copytree(whole, tmp_path / whole.name))


def judged(folder: Path) -> Path:
    """A run of two phases as the engine leaves it, as far as `judge` reads it."""
    root = folder / "20260101T000000Z-0000000"
    root.mkdir()
    profile, phases = load_profile("cpu"), []
    for name in NAMES:
        found = builder.evidence(name, WHERE)
        for made in found.launches.values():
            on_disk.write_launch(root, made)
        entries = [
            LaunchEntry(launch=one.launch, result=one.result) for one in found.launches.values()
        ]
        judgement = builder.judge(name, found, WHERE)
        phases.append(
            record_of(builder.PHASES[name], judgement, entries, started_at="x", duration_s=1.0)
        )
    record = RunRecord(
        tool_version=__version__,
        run_id=root.name,
        profile="cpu",
        profile_sha256="0" * 64,
        profile_document=profile.model_dump(mode="json"),
        scope="",
        verdict=Verdict.INCOMPLETE,
        reasons=(),
        started_at="x",
        finished_at="x",
        command="",
        options=RunOptions(profile="cpu", phases=",".join(NAMES)).document(),
        required=profile.required,
        phases=tuple(phases),
    )
    (root / "run.json").write_text(record_text(record))
    return root


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
    "no loss": edited("baseline/run1/training.csv", ",loss,", ",los,"),
    "spaces in the header": edited("baseline/run1/training.csv", "step,loss,lr", "step, loss, lr"),
    "an empty CSV": replaced("baseline/run1/training.csv", ""),
    "no entropy": edited("long_run/run/gates.csv", "entropy", "entropie"),
    "an empty gates.csv": replaced("long_run/run/gates.csv", ""),
    "env.json a list": replaced("baseline/run1/env.json", "[]"),
    "env.json a word": replaced("baseline/run1/env.json", '"x"'),
    "effective a word": edited(
        "baseline/run1/env.json", '"effective": {', '"effective": "x", "e": {'
    ),
    "numbers as text": edited("long_run/run/env.json", '"vocab_size": 256', '"vocab_size": "256"'),
    "toggles a number": edited("baseline/run1/env.json", '"toggles": [', '"toggles": 3, "t": ['),
    "no heartbeat": replaced("long_run/run/heartbeat_rank1.jsonl", ""),
    "heartbeats a list": replaced("long_run/run/heartbeat_rank1.jsonl", "[]\n[1]\n"),
    "a proof of words": edited(
        "baseline/run1/heartbeat_rank0.jsonl", '"own_gradient": {', '"own_gradient": "x", "o": {'
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


def test_limits_that_were_written_into_the_record_give_no_verdict(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_manifest(folder)
    assert main(["judge", str(folder)]) == 4
    assert "another file" not in capsys.readouterr().out
    text = (folder / "run.json").read_text()
    (folder / "run.json").write_text(text.replace('"title": "', '"title": "my ', 1))
    assert main(["judge", str(folder)]) == 3
    assert "is another file than its MANIFEST.sha256 has" in capsys.readouterr().out


@pytest.mark.parametrize("facts", ['["not", "facts"]', "{", '{"a": 5}', '{"a": {"name": 3}}'])
def test_verify_of_a_spoiled_record_is_an_answer(
    folder: Path, capsys: pytest.CaptureFixture[str], facts: str
) -> None:
    (folder / "facts.json").write_text(facts)
    (folder / "events.jsonl").write_text('{"seq":1,"event":"run_started","record":5}\n')
    assert main(["judge", str(folder)]) == 2
    assert main(["verify", str(folder)]) == 1
    assert "internal error" not in capsys.readouterr().err
