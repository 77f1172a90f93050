"""Commands that list what there is: `phases`, `profiles` and `toggles`."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from runbook.cli._parser import command, parse_all
from runbook.cli.run import run
from runbook.cli.run.launch import launch
from runbook.console import Console, table_of
from runbook.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from rich.console import RenderableType

    from runbook.config import Profile


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


@command("list the profiles, or show one with the source of every number")
def profiles(args: argparse.Namespace, console: Console) -> int:
    """List the hardware profiles, or show one: machine, limits and their sources.

    options:
      name [NAME]  a profile's name, or a .yaml file (default: list all)

    examples:
      runbook profiles
      runbook profiles a100x2_pcie4
      runbook profiles ./mine.yaml --json
    """
    from runbook.config.load import load_profile

    if args.name is None:
        _list_profiles(console)
    else:
        profile = load_profile(args.name)
        console.tell(profile.model_dump(mode="json"), _of_profile(profile))
    return 0


def _list_profiles(console: Console) -> None:
    from runbook.config.load import load_profile, profile_names
    from runbook.machine.gpu import detect_profile

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


def _of_profile(profile: Profile) -> Iterator[RenderableType]:
    from runbook.config.load import limits_of

    yield f"{profile.name}: {profile.title}"
    yield f"config   {profile.config} (one GPU: {profile.config_single})"
    yield f"branch   {profile.branch or 'any'}"
    yield from (f"ranks    {profile.ranks}", "")
    limits = [
        (limit.spec.name, str(limit), "" if limit.gated else "shown only", limit.source)
        for limit in limits_of(profile)
    ]
    yield table_of(("LIMIT", "VALUE", "", "SOURCE"), limits)
    if profile.env:
        rows = [(name, item.value, item.source) for name, item in sorted(profile.env.items())]
        yield from ("", table_of(("VARIABLE", "VALUE", "SOURCE"), rows))
    required = [(name,) for name in profile.required]
    yield from ("", table_of((f"REQUIRED FOR A GO ({len(required)} checks)",), required))


_WHO_READS = (
    "read by the trainer and `runbook watch` started here, and by `runbook run`: it goes over "
    "the profile and under --set NAME=value; what is a default here may be set by the profile"
)


def _show_preset(name: str, console: Console) -> None:
    """The preset's variables with meaning and requirement, and as lines to paste."""
    from nsa.contract import CONFIG_VARIABLE
    from runbook.config.extends import load_preset

    preset = load_preset(name)
    exports = [f"export {key}={shlex.quote(value)}" for key, value in preset.variables.items()]
    if preset.config:
        exports.append(f"export {CONFIG_VARIABLE}=configs/{preset.config}")
    rows = [
        {"name": key, "value": one.value, "requirement": one.source, "meaning": preset.meaning(key)}
        for key, one in preset.env.items()
    ]
    document = {"schema_version": 1, "preset": preset.name, "title": preset.title}
    more = {"variables": rows, "config": preset.config, "replaced": preset.replaced}
    refused = {line: why for line in preset.lines if (why := _refused_here(line))}
    taken = " or ".join(line for line in preset.lines if line not in refused)
    parts = [
        f"{preset.name}: {preset.title} ({preset.source})",
        *([f"typed as {taken}"] if taken else []),
        *(f"not on this machine: {line}: {why}" for line, why in refused.items()),
        "",
        table_of(
            ("VARIABLE", "VALUE", "REQUIREMENT", "MEANING"), [tuple(row.values()) for row in rows]
        ),
    ]
    if preset.replaced:
        parts += ["", table_of(("DOCUMENTED", "HERE"), list(preset.replaced.items()))]
    document |= {**more, "commands": preset.lines, "exports": exports}
    console.tell(document, [*parts, "", *exports])


def _refused_here(line: str) -> str:
    """Why `runbook run` or `runbook launch` would not take this line; empty if it would."""
    _, name, *words = shlex.split(line)
    by = run if name == run.name else launch
    args, problems = parse_all(by.parser(), [*words, "--dry-run"])
    return next(iter([*problems, *by.problems(args)]), "")


@command("list every NSA_* variable with its meaning and its value in this shell")
def toggles(args: argparse.Namespace, console: Console) -> int:
    """List every toggle: value in this shell, allowed values, meaning, and the requirement
    it serves. A trainer or `runbook watch` started by hand here reads these values, and
    so does `runbook run`: the shell goes over the profile, and --set NAME=value over the
    shell. A preset is a set of variables that belong together.
    `arm` marks those that may change inside one launch.
    A variable that is unknown or holds a bad value is an error (exit code 2).

    options:
      --preset NAME  show the variables of a preset, and the lines that export them:
          production, safe, tuned, unaccumulated or validated (default: every toggle)
      names NAME...  only these toggles (default: all)

    examples:
      runbook toggles
      runbook toggles NSA_DDP_BUCKET_MB NSA_DDP_COMPRESS
      NSA_DDP_BUCKET_MB=50 runbook toggles
      runbook toggles --preset production
    """
    if args.preset is not None:
        _show_preset(args.preset, console)
        return 0
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
            *(row["name"], _shown(row["value"]), _from(row["source"], row["reader"])),
            row["allowed"],
            *("arm" if row["arm"] else "", row["requirement"], row["meaning"]),
        )
        for row in rows
    ]
    header = ("VARIABLE", "IN THIS SHELL*", "FROM", "ALLOWED", "ARM", "REQUIREMENT", "MEANING")
    document = {"schema_version": 1, "note": _WHO_READS, "toggles": rows}
    console.tell(document, [table_of(header, cells), f"* {_WHO_READS}"])
    return 0


def _from(source: object, reader: object) -> str:
    return f"default of the {reader}" if source == "default" else str(source)


def _shown(value: object) -> str:
    if value is None:
        return "(config)"
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:g}" if isinstance(value, float) else str(value)
