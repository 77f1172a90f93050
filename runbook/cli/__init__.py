"""The command line. Nothing heavy is imported here, so that `runbook --help` answers at once."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

from runbook import __version__
from runbook.cli._parser import CommandParser, parse_all
from runbook.cli.acceptance import GPU_ACCEPTANCE
from runbook.cli.drill import DRILL
from runbook.cli.finished import COMPARE, JUDGE, REPORT, VERIFY
from runbook.cli.history import HISTORY
from runbook.cli.lists import PHASES, PROFILES, SCHEMA, TOGGLES
from runbook.cli.live import STACKS, WATCH
from runbook.cli.questions import DECIDE, INSPECT, REPLAY
from runbook.cli.run import RUN
from runbook.cli.triage import TRIAGE
from runbook.console import Console, console_for
from runbook.errors import ProgramExit, RunbookError, UsageError, did_you_mean

# In the order of the help text.
COMMANDS = {
    command.name: command
    for command in (
        *(RUN, REPORT, VERIFY, JUDGE),
        *(PHASES, PROFILES, TOGGLES, SCHEMA),
        *(INSPECT, COMPARE, HISTORY, DECIDE, REPLAY),
        *(WATCH, STACKS, TRIAGE, DRILL, GPU_ACCEPTANCE),
    )
}

_DESCRIPTION = """\
Can this training run go to production on this machine, yes or no?
Runs the phases of the validation runbook and answers GO, NO-GO or INCOMPLETE, with the provenance
of every number."""

_EPILOG = """\
examples:
  runbook run                            all phases, with the profile for this machine
  runbook run --dry-run                  print the commands that would run; start nothing
  runbook run --phase preflight,baseline --profile a100x2_pcie4
  runbook report                         show the report of the newest run

exit codes of `runbook run`: 0 GO, 1 NO-GO, 2 wrong usage, 3 INCOMPLETE, 4 PARTIAL PASS (of the
phases asked for), 70 internal error, 130 Ctrl-C, 143 SIGTERM
more about one command: runbook COMMAND --help"""


# What a machine refuses whatever the code does: no defect of the program, and the user can fix it.
_REFUSALS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code. No error leaves as a traceback or as exit code 1."""
    words = list(sys.argv[1:] if argv is None else argv)
    _never_fail_on_encoding()
    console = Console()
    try:
        return _dispatch(words)
    except RunbookError as error:
        console.error(f"runbook: error: {error}")
        return ProgramExit.USAGE
    except KeyboardInterrupt:
        console.error("runbook: interrupted")
        return ProgramExit.INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone: be silent, also when Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ProgramExit.INCOMPLETE
    except OSError as error:
        if error.errno not in _REFUSALS:
            return _defect(console, error)
        console.error(f"runbook: error: {error.filename or 'the system'}: {error.strerror}")
        return ProgramExit.USAGE
    except Exception as error:  # noqa: BLE001 - Python would exit with 1 here, which means NO-GO
        return _defect(console, error)


def _defect(console: Console, error: Exception) -> int:
    import tempfile
    import traceback

    text = f"runbook {__version__}\n{''.join(traceback.format_exception(error))}"
    what = f"{type(error).__name__}: {error}".partition("\n")[0]
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="runbook-", suffix=".txt", delete=False, encoding="utf-8"
        ) as stream:
            stream.write(text)
        where = stream.name
    except OSError:
        console.error(text)
        where = "above"
    console.error(f"runbook: internal error, no verdict: {what} (traceback: {where})")
    return ProgramExit.DEFECT


def _dispatch(words: list[str]) -> int:
    parser, parsers = _build()
    if not words:
        Console().error(parser.format_help().rstrip())
        return ProgramExit.USAGE
    if words[0].startswith("-"):
        return _answer_global(parser, words)
    if words[0] not in COMMANDS:
        raise UsageError(
            f"unknown command {words[0]!r}{did_you_mean(words[0], COMMANDS)}",
            hint=f"commands: {', '.join(COMMANDS)}",
        )
    args, problems = parse_all(parser, parsers, words)
    from runbook.checkout import share_packages

    share_packages(os.environ)
    command = COMMANDS[args.command]
    problems.extend(command.problems(args))
    if problems:
        raise UsageError(problems, hint=f"see runbook {command.name} --help")
    return command.run(args, console_for(args))


def _build() -> tuple[CommandParser, dict[str, CommandParser]]:
    parser = CommandParser(prog="runbook", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"runbook {__version__}")
    actions = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", parser_class=CommandParser
    )
    for command in COMMANDS.values():
        command.add_to(actions)
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
