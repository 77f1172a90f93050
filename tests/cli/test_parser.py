"""Parsing goes on after a wrong option, so that one message holds every problem."""

from __future__ import annotations

import pytest

from runbook.cli._parser import CommandParser, parse_all
from runbook.errors import UsageError


@pytest.fixture
def parsers() -> tuple[CommandParser, dict[str, CommandParser]]:
    parser = CommandParser(prog="tool")
    actions = parser.add_subparsers(dest="command", parser_class=CommandParser)
    work = actions.add_parser("work")
    work.add_argument("--count", type=int, default=7)
    work.add_argument("--kind", choices=("a", "b"), default="a")
    work.add_argument("--on", action="store_true")
    work.add_argument("target", nargs="?")
    return parser, {"work": work}


def test_right_words_have_no_problems(
    parsers: tuple[CommandParser, dict[str, CommandParser]],
) -> None:
    args, problems = parse_all(*parsers, ["work", "--count", "3", "--on", "x"])
    assert problems == []
    assert (args.count, args.on, args.target) == (3, True, "x")


@pytest.mark.parametrize("bad", [["--count", "many"], ["--count=many"]])
def test_the_rest_is_parsed_after_a_bad_value(
    parsers: tuple[CommandParser, dict[str, CommandParser]], bad: list[str]
) -> None:
    args, problems = parse_all(*parsers, ["work", *bad, "--kind", "c", "--onn", "--on", "x"])
    assert problems == [
        "--count: invalid int value: 'many'",
        "--kind: invalid choice: 'c' (choose from 'a', 'b')",
        "unknown option --onn (did you mean '--on'?)",
    ]
    assert (args.count, args.kind, args.on, args.target) == (7, "a", True, "x")


def test_an_option_without_its_value(
    parsers: tuple[CommandParser, dict[str, CommandParser]],
) -> None:
    args, problems = parse_all(*parsers, ["work", "--count", "--kind", "b"])
    assert problems == ["--count: expected one argument"]
    assert args.kind == "b"


@pytest.mark.parametrize("bad", ["-1", "-.5", "-"])
def test_a_bad_value_that_begins_with_a_dash_is_one_problem(
    parsers: tuple[CommandParser, dict[str, CommandParser]], bad: str
) -> None:
    _, problems = parse_all(*parsers, ["work", "--kind", bad, "x"])
    assert problems == [f"--kind: invalid choice: '{bad}' (choose from 'a', 'b')"]


def test_abbreviations_are_not_guessed(
    parsers: tuple[CommandParser, dict[str, CommandParser]],
) -> None:
    _, problems = parse_all(*parsers, ["work", "--cou", "3"])
    assert problems == ["unknown option --cou (did you mean '--count'?)"]


def test_a_surplus_word_is_named(parsers: tuple[CommandParser, dict[str, CommandParser]]) -> None:
    _, problems = parse_all(*parsers, ["work", "x", "y"])
    assert problems == ["unexpected argument 'y'"]


def test_a_wrong_command_ends_the_search(
    parsers: tuple[CommandParser, dict[str, CommandParser]],
) -> None:
    with pytest.raises(UsageError, match="invalid choice: 'play'"):
        parse_all(*parsers, ["play"])
