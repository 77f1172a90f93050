"""`runbook` alone: what there is in this folder and what to do next, whatever lies there."""

from __future__ import annotations

import fcntl
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from reports.view import build_view
from runbook.cli import COMMANDS, in_full
from runbook.cli._parser import parse_all
from runbook.folder.manifest import write_record
from runbook.records import LaunchStatus, RunRecord, Verdict
from tests.cli.shell import inside
from tests.frozen import corpus
from tests.reports import samples

RUN = "20260101T000000Z-abc1234"
STARTED = {"seq": 1, "event": "run_started", "phases": ["preflight", "baseline"]}
PHASE = {"seq": 2, "event": "phase_finished", "interrupted": False}
ENDED = {"seq": 3, "event": "run_finished"}


def begin(tmp_path: Path, *events: object, name: str = RUN) -> Path:
    folder = tmp_path / "artifacts" / name
    folder.mkdir(parents=True)
    journal = folder / "events.jsonl"
    journal.write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "gone").symlink_to("nowhere")
    return folder


def finish(tmp_path: Path, record: RunRecord, name: str = RUN, **changed: object) -> None:
    folder = begin(tmp_path, name=name)
    (folder / "events.jsonl").unlink()
    write_record(folder, record.model_copy(update={"run_id": name, **changed}))


def test_a_verdict_that_nothing_vouches_for_is_not_repeated(tmp_path: Path) -> None:
    write_record(begin(tmp_path, STARTED, PHASE, ENDED), samples.go())
    text, commands = told(tmp_path)
    assert f"artifacts/{RUN}: its run.json has no MANIFEST.sha256 beside it" in text
    assert "GO" not in text and commands == [f"verify artifacts/{RUN}"]


def told(tmp_path: Path, **variables: str) -> tuple[str, list[str]]:
    """All that is said, and the commands that come next; each has to be one."""
    ended = inside(cwd=tmp_path, **variables)
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert len(lines) <= 10
    first = next(index for index, line in enumerate(lines) if line.startswith("next "))
    commands = [line[9:].split("  ")[0] for line in lines[first:]]
    for command in commands[:-1]:
        name, *words = in_full(shlex.split(command)[1:])
        # Its help ends the program.
        assert words == ["--help"] or parse_all(COMMANDS[name].parser(), words)[1] == []
    return ended.out, [command.removeprefix("runbook ") for command in commands[:-1]]


def test_without_a_run_the_first_command_is_named(tmp_path: Path) -> None:
    text, commands = told(tmp_path)
    assert "none in artifacts/" in text
    assert "--profile auto takes cpu: nvidia-smi" in text
    assert commands == ["run --dry-run", "run", "init --help"]
    assert list(tmp_path.iterdir()) == []


def test_the_newest_run_gives_its_verdict_and_a_go_leads_to_its_launch(tmp_path: Path) -> None:
    finish(tmp_path, samples.no_go(), name="20250101T000000Z-0000000")
    asked = {"profile": "cpu", "settings": {"train.lr": "1e-4"}, "options": {"profile": "cpu"}}
    finish(tmp_path, samples.go(), caveats=("for 1 of 72 checks", "model changed"), **asked)
    text, commands = told(tmp_path)
    assert f"artifacts/{RUN}: GO for 1 of 72 checks, model changed ({samples.go().scope})" in text
    assert samples.go().reasons[0] in text and "0000000" not in text
    launch = "launch --profile cpu --set train.lr=1e-4"
    assert commands == [launch, f"report artifacts/{RUN}", f"verify artifacts/{RUN}"]


CRASHED = samples.baseline(samples.no_go().phases[1].checks[0], status=LaunchStatus.CRASHED)
PLAN = {"options": {"plan": "production"}}


@pytest.mark.parametrize(
    ("record", "changed", "besides"),
    [
        (samples.go(), PLAN, ["verify {}"]),
        (samples.no_go(), {}, []),
        (samples.no_go(), {"phases": (CRASHED,)}, ["triage {}"]),
        (samples.go(), {"verdict": Verdict.PARTIAL}, []),
    ],
)
def test_what_the_reports_name_comes_first_and_then_what_else_can_help(
    tmp_path: Path, record: RunRecord, changed: dict[str, object], besides: list[str]
) -> None:
    finish(tmp_path, record, **changed)
    steps = build_view(record.model_copy(update=changed)).following
    first = [step.command.removeprefix("runbook ") for step in steps]
    after = [words.format(f"artifacts/{RUN}") for words in ("report {}", *besides)]
    assert told(tmp_path)[1] == [*first, *after]


@pytest.mark.parametrize("program", ["run", "launch"])
def test_what_was_cut_off_is_resumed(tmp_path: Path, program: str) -> None:
    folder = begin(tmp_path, STARTED, PHASE)
    by = {} if program == "run" else PLAN
    write_record(folder, samples.incomplete().model_copy(update=by))
    text, commands = told(tmp_path)
    assert f"artifacts/{RUN}: not finished, 1 of 2 phases\n" in text
    assert commands[0] == f"{program} --resume {RUN}"


def test_a_go_whose_folder_was_renamed_is_told_as_that_by_what_would_launch_behind_it(
    tmp_path: Path,
) -> None:
    """Beside a run under its own name, or as a copy of one, it is not looked at."""
    (tmp_path / "artifacts").mkdir()
    run = corpus.unpack("go", tmp_path / "artifacts")
    run.rename(run.with_name("other"))
    why = f"its folder was renamed from {run.name}: rename it back"
    text, commands = told(tmp_path)
    assert re.search(rf"artifacts/other: GO .*\n +{why}\n", text)
    assert commands == ["report artifacts/other", "verify artifacts/other"]
    launch = ("launch", "--profile", "cpu", "--steps-scale", "0.02")
    assert f"has none yet: other: {why}; first:" in inside(*launch, cwd=tmp_path).err
    shutil.copytree(run.with_name("other"), run)
    text, commands = told(tmp_path)
    assert f"artifacts/{run.name}: GO" in text and commands[0] == "launch --profile cpu"
    assert "other" not in text and "renamed" not in inside(*launch, cwd=tmp_path).err


@pytest.mark.parametrize("linked", [False, True])
def test_a_run_whose_journal_is_held_is_running_and_can_be_watched(
    tmp_path: Path, linked: bool
) -> None:
    launch = {"seq": 3, "event": "launch_started", "phase": "smoke", "launch": "run"}
    folder = begin(tmp_path, STARTED, PHASE, launch)
    if linked:
        (folder / "smoke/run").mkdir(parents=True)
        (tmp_path / "artifacts/latest").symlink_to(f"{RUN}/smoke/run")
    with (folder / "events.jsonl").open() as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        text, commands = told(tmp_path)
    assert f"artifacts/{RUN}: RUNNING, 1 of 2 phases, now smoke/run\n" in text
    watched = "latest" if linked else RUN
    assert commands == [f"watch artifacts/{watched}", f"stacks artifacts/{RUN}"]
    assert "RUNNING" not in told(tmp_path)[0]


@pytest.mark.parametrize(
    "data", [b"\xff\xfe\x00", b"[" * 99_999, b'{"verdict": "GO"}'], ids=range(3)
)
def test_a_damaged_record_is_said_and_nothing_fails(tmp_path: Path, data: bytes) -> None:
    folder = begin(tmp_path, STARTED, PHASE, ENDED)
    text, commands = told(tmp_path)
    assert "its run.json is missing" in text and commands == ["run"]
    (folder / "run.json").write_bytes(data)
    text, commands = told(tmp_path)
    assert "its run.json cannot be read" in text and commands == [f"verify artifacts/{RUN}"]
    (folder / "events.jsonl").write_bytes(b"[" * 9999 + b"\n\xff\n")
    assert told(tmp_path)[1] == [f"verify artifacts/{RUN}"]
