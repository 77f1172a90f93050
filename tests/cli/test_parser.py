"""Parsing goes on after a wrong option, so that one message holds every problem."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from inspect import cleandoc

import pytest

from runbook.cli import COMMANDS
from runbook.cli._parser import CommandParser, docstring, parse_all, path_type

DEFAULT = re.compile(r"\bdefault: |\((?:the )?default\b|\bno default\b|\(default\b")
UNIT = re.compile(
    r"\b(seconds|steps?|tok/s|MiB|nats|share|rate|efficiency|factor|launch(es)?|ranks|devices"
    r"|currency|seed|change|loss|days|runs)\b"
)


def values(parser: CommandParser) -> Iterator[argparse.Action]:
    """Every option or optional word that takes a value."""
    for action in parser._actions:
        if action.nargs != 0 and (action.option_strings or action.nargs in ("?", "*")):
            yield action


def gaps(parser: CommandParser) -> list[str]:
    """What the help of this parser leaves open."""
    found = []
    for action in values(parser):
        name, text = "/".join(action.option_strings) or str(action.metavar), action.help or ""
        if not DEFAULT.search(text):
            found.append(f"{name}: no word of its default")
        if action.type not in (None, str, path_type) and not UNIT.search(text):
            found.append(f"{name}: a number without a unit")
    return found


def example_lines(examples: str) -> list[str]:
    """The commands of an epilog, without comments, redirections and variables in front."""
    lines = [line.strip() for line in examples.splitlines() if line.startswith("  ")]
    commands = [part for line in lines for part in re.split(r"\s{2,}|;|\||>", line)]
    return [text for part in commands if (text := part[max(part.find("runbook "), 0) :].strip())]


def as_words(line: str) -> list[str]:
    """The words after `runbook` of an example; empty for what is only its comment."""
    return shlex.split(line)[1:] if line.startswith("runbook ") else []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_value_names_its_default_and_its_unit(name: str) -> None:
    assert gaps(COMMANDS[name].parser()) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_two_examples_that_its_parser_takes(name: str) -> None:
    command = COMMANDS[name]
    lines = [words for line in example_lines(command.epilog) if (words := as_words(line))]
    assert len(lines) >= 2
    for word, *words in lines:
        assert word == name
        assert parse_all(command.parser(), words)[1] == [], words


@pytest.mark.parametrize("name", COMMANDS)
def test_options_are_there_where_python_drops_docstrings(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -OO`, or PYTHONOPTIMIZE=2."""
    run = COMMANDS[name].run
    kept = cleandoc(run.__doc__ or "")
    monkeypatch.setattr(run, "__doc__", None)
    assert docstring(run) == kept != ""


@pytest.mark.parametrize("name", COMMANDS)
def test_a_default_that_is_told_is_the_parsers(name: str) -> None:
    for action in COMMANDS[name].parser()._actions:
        told = re.search(r"\(default: (\S+)\)$", action.help or "")
        if told and action.default not in (None, "", False, []):
            number = isinstance(action.default, int | float)
            assert told[1] == (f"{action.default:g}" if number else str(action.default)), action
