"""Parsing goes on after a wrong option, so that one message holds every problem."""

from __future__ import annotations

from pathlib import Path

import pytest

from runbook.cli._parser import CommandParser, option_table, parse_all
from runbook.errors import UsageError


@pytest.fixture
def work() -> CommandParser:
    work = CommandParser(prog="tool work")
    work.add_argument("--count", type=int, default=7)
    work.add_argument("--kind", choices=("a", "b"), default="a")
    work.add_argument("--on", action="store_true")
    work.add_argument("target", nargs="?")
    work.add_argument("--profile", type=int)
    work.add_short_forms()
    return work


@pytest.mark.parametrize("bad", [["--count", "many"], ["--count=many"]])
def test_the_rest_is_parsed_after_a_bad_value(work: CommandParser, bad: list[str]) -> None:
    args, problems = parse_all(work, [*bad, "--kind", "c", "--onn", "--on", "x"])
    assert problems == [
        "--count: invalid int value: 'many'",
        "--kind: invalid choice: 'c' (choose from 'a', 'b')",
        "unknown option --onn (did you mean '--on'?)",
    ]
    assert (args.count, args.kind, args.on, args.target) == (7, "a", True, "x")


@pytest.mark.parametrize("bad", ["-1", "-.5", "-"])
def test_a_bad_value_that_begins_with_a_dash_is_one_problem(work: CommandParser, bad: str) -> None:
    _, problems = parse_all(work, ["--kind", bad, "x"])
    assert problems == [f"--kind: invalid choice: '{bad}' (choose from 'a', 'b')"]


def test_a_surplus_word_is_named(work: CommandParser) -> None:
    _, problems = parse_all(work, ["x", "y"])
    assert problems == ["unexpected argument 'y'"]


def test_a_short_form_is_the_long_option_and_is_called_by_its_name(work: CommandParser) -> None:
    args, problems = parse_all(work, ["-p", "3", "x"])
    assert (args.profile, args.target, problems) == (3, "x", [])
    args, problems = parse_all(work, ["-p", "three", "--on", "x"])
    assert problems == ["--profile: invalid int value: 'three'"]
    assert (args.on, args.target) == (True, "x")


@pytest.fixture
def needy() -> CommandParser:
    needy = CommandParser(prog="tool needy")
    needy.add_argument("--trainer", required=True)
    group = needy.add_mutually_exclusive_group(required=True)
    group.add_argument("--per-rank", type=int)
    group.add_argument("--per-step", type=int)
    needy.add_argument("target")
    return needy


@pytest.mark.parametrize(
    ("words", "problems"),
    [
        (
            ["--per-rank", "x", "--trainer", "python t.py --onn", "t"],
            ("--per-rank: invalid int value: 'x'",),
        ),
        (
            ["--per-rnk", "4", "--trainer", "t", "t"],
            ("unknown option --per-rnk (did you mean '--per-rank'?)",),
        ),
        (
            ["--per-rank", "x", "--trianer", "t", "t"],
            (
                "--per-rank: invalid int value: 'x'",
                "unknown option --trianer (did you mean '--trainer'?)",
            ),
        ),
        (
            ["--per-rank", "x", "--trainer", "t"],
            (
                "--per-rank: invalid int value: 'x'",
                "the following arguments are required: target",
            ),
        ),
        (["--per-rank", "4", "t"], ("the following arguments are required: --trainer",)),
    ],
)
def test_what_was_mistyped_is_not_called_missing(
    needy: CommandParser, words: list[str], problems: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as told:
        parse_all(needy, words)
    assert (told.value.problems, told.value.hint) == (problems, "see tool needy --help")


def test_a_table_says_what_is_asked_for_as_the_help_shows_it() -> None:
    """By argparse's own words for each row; the type of a value follows from its name."""
    parser = CommandParser(prog="tool")
    option_table(
        """
        target [RUN]     the newest run
        --steps N        how many
            steps
        --floor TOK_S    fast enough
        --kept [FILE]    where
        --dry-run        only plan
        --set KEY=VALUE  repeatable
        names NAME...    any
        """,
        floor=float,
        kept={"const": "here"},
        steps={"default": 7},
    )(parser)
    args, problems = parse_all(parser, ["a", "b", "c", "--steps", "3", "--floor", "1.5", "--kept"])
    assert problems == [] and (args.target, args.names) == ("a", ["b", "c"])
    assert (args.steps, args.floor, args.kept, args.dry_run) == (3, 1.5, Path("here"), False)
    assert parse_all(parser, [])[0].steps == 7 and parse_all(parser, [])[0].settings == []
    assert parse_all(parser, ["--set", "A=1", "--set", "B=2"])[0].settings == ["A=1", "B=2"]
    assert parse_all(parser, ["--steps", "0"])[1] == [
        "--steps: must be a whole number, 1 or more, not '0'"
    ]
    assert "--steps N" in parser.format_help() and "how many steps" in parser.format_help()
