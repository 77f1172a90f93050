"""`runbook` alone says in at most ten lines what there is here and what to do next; never fails."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import stat
from pathlib import Path

import pytest

from runbook.cli import COMMANDS, in_full
from runbook.cli._parser import parse_all
from runbook.cli.guide import NO_FAULT
from runbook.tools.triage_target import NOT_A_FAULT
from tests.cli.shell import inside

RUN = "20260101T000000Z-abc1234"
RECORD = {
    "verdict": "GO",
    "caveats": [],
    "scope": "2 ranks on CPU",
    "reasons": ["all 72 required checks passed"],
}
STARTED = {"seq": 1, "event": "run_started", "phases": ["preflight", "baseline"]}
PHASE = {"seq": 2, "event": "phase_finished", "interrupted": False}


def begin(tmp_path: Path, *events: object, name: str = RUN) -> Path:
    folder = tmp_path / "artifacts" / name
    folder.mkdir(parents=True)
    journal = folder / "events.jsonl"
    journal.write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "gone").symlink_to("nowhere")
    return folder


def finish(tmp_path: Path, name: str = RUN, **changed: object) -> None:
    folder = begin(tmp_path, STARTED, PHASE, {"event": "run_finished"}, name=name)
    (folder / "run.json").write_text(json.dumps(RECORD | changed))


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
        assert parse_all(COMMANDS[name].parser(), words)[1] == []
    return ended.out, commands[:-1]


def test_without_a_run_the_first_command_is_named(tmp_path: Path) -> None:
    text, commands = told(tmp_path)
    assert "none in artifacts/" in text
    assert "--profile auto takes cpu: nvidia-smi" in text
    assert commands == ["runbook run --dry-run", "runbook run"]
    assert list(tmp_path.iterdir()) == []


def test_the_newest_run_gives_its_verdict_with_what_it_leaves_out(tmp_path: Path) -> None:
    finish(tmp_path, name="20250101T000000Z-old", verdict="NO-GO")
    finish(tmp_path, caveats=["for 1 of 72 checks", "model changed"])
    text, commands = told(tmp_path)
    assert f"artifacts/{RUN}: GO for 1 of 72 checks, model changed (2 ranks on CPU)\n" in text
    assert "all 72 required checks passed" in text
    assert "old" not in text
    assert commands == [f"runbook report artifacts/{RUN}", f"runbook verify artifacts/{RUN}"]


def test_a_go_leads_to_its_launch_with_everything_that_was_given(tmp_path: Path) -> None:
    asked = {"profile": "cpu", "settings": {"train.lr": "1e-4"}, "options": {"profile": "cpu"}}
    finish(tmp_path, **asked)
    launch = "runbook launch --profile cpu --set train.lr=1e-4"
    assert told(tmp_path)[1][1] == launch
    for name, changed in enumerate(
        ({"options": {"plan": "production"}}, {"profile_document": {"own_trainer": {"x": 1}}})
    ):
        finish(tmp_path, name=f"2026020{name + 1}T000000Z-abc1234", **asked | changed)
        assert not [one for one in told(tmp_path)[1] if "launch" in one]


def phase_with(status: str, kind: str = "trainer") -> dict[str, object]:
    return {"launches": [{"launch": {"kind": kind}, "result": {"status": status}}]}


@pytest.mark.parametrize(
    ("verdict", "phases", "after"),
    [
        ("NO-GO", [phase_with("completed")], "run --failed {}"),
        ("NO-GO", [phase_with("failed", kind="pytest"), phase_with("not_run")], "run --failed {}"),
        ("NO-GO", "damaged", "run --failed {}"),
        ("NO-GO", [phase_with("completed"), phase_with("crashed")], "triage {}"),
        ("INCOMPLETE", [phase_with("completed")], "run --failed {}"),
        ("PARTIAL PASS", [phase_with("completed")], "run --resume {} --phase all"),
    ],
)
def test_the_command_behind_the_report_is_one_that_can_help(
    tmp_path: Path, verdict: str, phases: object, after: str
) -> None:
    finish(tmp_path, verdict=verdict, phases=phases)
    _, commands = told(tmp_path)
    assert commands == [f"runbook {w.format(f'artifacts/{RUN}')}" for w in ("report {}", after)]


def test_a_launch_by_a_plan_leads_to_its_report(tmp_path: Path) -> None:
    finish(tmp_path, verdict="INCOMPLETE", options={"plan": "production"})
    assert told(tmp_path)[1] == [f"runbook report artifacts/{RUN}"]


def test_what_triage_takes_is_what_it_is_named_for() -> None:
    assert tuple(NOT_A_FAULT) == NO_FAULT


@pytest.mark.parametrize(
    "events", [(STARTED, PHASE), (STARTED, PHASE, {"seq": 3, "event": "run_interrupted"})]
)
def test_what_was_cut_off_is_resumed(tmp_path: Path, events: tuple[object, ...]) -> None:
    begin(tmp_path, *events)
    text, commands = told(tmp_path)
    assert f"artifacts/{RUN}: not finished, 1 of 2 phases\n" in text
    assert commands[0] == f"runbook run --resume artifacts/{RUN}"


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
    assert commands == [
        f"runbook watch artifacts/{watched}",
        f"runbook stacks artifacts/{RUN}",
    ]
    assert "RUNNING" not in told(tmp_path)[0]


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{", b"\xff\xfe\x00", b"[]", b"null", b"[" * 99_999, b'{"verdict": "GO"}'),
        json.dumps(RECORD | {"caveats": 3}).encode(),
    ],
    ids=range(8),
)
def test_a_damaged_record_is_said_and_nothing_fails(tmp_path: Path, data: bytes) -> None:
    folder = begin(tmp_path, STARTED, {"event": "run_finished"})
    (folder / "run.json").write_bytes(data)
    text, commands = told(tmp_path)
    assert "its run.json cannot be read" in text
    assert commands == [f"runbook verify artifacts/{RUN}"]


def test_a_record_that_is_gone_has_no_command_that_would_refuse(tmp_path: Path) -> None:
    begin(tmp_path, STARTED, {"event": "run_finished"})
    text, commands = told(tmp_path)
    assert "its run.json is missing" in text and commands == ["runbook run"]


@pytest.mark.parametrize(
    "data", [b"", b"{\n", b"[1]\n", b"\xff\n", b"[" * 99_999 + b"\n"], ids=range(5)
)
def test_a_damaged_journal_is_no_reason_to_fail(tmp_path: Path, data: bytes) -> None:
    folder = begin(tmp_path)
    (folder / "events.jsonl").write_bytes(data)
    (folder / "run.json").write_text(json.dumps(RECORD))
    assert ": GO (" in told(tmp_path)[0]


def test_strange_things_in_the_place_of_runs(tmp_path: Path) -> None:
    (tmp_path / "artifacts").write_text("a file")
    assert told(tmp_path)[1][0] == "runbook run --dry-run"
    (tmp_path / "artifacts").unlink()
    (tmp_path / "artifacts" / "x" / "run.json").mkdir(parents=True)
    (tmp_path / "artifacts" / "loop").symlink_to("loop")
    assert told(tmp_path)[1][0] == "runbook run --dry-run"


H200 = "<nvidia_smi_log><gpu><product_name>NVIDIA H200</product_name></gpu></nvidia_smi_log>"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (f"echo '{H200}'", "--profile auto takes h200x1: found 1 x NVIDIA H200"),
        ("echo broken >&2; exit 9", "nvidia-smi: exit code 9: broken"),
    ],
)
def test_the_machine_is_named(tmp_path: Path, said: str, expected: str) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    program = tools / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{said}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    text, _ = told(tmp_path, PATH=f"{tools}:{os.environ['PATH']}")
    assert expected in text.splitlines()[0]
