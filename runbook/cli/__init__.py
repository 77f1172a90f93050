"""The command line. Nothing heavy is imported here, so that `runbook --help` answers at once."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from runbook import __version__
from runbook.cli._parser import CommandParser, parse_all
from runbook.console import Console
from runbook.errors import RunbookError, UsageError, did_you_mean

__all__ = ["COMMANDS", "EXIT_INTERRUPTED", "EXIT_USAGE", "main"]

# One module of this package for each sub-command, in the order of the help text.
COMMANDS = (
    "run",
    "report",
    "verify",
    "judge",
    "phases",
    "profiles",
    "toggles",
    "schema",
    "inspect",
    "compare",
    "history",
    "decide",
    "replay",
    "watch",
    "stacks",
    "triage",
    "drill",
)

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_DESCRIPTION = """\
May this training run go to production on this machine, yes or no?
Runs the phases of the validation runbook and answers GO, NO-GO or INCOMPLETE, with a receipt for
every number."""

_EPILOG = """\
examples:
  runbook run                            all phases, profile chosen for this machine
  runbook run --dry-run                  the command lines that would run; starts nothing
  runbook run --phase preflight,baseline --profile a100x2_pcie4
  runbook report                         the newest run's report again

exit codes of `runbook run`: 0 GO, 1 NO-GO, 2 wrong usage, 3 INCOMPLETE, 130 Ctrl-C, 143 SIGTERM
more about one command: runbook COMMAND --help"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code. User errors end as one message and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    _never_fail_on_encoding()
    console = Console()
    try:
        return _dispatch(words)
    except RunbookError as error:
        console.error(f"runbook: error: {error}")
        return EXIT_USAGE
    except KeyboardInterrupt:
        console.error("runbook: interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone: be silent, also when Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _dispatch(words: list[str]) -> int:
    modules = {name: importlib.import_module(f"runbook.cli.{name}") for name in COMMANDS}
    parser, commands = _build(modules)
    if not words:
        Console().error(parser.format_help().rstrip())
        return EXIT_USAGE
    if words[0].startswith("-"):
        return _answer_global(parser, words)
    if words[0] not in commands:
        raise UsageError(
            f"unknown command {words[0]!r}{did_you_mean(words[0], commands)}",
            hint=f"commands: {', '.join(commands)}",
        )
    args, problems = parse_all(parser, commands, words)
    module = modules[args.command]
    if find_problems := getattr(module, "problems", None):
        problems.extend(find_problems(args))
    if problems:
        raise UsageError(problems, hint=f"see runbook {args.command} --help")
    return int(module.run(args))


def _build(
    modules: dict[str, ModuleType],
) -> tuple[CommandParser, dict[str, CommandParser]]:
    parser = CommandParser(prog="runbook", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"runbook {__version__}")
    actions = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", parser_class=CommandParser
    )
    for module in modules.values():
        module.add_parser(actions)
    return parser, dict(actions.choices)


def _answer_global(parser: CommandParser, words: list[str]) -> int:
    """--help and --version end the program inside argparse; anything else is no such option."""
    if words[0] in parser.known_options():
        parser.parse_args(words[:1])
    raise UsageError(
        f"unknown option {words[0]}{did_you_mean(words[0], parser.known_options())}",
        hint="options of a command come after its name; see runbook --help",
    )


def _never_fail_on_encoding() -> None:
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
