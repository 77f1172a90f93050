"""What the whole program says of itself: the overview of its commands, and how to get help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runbook.cli._parser import Command
from runbook.errors import UsageError, did_you_mean

_HEAD = """\
usage: runbook COMMAND [options]

Can this training run go to production on this machine, yes or no?
Runs the phases of the validation runbook and answers GO, NO-GO or INCOMPLETE, with the provenance
of every number."""

_FOOT = """\
options:
  -h, --help        show this help; `runbook help COMMAND` or `runbook COMMAND --help` shows more
  --version         show the version

examples:
  runbook                                what there is in this folder, and what to do next
  runbook run                            all phases, with the profile for this machine
  runbook run --dry-run                  print the commands that would run; start nothing
  runbook run --phase preflight,baseline --profile a100x2_pcie4
  runbook report                         show the report of the newest run

exit codes of `runbook run`: 0 GO, 1 NO-GO, 2 wrong usage, 3 INCOMPLETE, 4 PARTIAL PASS (of the
phases asked for), 70 internal error, 129 SIGHUP, 130 Ctrl-C, 143 SIGTERM

completion: eval "$(register-python-argcomplete runbook)" (nsa-runbook[completion])"""

_WIDTH = 16
# What were commands in version 0.1.0.
_NOW = {"stacks": "watch --stacks", "bundle": "export --to bundle"}


def overview(groups: Mapping[str, Sequence[Command]]) -> str:
    """The text of `runbook --help`: every command in one line, in its group."""
    blocks = [
        "\n".join([f"{title}:", *(f"  {one.name:<{_WIDTH}}  {one.help}" for one in commands)])
        for title, commands in groups.items()
    ]
    return "\n\n".join([_HEAD, *blocks, _FOOT])


def named(name: str, commands: Mapping[str, Command]) -> Command:
    """The command of this name. Raises UsageError with the nearest one."""
    if name not in commands:
        now = f" (it is `runbook {_NOW[name]}`)" if name in _NOW else ""
        raise UsageError(
            f"unknown command {name!r}{now or did_you_mean(name, commands)}",
            hint=f"commands: {', '.join(commands)}",
        )
    return commands[name]
