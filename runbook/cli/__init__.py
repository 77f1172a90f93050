"""The command line. Nothing heavy is imported here, so that `runbook --help` answers at once."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from inspect import cleandoc
from pathlib import Path

from runbook import __version__
from runbook.cli import finished, lists, live, run, trials
from runbook.cli._parser import ASKED_BY_SHELL, Command, complete, docstring, is_phase, parse_all
from runbook.cli._runs import print_next
from runbook.cli.run import launch
from runbook.console import CLOSED, Console, drop
from runbook.errors import ProgramExit, RunbookError, UsageError, choice_for, option_meant
from runbook.files import data_path, near

# In the order of the help text: a new command is one name in its group.
GROUPS: dict[str, tuple[Command, ...]] = {
    "what most people need": (
        *(run.run, finished.report, finished.verify, launch.launch),
        *(live.watch, trials.triage, finished.history, finished.inspect),
    ),
    "other runs": (trials.init, launch.nightly, trials.drill),
    "other answers": (*(finished.compare, finished.judge, finished.replay, finished.export),),
    "look up": (lists.phases, lists.profiles, lists.toggles),
}
COMMANDS = {command.name: command for group in GROUPS.values() for command in group}

_HELP = ("help", "-h", "--help")
# Names that remedies of recorded runs have for other commands.
SHORT_FORMS: dict[str, tuple[str, ...]] = {"stacks": ("watch", "--stacks")}


def in_full(words: Sequence[str]) -> list[str]:
    """The words of a command without a short form."""
    return [*SHORT_FORMS.get(words[0], tuple(words[:1])), *words[1:]]


_GLOBAL = ("-h", "--help", "--version")


# What a machine refuses whatever the code does: no defect of the program, and the user can fix it.
_REFUSALS = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG,
    errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR,
}  # fmt: skip


_WIDTH = 16


def overview(groups: Mapping[str, Sequence[Command]]) -> str:
    """usage: runbook COMMAND [options]

    Can this training run go to production on this machine, yes or no?
    Runs the phases of the validation runbook and answers GO, NO-GO or INCOMPLETE, with the
    provenance of every number.

    COMMANDS

    options:
      -h, --help        show this help; `runbook help COMMAND` shows more
      --version         show the version

    examples:
      runbook                                what there is in this folder, and what to do next
      runbook run                            all phases, with the profile for this machine
      runbook run --dry-run                  print the commands that would run; start nothing
      runbook run --phase preflight,baseline --profile a100x2_pcie4
      runbook report                         show the report of the newest run

    exit codes of `runbook run`: 0 GO, 1 NO-GO, 2 wrong usage, 3 INCOMPLETE, 4 PARTIAL PASS (of the
    phases asked for), 70 internal error, 129 SIGHUP, 130 Ctrl-C, 143 SIGTERM

    pages (docs/*.md): DOCS

    completion: eval "$(register-python-argcomplete runbook)" (nsa-runbook[completion])
    """
    # Every command in one line, in its group.
    blocks = [
        "\n".join([f"{title}:", *(f"  {one.name:<{_WIDTH}}  {one.help}" for one in commands)])
        for title, commands in groups.items()
    ]
    text = cleandoc(docstring(overview)).replace("COMMANDS", "\n\n".join(blocks), 1)
    return text.replace("DOCS", near(data_path("docs")), 1)


def named(name: str, commands: Mapping[str, Command]) -> Command:
    """The command of this name. Raises UsageError with the nearest one."""
    if name not in commands:
        phase = f" (a phase: `runbook run --phase {name}`)" if is_phase(name) else ""
        raise UsageError(f"unknown command {name!r}{phase or choice_for(name, commands)}")
    return commands[name]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code. No error leaves as a traceback or as exit code 1."""
    words = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    _never_fail_on_encoding()
    _hear_of_children()
    console = Console()
    try:
        return _dispatch(words, console)
    except KeyboardInterrupt:
        _tell(console, "runbook: interrupted")
        return ProgramExit.INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone: be silent, also when Python flushes at exit.
        drop(sys.stdout)
        return ProgramExit.UNREAD
    except (Exception, SystemExit) as error:
        # Python would exit with 1 here, which means NO-GO. --help ends with 0, and a module that
        # ends the program while it is imported, with any code.
        if isinstance(error, SystemExit) and not error.code:
            raise
        if not (lines := _of_the_user(error)):
            return _defect(console, error)
        _tell(console, f"runbook: error: {lines[0]}", *lines[1:])
        return ProgramExit.USAGE


def _of_the_user(error: BaseException) -> list[str]:
    """What a user can do something about, in lines; empty for a defect of the program."""
    if isinstance(error, RunbookError):
        from runbook.errors import with_program
        from runbook.files import typed_here

        return [with_program(line, typed_here()) for line in error.lines]
    if isinstance(error, MemoryError):
        what = f": {error}" if str(error) else ""
        return [f"this process may have no more memory{what}"]
    found = (isinstance(error, OSError) and _refused(error)) or _stranger()
    return [found] if found else []


def _refused(error: OSError) -> str:
    """What the machine refuses and where; empty if it is none of that, but a defect."""
    # Only a question for the current folder fails without a name.
    if error.errno == errno.ENOENT and error.filename is None:
        return "the current folder was removed; change to one that is there (cd)"
    if error.errno not in _REFUSALS:
        return ""
    return f"{error.filename or 'the system'}: {error.strerror or error}"


# What this program is made with, as it is imported: packages, not files.
_MADE_WITH = ("jinja2", "numpy", "pandas", "psutil", "pydantic", "rich", "scipy", "yaml")


def _hidden() -> str:
    """Which of our packages another module hides, such as one of that name here; empty if none."""
    home = Path(__file__).resolve().parents[2]
    names = ("nsa", "phases", "reports")
    hidden = (name for name in names if _found(name).resolve() != home / name)
    return next((_hides(f"this program's {name}", _found(name)) for name in hidden), "")


def _stranger() -> str:
    """Which package that we need is a stray file of that name; empty if none is."""
    strays = (name for name in _MADE_WITH if _found(name).is_file())
    return next((_hides(f"the package {name}", _found(name)) for name in strays), "")


def _found(name: str) -> Path:
    """Where Python finds a package, or the file that is in its place."""
    from importlib.util import find_spec

    found = find_spec(name)
    places = (*(found.submodule_search_locations or ()), found.origin) if found else ("nowhere",)
    return Path(str(places[0]))


def _hides(what: str, where: Path) -> str:
    return f"{where} hides {what}: rename it, or take it off PYTHONPATH"


def _tell(console: Console, *lines: str) -> None:
    """The error, unless stderr takes nothing more: the exit code still tells what it was."""
    try:
        console.error(*lines)
    except OSError:
        drop(sys.stderr)


def _defect(console: Console, error: BaseException) -> int:
    import tempfile
    import traceback

    text = f"runbook {__version__}\n{''.join(traceback.format_exception(error))}"
    what = f"{type(error).__name__}: {error}"
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="runbook-", suffix=".txt", delete=False, encoding="utf-8"
        ) as stream:
            stream.write(text)
        where = stream.name
    except OSError:
        _tell(console, *text.splitlines())
        where = "above"
    _tell(console, f"runbook: internal error, no verdict: {what} (traceback: {where})")
    return ProgramExit.DEFECT


def _dispatch(words: list[str], console: Console) -> int:
    if ASKED_BY_SHELL in os.environ:
        return complete(COMMANDS.values())
    if not words:
        return print_next(console)
    name, *rest = in_full(words)
    if name in _HELP:
        about = named(rest[0], COMMANDS).parser().format_help() if rest else overview(GROUPS)
        console.page(about)
        return ProgramExit.GO
    if name == "--version":
        console.result(f"runbook {__version__}")
        return ProgramExit.GO
    if name.startswith("-"):
        raise UsageError(
            f"unknown option {name}{option_meant(name, _GLOBAL)}",
            hint="options of a command come after its name; see runbook --help",
        )
    return _run_command(named(name, COMMANDS), rest)


def _run_command(command: Command, words: list[str]) -> int:
    if hidden := _hidden():
        raise UsageError(hidden)
    args, problems = parse_all(command.parser(), words)
    from runbook.checkout import share_packages

    share_packages(os.environ)
    problems.extend(command.problems(args))
    if problems:
        raise UsageError(problems, hint=f"see runbook {command.name} --help")
    if too_little := _memory_problems(command):
        raise UsageError(too_little)
    console = Console(color=not args.no_color, quiet=args.quiet, as_json=args.json)
    return command.run(args, console)


def _memory_problems(command: Command) -> list[str]:
    """What a shell's limits leave too little of; asked of the system first, since it costs less."""
    import resource

    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    if all(resource.getrlimit(one)[0] == resource.RLIM_INFINITY for one in limits):
        return []
    from runbook.machine.surroundings import memory_problems

    return memory_problems(f"runbook {command.name}")


def _open_closed_streams() -> None:
    """Give a stream that the caller closed (`>&-`) to /dev/null: else the next file would be it."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            handle = os.open(os.devnull, os.O_RDWR)  # the lowest free number
            stream = os.fdopen(handle, mode, encoding="utf-8", closefd=False)
            setattr(stream, CLOSED, True)
            setattr(sys, name, stream)


def _hear_of_children() -> None:
    """A shell may have ignored the signal of a child's end; then no exit code of any is told."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _never_fail_on_encoding() -> None:
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
