"""`runbook completion SHELL`, and the answers when a shell asks what may follow.

The scripts call `runbook` at each TAB (argcomplete's protocol), so that run ids, profiles and
phases are those of the moment.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from runbook.cli._here import is_run
from runbook.cli._parser import Command, CommandParser
from runbook.console import Console
from runbook.defaults import DEFAULT_OUT
from runbook.errors import ProgramExit, RunbookError

SHELLS = ("bash", "zsh", "fish")
# A shell sets it when it asks.
ASKED = "_ARGCOMPLETE"

Words = Callable[[argparse.Namespace], Iterable[str]]


def _runs(args: argparse.Namespace) -> list[str]:
    out = Path(getattr(args, "out", None) or DEFAULT_OUT)
    return [path.name for path in out.iterdir() if is_run(path)] if out.is_dir() else []


def _profiles(_: argparse.Namespace) -> Iterable[str]:
    from runbook.config import profile_names

    return ("auto", *profile_names())


def _phases(_: argparse.Namespace) -> Iterable[str]:
    from runbook.registry import phase_names

    return ("all", *phase_names())


def _formats(_: argparse.Namespace) -> Iterable[str]:
    from runbook.registry import report_names

    return report_names()


def _settings(_: argparse.Namespace) -> Iterable[str]:
    from nsa.toggles import TOGGLES

    return [f"{name}=" for name in TOGGLES]


def _commands(_: argparse.Namespace) -> Iterable[str]:
    from runbook.cli import COMMANDS

    return COMMANDS


def _questions(_: argparse.Namespace) -> Iterable[str]:
    from runbook.cli.questions import QUESTION_NAMES

    return QUESTION_NAMES


# By what the help calls the value, so that a new command with a RUN needs nothing here.
_BY_METAVAR: dict[str, Words] = {
    **dict.fromkeys(("RUN", "A", "B", "RUN|CONFIG"), _runs),
    **dict.fromkeys(("auto|NAME|FILE", "NAME|FILE"), _profiles),
    "COMMAND": _commands,
    "KEY=VALUE": _settings,
    "QUESTION": _questions,
}
_BY_OPTION: dict[str, Words] = {"--phase": _phases, "--format": _formats}
_LISTS = ("--phase", "--format")


def _words_for(action: argparse.Action) -> Words | None:
    for option in action.option_strings:
        if option in _BY_OPTION:
            return _BY_OPTION[option]
    name = str(action.metavar or "")
    if name in _BY_METAVAR:
        return _BY_METAVAR[name]
    words = [word for word in name.split("|") if word.islower()]
    return (lambda _: words) if words else None


class _Completer:
    """What may stand at one place of the command line; files too where they may be named."""

    def __init__(self, action: argparse.Action, words: Words) -> None:
        self._words = words
        self._is_list = any(option in _LISTS for option in action.option_strings)
        names = ("RUN", "A", "B", "FILE", "CONFIG")
        self._files = bool({*str(action.metavar).split("|")} & {*names})

    def __call__(self, prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
        before, comma, _rest = prefix.rpartition(",") if self._is_list else ("", "", "")
        taken = before.split(",")
        words = [f"{before}{comma}{word}" for word in self._words(parsed_args) if word not in taken]
        if self._files:
            from argcomplete.completers import FilesCompleter

            words += FilesCompleter()(prefix)
        return words


def full_parser(commands: Iterable[Command]) -> CommandParser:
    """One parser with every command below it, each place with what may stand there."""
    parser = CommandParser(prog="runbook")
    parser.add_argument("--version", action="store_true")
    below = parser.add_subparsers(parser_class=CommandParser)
    for command in commands:
        part = command.parser(partial(below.add_parser, command.name, help=command.help))
        for action in part._actions:
            if words := _words_for(action):
                action.completer = _Completer(action, words)  # type: ignore[attr-defined]
    return parser


def complete(commands: Iterable[Command]) -> int:
    """Answer the shell that asked, on the file descriptor that it reads, and end the process."""
    _argcomplete().autocomplete(full_parser(commands), always_complete_options=False)
    return ProgramExit.GO


def _argcomplete() -> Any:
    try:
        import argcomplete
    except ImportError as error:
        raise RunbookError(
            f"completion needs argcomplete ({error}); pip install 'nsa-runbook[completion]'"
        ) from error
    return argcomplete


def _add_arguments(parser: CommandParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell that the script is for")


def _print_script(args: argparse.Namespace, console: Console) -> int:
    script = _argcomplete().shellcode(["runbook"], True, args.shell)
    if args.json:
        console.json_document({"schema_version": 1, "shell": args.shell, "script": script})
    else:
        console.page(script.strip("\n"))
    return ProgramExit.GO


COMPLETION = Command(
    name="completion",
    help="print the script that completes commands, options, runs and profiles on TAB",
    description="""\
Print a completion script for bash, zsh or fish. It completes commands, options, run
ids, profiles, phases, report formats and toggles. Needs the package argcomplete:
pip install 'nsa-runbook[completion]'.

bash   eval "$(runbook completion bash)"                        in ~/.bashrc
zsh    autoload -U compinit; compinit; eval "$(runbook completion zsh)"    in ~/.zshrc
fish   runbook completion fish > ~/.config/fish/completions/runbook.fish""",
    examples="""\
  runbook completion bash
  runbook completion fish > ~/.config/fish/completions/runbook.fish""",
    add_arguments=_add_arguments,
    run=_print_script,
)
