"""Commands that list what there is: `phases`, `profiles` and `toggles`."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from runbook.cli._parser import command
from runbook.console import Console, table_of
from runbook.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    pass


@command("list the phases, the question of each, and whose results it uses")
def phases(args: argparse.Namespace, console: Console) -> int:
    """List the phases in running order; `runbook run --phase NAME,NAME` runs a choice.

    examples:
      runbook phases
      runbook phases --json
    """
    from runbook.config.registry import phases

    names = ("name", "title", "question", "source", "reads", "optional")
    rows = [{name: getattr(phase, name) for name in names} for phase in phases().values()]
    cells = [
        (
            row["name"] + (" (optional)" if row["optional"] else ""),
            row["question"],
            ", ".join(row["reads"]) or "-",
        )
        for row in rows
    ]
    table = table_of(("PHASE", "QUESTION", "USES"), cells)
    console.tell({"schema_version": 1, "phases": rows}, [table])
    if not args.json:
        console.progress("an optional phase runs only when named: runbook run --phase all,NAME")
    return 0


@command("list the profiles, and which of them this machine gets")
def profiles(args: argparse.Namespace, console: Console) -> int:
    """List the hardware profiles; `runbook run --profile NAME --dry-run` shows what one starts.
    Its file has the source of every number, and so has each check of a report.

    examples:
      runbook profiles
      runbook profiles --json
    """
    from runbook.config.load import load_profile, profile_names
    from runbook.machine.gpu import detect_profile

    del args
    profiles = [load_profile(name) for name in profile_names()]
    try:
        chosen, reason = detect_profile()
    except UsageError as error:
        chosen, reason = "", f"none: {error}"
    names = ("name", "title", "ranks")
    rows = [{name: getattr(profile, name) for name in names} for profile in profiles]
    auto = {"name": chosen, "reason": reason}
    cells = [
        (
            profile.name + (" *" if profile.name == chosen else ""),
            str(profile.ranks),
            "yes" if profile.throughput_gated else "no",
            profile.title,
        )
        for profile in profiles
    ]
    table = table_of(("PROFILE", "RANKS", "THROUGHPUT GATED", "MACHINE"), cells)
    note = f"* what --profile auto chooses here: {reason}"
    console.tell({"schema_version": 1, "auto": auto, "profiles": rows}, [table, note])
    return 0


_WHO_READS = (
    "read by the trainer and `runbook watch` started here, and by `runbook run`: it goes over "
    "the profile and under --set NAME=value"
)


@command("list every NSA_* variable with its meaning and its value in this shell")
def toggles(args: argparse.Namespace, console: Console) -> int:
    """List every toggle: value in this shell, allowed values, meaning, and the requirement
    it serves. A trainer or `runbook watch` started by hand here reads these values, and
    so does `runbook run`: the shell goes over the profile, and --set NAME=value over the
    shell. `arm` marks those that may change inside one launch.
    A variable that is unknown or holds a bad value is an error (exit code 2).

    options:
      names NAME...  only these toggles (default: all)

    examples:
      runbook toggles
      runbook toggles NSA_DDP_BUCKET_MB NSA_DDP_COMPRESS
      NSA_DDP_BUCKET_MB=50 runbook toggles
    """
    from nsa.contract import NSAError
    from nsa.toggles import TOGGLES as TABLE
    from nsa.toggles import parse_toggles

    try:
        chosen = parse_toggles(os.environ)
    except NSAError as error:
        raise UsageError(error.problems) from error
    unknown = [
        f"{name}: no such toggle{did_you_mean(name, TABLE)}"
        for name in args.names
        if name not in TABLE
    ]
    if unknown:
        raise UsageError(unknown, hint="`runbook toggles` lists all")
    names = ("name", "default", "meaning", "requirement", "arm", "reader")
    rows = [
        {name: getattr(toggle, name) for name in names}
        | {"value": chosen.values[toggle.name], "allowed": toggle.allowed()}
        | {"source": chosen.sources.get(toggle.name, "default")}
        for toggle in TABLE.values()
        if not args.names or toggle.name in args.names
    ]
    cells = [
        (
            *(row["name"], _shown(row["value"]), row["source"], row["allowed"]),
            *("arm" if row["arm"] else "", row["requirement"], row["meaning"]),
        )
        for row in rows
    ]
    header = ("VARIABLE", "IN THIS SHELL*", "FROM", "ALLOWED", "ARM", "REQUIREMENT", "MEANING")
    document = {"schema_version": 1, "note": _WHO_READS, "toggles": rows}
    console.tell(document, [table_of(header, cells), f"* {_WHO_READS}"])
    return 0


def _shown(value: object) -> str:
    if value is None:
        return "(config)"
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:g}" if isinstance(value, float) else str(value)
