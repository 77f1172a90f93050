"""Every command of a page works as it is printed."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from nsa.launch.asked import parse_flags
from runbook.cli import COMMANDS, SHORT_FORMS
from runbook.cli._parser import parse_all
from runbook.engine.derive import render
from tests.executed import kind_of, note
from tests.reports.printed import NAMES, commands_of, record_called, told_by_remedies
from tests.reports.test_printed import NOT_HERE

ROOT = Path(__file__).parents[2]
# The rehearsal is no command: its record says so, and no page may turn it into one.
NO_COMMAND = {"rehearsal"}


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


@pytest.mark.parametrize("name", NAMES)
def test_every_command_is_taken_by_its_program(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    lines = [line for line in commands_of(record_called(tmp_path_factory, name)) if line]
    assert any(line.startswith("runbook verify ") for line in lines)
    for line in lines:
        if line not in NO_COMMAND:
            check_command(line)


@pytest.mark.parametrize(
    "line", ["runbook run --phase nothing", "runbook rerun", "FOO=1 python -m x"]
)
def test_a_command_that_does_not_work_is_found(line: str) -> None:
    with pytest.raises((AssertionError, ValueError)):
        check_command(line)


@pytest.mark.parametrize("line", sorted(set(told_by_remedies())))
def test_commands_of_remedies_are_whole(line: str) -> None:
    """A remedy may name a command alone, such as `runbook compare`; more has to work."""
    words = shlex.split(line)
    if words[0] == "runbook" and len(words) == 2:
        assert words[1] in {**COMMANDS, **SHORT_FORMS}
    elif words[0] == "runbook":
        check_runbook(words[1:])
    else:
        assert len(words) > 1 or kind_of(line) in NOT_HERE


@pytest.mark.executes("export")
def test_the_settings_are_set_by_a_shell(tmp_path_factory: pytest.TempPathFactory) -> None:
    record = record_called(tmp_path_factory, "go")
    page = render(record, "md").split("## Settings to use")[1]
    block = next(one for one in MarkdownIt().parse(page) if one.type == "fence").content
    done = subprocess.run(
        ["sh", "-c", f"{block}env"], capture_output=True, text=True, check=True, env={}
    )
    note(block)
    told = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    assert record.exports.items() <= told.items()
