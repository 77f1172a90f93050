"""An argument parser that reports everything wrong at once, with the nearest right word."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from runbook.errors import UsageError, did_you_mean


class CommandParser(argparse.ArgumentParser):
    """argparse without abbreviations, without exits on error, and with examples kept as typed."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        options.setdefault("allow_abbrev", False)
        options["exit_on_error"] = False
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError where argparse would print the whole usage text and exit."""
        raise UsageError(message, hint=f"see {self.prog} --help")

    def known_options(self) -> list[str]:
        """All option strings of this command, such as --phase."""
        return [text for action in self._actions for text in action.option_strings]


def add_output_flags(parser: argparse.ArgumentParser, *, json_help: str) -> None:
    """Add --json, --quiet and --no-color, which mean the same everywhere."""
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help=json_help)
    group.add_argument("--quiet", action="store_true", help="no progress on stderr")
    group.add_argument(
        "--no-color", action="store_true", help="plain text on a terminal (so does NO_COLOR=1)"
    )


def parse_all(
    parser: CommandParser, commands: dict[str, CommandParser], argv: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Parse `argv`; return the arguments that could be read, and what is wrong with the others.

    After an option with a bad value the option is left out and the rest is parsed again, so that
    one message can hold every problem.
    """
    remaining = list(argv)
    problems: list[str] = []
    while True:
        try:
            args, unknown = parser.parse_known_args(remaining)
        except argparse.ArgumentError as error:
            problems.append(str(error).removeprefix("argument "))
            remaining = _without(remaining, error)
            continue
        command = commands.get(getattr(args, "command", ""), parser)
        problems.extend(_unknown_problems(unknown, command.known_options()))
        return args, problems


def _unknown_problems(unknown: Iterable[str], known: Sequence[str]) -> list[str]:
    problems = []
    after_flag = False
    for word in unknown:
        if word.startswith("-") and word != "-":
            flag = word.partition("=")[0]
            problems.append(f"unknown option {flag}{did_you_mean(flag, known)}")
            after_flag = "=" not in word
        else:
            # The word after an unknown option is most likely its value.
            if not after_flag:
                problems.append(f"unexpected argument {word!r}")
            after_flag = False
    return problems


def _without(argv: list[str], error: argparse.ArgumentError) -> list[str]:
    names = (error.argument_name or "").split("/")
    for index, word in enumerate(argv):
        name, equals, _ = word.partition("=")
        if name in names and name.startswith("-"):
            takes_next = not equals and argv[index + 1 : index + 2]
            end = index + (2 if takes_next and not argv[index + 1].startswith("-") else 1)
            return argv[:index] + argv[end:]
    raise UsageError(str(error).removeprefix("argument "))
