"""Every kind of command that the program prints is executed by a test, and does what it says.

The kinds are found in the reports of the examples, on the pages of the docs and in the remedies.
A test that is marked with a kind executes it, or fails (`tests/executed.py`); what no test may
execute is in NOT_HERE, with the reason. A kind in neither fails.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from benchmarks.examples.__main__ import EXAMPLES
from nsa.launch.asked import parse_flags
from runbook.cli import COMMANDS, SHORT_FORMS
from runbook.cli._parser import parse_all
from runbook.engine.derive import render
from runbook.records import Outcome, RunRecord, Verdict
from tests import executed
from tests.cli.shell import Ended, environment
from tests.executed import kind_of, note
from tests.reports.printed import (
    ROOT,
    commands_in_html,
    commands_in_markdown,
    commands_in_output,
    commands_in_pages,
    commands_of,
    told_by_invocations,
    told_by_remedies,
)
from tests.reports.samples import SAMPLES

_ROOT_ONLY = "changes the machine, as root"
_A_GPU = "asks an NVIDIA driver"
NOT_HERE = {
    "sudo nvidia-smi": _ROOT_ONLY,
    "nvidia-smi": _A_GPU,
    "nvidia-smi -L": _A_GPU,
    "nvidia-smi -q": _A_GPU,
    "nvidia-smi topo": _A_GPU,
    "git bisect": "a night for each commit; its words are parsed below",
    "df -h": "of the machine",
    "top": "stays until a person leaves it",
    **dict.fromkeys(
        ("torchrun --nproc_per_node=1", "torchrun --nproc_per_node=2"),
        "another trainer's own line, as its launches start it (tests/own)",
    ),
    "pytest --pyargs": "the same tests as by `-m pytest`, of another module",
}

# The loss is no number after a few steps, which ends the launch.
_FAULT = "train.lr=1e6"
_PROFILE = """\
extends: cpu
required: [v2_parity.parity, nvtx.completed]
"""


@cache
def printed() -> dict[str, str]:
    """Every kind, with a place where it is printed."""
    found: dict[str, str] = {}
    for example in EXAMPLES:
        folder = ROOT / "docs" / "examples" / example.name
        for name in ("report.md", "details.md", "report.html"):
            read = commands_in_html if name.endswith("html") else commands_in_markdown
            lines = read((folder / name).read_text("utf-8"))
            found |= dict.fromkeys(map(kind_of, filter(None, lines)), f"{example.name}/{name}")
    found |= {kind_of(line): name for name, line in commands_in_pages()}
    found |= dict.fromkeys(map(kind_of, told_by_remedies()), "a remedy")
    return found | dict.fromkeys(map(kind_of, told_by_invocations()), "an invocation")


@cache
def executed_kinds() -> dict[str, str]:
    """Every kind that a test is marked with, and that test."""
    return dict(executed.marked(ROOT / "tests"))


def test_every_kind_that_is_printed_is_executed_or_says_why_not() -> None:
    known = executed_kinds().keys() | NOT_HERE.keys()
    assert {kind: where for kind, where in printed().items() if kind not in known} == {}


def test_nothing_is_excused_that_nobody_prints_or_that_a_test_executes() -> None:
    assert NOT_HERE.keys() <= printed().keys() - executed_kinds().keys()


def test_what_git_bisect_runs_is_a_command_whose_good_end_is_zero() -> None:
    """git takes every exit code but 0 and 125 for bad, and PARTIAL PASS is 4."""
    (line,) = {line for line in told_by_remedies() if line.startswith("git bisect run ")}
    command, name, *words = shlex.split(line.removeprefix("git bisect run "))
    args, problems = parse_all(COMMANDS[name].parser(), words)
    assert (command, problems, args.partial_exit) == ("runbook", [], 0)
    assert args.reference == "COMMIT"


@dataclass
class Shell:
    """A folder in which commands are typed; knows what was printed."""

    folder: Path
    printed: dict[str, None] = field(default_factory=dict)

    def type(self, line: str, *, interrupted: bool = False) -> Ended:
        """Execute a line as a shell does, with this Python's programs first on PATH.

        If it is to be interrupted, as soon as the run that it starts starts a launch.
        """
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        before = set(self.folder.glob("artifacts/*"))
        process = subprocess.Popen(
            ["sh", "-c", f"exec {line}" if interrupted else line], cwd=self.folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment(PATH=programs, PYTHONPATH=str(ROOT)),
        )  # fmt: skip
        while interrupted and process.poll() is None:
            new = set(self.folder.glob("artifacts/*")) - before
            if any("launch_started" in told.read_text() for told in _journals(new)):
                process.send_signal(signal.SIGINT)
                break
            time.sleep(0.05)
        out, err = process.communicate(timeout=400)
        executed.note(line, process.returncode)
        self.printed |= commands_in_output(out)
        return Ended(code=process.returncode, out=out, err=err)

    def newest(self) -> RunRecord:
        """The record of the newest run; what its reports print is noted."""
        path = max(self.folder.glob("artifacts/*/run.json"), key=lambda path: path.parent.name)
        record = RunRecord.model_validate_json(path.read_text("utf-8"))
        self.printed |= commands_of(record)
        for name in ("terminal", "github"):
            self.printed |= commands_in_output(render(record, name))
        return record

    def only(self, start: str) -> str:
        """The one printed command that begins so."""
        found = [line for line in self.printed if line.startswith(start)]
        assert len(found) == 1, found
        return found[0]

    def works(self, line: str, *says: str) -> None:
        """Type a line that has to end well, and say all of this."""
        ended = self.type(line)
        assert ended.code == 0, ended.out + ended.err
        assert [text for text in says if text not in ended.out] == [], ended.out


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    shell = Shell(tmp_path)
    (tmp_path / "short.yaml").write_text(_PROFILE, encoding="utf-8")
    # A page prints the commands of launches for a checkout.
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    return shell


def failures_of(record: RunRecord) -> dict[str, str]:
    return {check.id: check.code for check in record.checks() if check.outcome is Outcome.FAIL}


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.executes(
    "runbook", "runbook --help", "runbook compare", "runbook history",
    "runbook profiles", "runbook report", "runbook run --dry-run", "runbook run --phase",
    "runbook run --resume", "runbook run --resume --phase", "runbook toggles",
    "runbook verify", "-m TRAINER", "-m pytest",
)  # fmt: skip
def test_what_is_typed_as_printed_does_what_it_says(shell: Shell) -> None:
    """A run that passes what it is asked for, goes on as its last lines say, and fails."""
    before_any_run(shell)
    first = shell.type(f"runbook run --phase v2_parity --profile short.yaml --set {_FAULT}")
    assert first.code == 4, first.out
    assert shell.newest().verdict is Verdict.PARTIAL
    added = shell.type(shell.only("runbook run --resume"))
    assert added.code == 1, added.out
    red = shell.newest()
    assert [phase.name for phase in red.phases] == ["v2_parity", "nvtx"]
    assert "non_finite" in failures_of(red).values()
    of_a_red_run(shell, red.run_id)
    next_one = shell.type(_of_nvtx(shell, by_hand=False))
    assert next_one.code == 4, next_one.out  # it leaves out what was set by hand, and passes
    shutil.rmtree(shell.folder / "artifacts" / shell.newest().run_id)
    again = reproduced(shell)
    assert failures_of(again) == failures_of(red) and again.run_id != red.run_id
    both_runs(shell, red.run_id, again.run_id)
    left = {kind_of(line) for line in shell.printed if line} - executed.noted()
    assert left <= executed_kinds().keys()


def before_any_run(shell: Shell) -> None:
    shell.works("runbook --help", "runbook", "verify")
    shell.works("runbook help run", "--phase LIST")
    shell.works("runbook profiles", "a100x2_pcie4")
    shell.works("runbook toggles", "NSA_DDP_BUCKET_MB")
    shell.works("runbook", "next     runbook run --dry-run", "runbook run ")
    shell.works("runbook run --dry-run --profile cpu", "torchrun")
    assert not list(shell.folder.glob("artifacts/*"))


def of_a_red_run(shell: Shell, run_id: str) -> None:
    folder = f"artifacts/{run_id}"
    shell.works("runbook", f" runbook report {folder}", f"runbook triage {folder}")
    shell.works(f"runbook report {folder}", "NO-GO")
    shell.works(f"runbook triage --dry-run {folder}", "0. the command as it was", "train.lr=")
    shell.works(shell.only("runbook verify "), "nothing differs")
    tests = next(line for line in shell.printed if "-m pytest" in line)
    shell.works(tests, " passed")
    trainer = shell.type(next(line for line in shell.printed if "-m nsa.train" in line))
    assert trainer.code not in (0, 2), trainer.err


def reproduced(shell: Shell) -> RunRecord:
    """The printed command, interrupted in its launch, and gone on with as its own page says."""
    cut = shell.type(_of_nvtx(shell, by_hand=True), interrupted=True)
    assert cut.code == 130, cut.out + cut.err
    record = shell.newest()
    assert record.interrupted
    resumed = shell.type(f"runbook run --resume {record.run_id}")
    assert f"runbook run --resume {record.run_id}" in shell.printed
    assert resumed.code == 1, resumed.out
    after = shell.newest()
    assert after.run_id == record.run_id
    return after


def _of_nvtx(shell: Shell, *, by_hand: bool) -> str:
    """The printed command that runs the phase with what was set by hand, or without it."""
    start = "runbook run --phase nvtx "
    lines = [line for line in shell.printed if line.startswith(start)]
    (found,) = (line for line in lines if (_FAULT in line) is by_hand)
    return found


def _journals(runs: set[Path]) -> list[Path]:
    return [path for run in runs if (path := run / "events.jsonl").is_file()]


def both_runs(shell: Shell, one: str, other: str) -> None:
    compared = shell.type(f"runbook compare artifacts/{one} artifacts/{other}")
    assert compared.code in (0, 1, 3) and one in compared.out, compared.err
    shell.works("runbook history", one, other)


def check_command(line: str) -> None:
    """Fail unless the program that the line starts would take its words."""
    words = shlex.split(line)
    while words and re.fullmatch(r"[A-Z][A-Z0-9_]*=.*", words[0], re.DOTALL):
        words.pop(0)
    program, *rest = words
    if program == "export":
        assert all(re.fullmatch(r"\w+=.*", word) for word in rest)
    elif program == "runbook":
        check_runbook(rest)
    elif kind_of(line) in NOT_HERE:
        return
    else:
        module = rest[rest.index("-m") + 1 :]
        assert module[0] in ("nsa.train", "nsa.ceilings", "pytest"), line
        if module[0] == "nsa.train":
            flags = parse_flags(module[1:], {})
            assert flags.config and (ROOT / flags.config).is_file()


def check_runbook(words: list[str]) -> None:
    command = COMMANDS.get(words[0])
    assert command is not None, words
    args, problems = parse_all(command.parser(), words[1:])
    # A folder of another machine is not here, nor its GO, its packages and its network; everything
    # else has to be right.
    found = [*problems, *command.problems(args)]
    elsewhere = (
        *("no run ", "production needs a GO of this configuration on this machine"),
        *("is not installed here", "does not answer ("),
    )
    assert [text for text in found if not any(x in str(text) for x in elsewhere)] == []


@pytest.mark.parametrize("name", SAMPLES)
def test_every_command_is_taken_by_its_program(name: str) -> None:
    lines = [line for line in commands_of(SAMPLES[name]()) if line]
    assert any(line.startswith("runbook verify ") for line in lines)
    for line in lines:
        check_command(line)


@pytest.mark.parametrize("line", sorted(set(told_by_remedies())))
def test_commands_of_remedies_are_whole(line: str) -> None:
    """A remedy may name a command alone, such as `runbook compare`; more has to work."""
    words = shlex.split(line)
    if words[0] == "runbook" and len(words) == 2:
        assert words[1] in {**COMMANDS, **SHORT_FORMS}
    else:
        check_command(line)


@pytest.mark.executes("export")
def test_the_settings_are_set_by_a_shell() -> None:
    record = SAMPLES["go"]()
    page = render(record, "md").split("## Settings to use")[1]
    block = next(one for one in MarkdownIt().parse(page) if one.type == "fence").content
    done = subprocess.run(
        ["sh", "-c", f"{block}env"], capture_output=True, text=True, check=True, env={}
    )
    note(block)
    told = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    assert record.exports.items() <= told.items()
