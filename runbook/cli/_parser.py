"""An argument parser that reports everything wrong at once, with the nearest right word."""

from __future__ import annotations

import argparse
import ast
import math
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import cleandoc
from pathlib import Path
from textwrap import dedent
from typing import Any, NoReturn

from runbook import DEFAULT_OUT
from runbook.console import Console
from runbook.errors import ProgramExit, RunbookError, UsageError, not_one_line, option_meant, shown
from runbook.folder import RECORD_FILE

# The same letter wherever a command has the option; no other option has a letter (but -h).
SHORT_FORMS = {"--profile": "-p", "--out": "-o", "--dry-run": "-n", "--quiet": "-q"}
# A shell sets it when it asks what may follow (argcomplete's protocol).
ASKED_BY_SHELL = "_ARGCOMPLETE"
_COLUMNS = 100
# Of a whole number that anybody means.
_MOST_DIGITS = 15


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Texts as typed, in at most 100 columns; `-p, --profile NAME` names the value once."""

    def __init__(self, prog: str, **options: Any) -> None:
        options.setdefault("width", min(shutil.get_terminal_size().columns, _COLUMNS) - 2)
        super().__init__(prog, **options)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"


class CommandParser(argparse.ArgumentParser):
    """argparse without abbreviations, without exits on error, and with examples kept as typed."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", _HelpFormatter)
        super().__init__(allow_abbrev=False, exit_on_error=False, **options)
        # Options of other commands, and what this one has in their place.
        self.instead: Mapping[str, str] = {}

    def error(self, message: str) -> NoReturn:
        """Raise UsageError where argparse would print the whole usage text and exit."""
        raise UsageError(message, hint=f"see {self.prog} --help")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # A shell's variable that is not set; taken for the default, it would be a choice of nobody.
        if action.option_strings and action.type is None and "" in arg_strings:
            raise argparse.ArgumentError(action, "expected a value, not ''")
        return super()._get_values(action, arg_strings)

    def take(self, other: CommandParser, without: Sequence[str] = ()) -> None:
        """Give it the options of another one that it lacks, in groups of the same titles."""
        groups = {group.title: group for group in self._action_groups}
        for theirs in other._action_groups:
            for action in theirs._group_actions:
                if not {*without, *self.known_options()}.intersection(action.option_strings):
                    if theirs.title not in groups:
                        groups[theirs.title] = self.add_argument_group(theirs.title)
                    groups[theirs.title]._add_action(action)

    def known_options(self) -> list[str]:
        """All option strings of this command, such as --phase."""
        return [text for action in self._actions for text in action.option_strings]


Handler = Callable[[argparse.Namespace, Console], int]
Arguments = Callable[[Any], None]


@dataclass(frozen=True, kw_only=True)
class Command:
    """One sub-command: the function that answers it, whose name and docstring it has.

    The docstring is what --help says: a description, groups of options under their titles,
    `examples:` and the exit codes. A group is an `option_table`, of which `options` says the rest;
    `more` adds what a table cannot say. `run` returns the exit code. `problems` finds what argparse
    cannot see in the arguments, so that one message names all of it together with what argparse
    found. `instead` has options of other commands, and what this one has in their place.
    """

    run: Handler
    help: str
    json_help: str = "one JSON document on stdout"
    options: Mapping[str, object] = field(default_factory=dict)
    more: Arguments = lambda _: None
    problems: Callable[[argparse.Namespace], Sequence[str]] = lambda _: ()
    instead: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What is typed."""
        return self.run.__name__

    @property
    def _said(self) -> tuple[str, list[str], str]:
        """Of the docstring: the description, titles and tables in turn, and the rest."""
        said, examples, rest = cleandoc(docstring(self.run)).partition("examples:")
        description, *groups = re.split(r"^(\S.*):\n(?=  )", said, flags=re.MULTILINE)
        return description.rstrip(), groups, f"{examples}{rest}"

    def arguments(self, parser: CommandParser) -> None:
        """Add those of the docstring, and `more`."""
        _, groups, _ = self._said
        for title, table in zip(groups[::2], groups[1::2], strict=True):
            group = parser if title == "options" else parser.add_argument_group(title)
            option_table(table, **self.options)(group)
        self.more(parser)

    def parser(self, make: Callable[..., CommandParser] = CommandParser) -> CommandParser:
        """The command's parser; -q, --json and --no-color mean the same everywhere."""
        description, _, epilog = self._said
        parser = make(prog=f"runbook {self.name}", description=description, epilog=epilog)
        parser.instead = self.instead
        self.arguments(parser)
        texts = f"""
            --json  {self.json_help}
            --quiet  no progress on stderr
            --no-color  no colors (same as NO_COLOR=1)"""
        option_table(texts)(parser.add_argument_group("output"))
        return parser


def command(help: str, **given: Any) -> Callable[[Handler], Command]:
    """Make a command of the function that answers it; `given` are other fields of `Command`."""
    return lambda run: Command(run=run, help=help, **given)


def docstring(run: Callable[..., object]) -> str:
    """The function's; `python -OO` takes it out of the program, and leaves it in the file."""
    if run.__doc__ is not None:
        return run.__doc__
    tree = ast.parse(Path(run.__code__.co_filename).read_text("utf-8"))
    named = (one for one in tree.body if isinstance(one, ast.FunctionDef))
    return next((ast.get_docstring(one) or "" for one in named if one.name == run.__name__), "")


def path_type(text: str) -> Path:
    """An argparse type: a path. One that is empty is the current folder to whoever reads it on."""
    if problem := not_one_line(text) or ("" if text else "must be a path, not ''"):
        raise argparse.ArgumentTypeError(problem)
    return Path(text)


def number_type(*, above: float = -math.inf, at_least: float = -math.inf) -> Callable[[str], float]:
    """An argparse type: a finite number within the bound."""
    bound = f" above {above:g}" if above > -math.inf else ""
    bound += f", {at_least:g} or more" if at_least > -math.inf else ""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value <= above or value < at_least:
            raise argparse.ArgumentTypeError(f"must be a number{bound}, not {shown(text)}")
        return value

    return read


def whole_type(*, at_least: int) -> Callable[[str], int]:
    """An argparse type: a whole number within the bound."""

    def read(text: str) -> int:
        most = f", of at most {_MOST_DIGITS} digits" if len(text) > _MOST_DIGITS else ""
        if most or not (text.isascii() and text.isdecimal()) or int(text) < at_least:
            raise argparse.ArgumentTypeError(
                f"must be a whole number, {at_least} or more{most}, not {shown(text)}"
            )
        return int(text)

    return read


# What a value is, by the name that the table of a command has for it.
_TYPES: Mapping[str, Callable[[str], Any]] = {
    "DIR": path_type,
    "FILE": path_type,
    "N": whole_type(at_least=1),
    "S": number_type(above=0),
}
# What means the same wherever it stands.
_SHARED: Mapping[str, Mapping[str, Any]] = {
    "run_name": {"help": "a run's folder or id (default: the newest run)"},
    "out": {
        "help": f"folder that holds the runs (default: {DEFAULT_OUT})",
        "default": Path(DEFAULT_OUT),
    },
    "set": {"action": "append", "default": [], "dest": "settings"},
}


def option_table(table: str, **given: object) -> Arguments:
    """A function that adds the arguments of a table, as --help prints it, to a parser.

    A line begins with an option, and the name of its value if it takes one; or with the name of a
    word in code, and the one that is shown. `[NAME]` may be left out, `NAME...` may be repeated.
    Two blanks and the help follow. By an argument's name in code, `given` has its type, its
    default, or a mapping of what else argparse takes.
    """
    rows = [row.partition("  ") for row in re.split(r"\n(?=\S)", dedent(table).strip()) if row]

    def add(parser: argparse._ActionsContainer) -> None:
        for head, _, text in rows:
            flag, _, value = head.strip().partition(" ")
            name = flag.removeprefix("--").replace("-", "_")
            more = given.get(name, {})
            if not isinstance(more, Mapping):
                more = {"type" if callable(more) else "default": more}
            said = {"help": " ".join(text.split())} if text else {}
            all_of_it = {**_of_value(value), **_SHARED.get(name, {}), **said, **more}
            names = (SHORT_FORMS[flag], flag) if flag in SHORT_FORMS else (flag,)
            parser.add_argument(*names, **all_of_it)

    return add


def _of_value(value: str) -> dict[str, Any]:
    """What argparse is told of a value that is named so."""
    if not value:
        return {"action": "store_true"}
    name = value.strip("[].")
    found: dict[str, Any] = {"metavar": name}
    found |= {"type": _TYPES[name]} if name in _TYPES else {}
    found |= {"nargs": "?"} if value.startswith("[") else {}
    return found | ({"nargs": "*"} if value.endswith("...") else {})


def parse_all(parser: CommandParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse a command's `argv`; return what could be read, and what is wrong with the rest.

    After an option with a bad value the option is left out and the rest is parsed again, so that
    one message can hold every problem. `args.misread` is True if there are some: then an option
    that is missing may be the one that was mistyped. `args.typed` names what has not its default.
    Raises UsageError where nothing can be read.
    """
    remaining = list(argv)
    problems: list[str] = []
    while True:
        try:
            args, unknown = parser.parse_known_args(remaining)
        except argparse.ArgumentError as error:
            # By the option's long name: `--profile: ...`, not `-p/--profile: ...`.
            problems.append(re.sub(r"^argument (-[a-z]/(?=--))?", "", str(error)))
            if (rest := _without(remaining, error)) is None:
                raise UsageError(problems) from error
            remaining = rest
            continue
        except UsageError as error:
            problems.extend(_unknown_flags(remaining, parser))
            # An option that is missing may be the one that was mistyped; an argument is not.
            missing = [text for text in error.problems if not problems or "--" not in text]
            raise UsageError([*problems, *missing], hint=error.hint) from error
        problems.extend(_unknown_problems(unknown, parser))
        args.typed = [n for n, value in vars(args).items() if value != parser.get_default(n)]
        args.misread = bool(problems)
        return args, problems


def _unknown_flags(argv: Sequence[str], parser: CommandParser) -> list[str]:
    """The unknown options of words that argparse did not come to the end of."""
    words = argv[: argv.index("--")] if "--" in argv else argv
    # A command in quotes has blanks, as its own options may.
    flags = (word for word in words if word.startswith("--") and " " not in word)
    known = parser.known_options()
    return _unknown_problems(
        [word for word in flags if word.partition("=")[0] not in known], parser
    )


def _unknown_problems(unknown: Iterable[str], parser: CommandParser) -> list[str]:
    problems = []
    after_flag = False
    for word in unknown:
        if word.startswith("-") and word != "-":
            flag = word.partition("=")[0]
            problems.append(f"unknown option {flag}{_hint(flag, parser)}")
            after_flag = "=" not in word
        else:
            # The word after an unknown option is most likely its value.
            if not after_flag:
                problems.append(f"unexpected argument {word!r}{_as_a_phase(word, parser)}")
            after_flag = False
    return problems


def _hint(flag: str, parser: CommandParser) -> str:
    """What stands in an option's place, or which command has it; else an option like it."""
    from runbook.cli import COMMANDS

    if flag in parser.instead:
        return f" (here it is {parser.instead[flag]})"
    having = [name for name, one in COMMANDS.items() if flag in one.parser().known_options()]
    if having:
        return f" (`runbook {having[0]}` has it)"
    return option_meant(flag, parser.known_options())


def _as_a_phase(word: str, parser: CommandParser) -> str:
    """How a phase is named, for who names it by itself."""
    flag = next((one for one in ("--phase", "--until") if one in parser.known_options()), "")
    return f" (a phase is named with {flag} {word})" if flag and is_phase(word) else ""


def is_phase(word: str) -> bool:
    """Is this word an installed phase's name?"""
    from runbook.config.registry import PHASE_GROUP, installed

    return word in {entry.name for entry in installed(PHASE_GROUP)}


def _without(argv: list[str], error: argparse.ArgumentError) -> list[str] | None:
    """The words without the option that is wrong; None if it is no option."""
    names = (error.argument_name or "").split("/")
    for index, word in enumerate(argv):
        name, equals, _ = word.partition("=")
        if name in names and name.startswith("-"):
            # Like argparse: -1 and nothing in quotes are values, --one is the next option.
            values = [] if equals else argv[index + 1 : index + 2]
            taken = any(re.match(r"[^-]|-?$|-[0-9.]", value) for value in values)
            return argv[:index] + argv[index + 1 + taken :]
    return None


def file_problems(flag: str, path: Path) -> list[str]:
    """Why no file is written there, also among those of a run, whose records are kept."""
    if path.is_dir():
        return [f"{flag} {path}: is a folder; name a file in it"]
    if not path.parent.is_dir():
        return [f"{flag} {path}: no folder {path.parent}/"]
    for folder in path.absolute().parents:
        if (folder / RECORD_FILE).is_file():
            return [f"{flag} {path}: lies in the folder of the run {folder.name}; name another"]
    return []


def complete(commands: Iterable[Command]) -> int:
    """Answer the shell that asked, on the file descriptor that it reads, and end the process.

    Raises RunbookError without the package argcomplete.
    """
    try:
        import argcomplete
    except ImportError as error:
        raise RunbookError(
            f"completion needs argcomplete ({error}); pip install 'nsa-runbook[completion]'"
        ) from error
    parser = CommandParser(prog="runbook")
    below = parser.add_subparsers(parser_class=CommandParser)
    for command in commands:
        command.parser(partial(below.add_parser, command.name, help=command.help))
    argcomplete.autocomplete(parser, always_complete_options=False)
    return ProgramExit.GO
