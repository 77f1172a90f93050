"""A launch as a line that works when pasted into a shell, wherever one stands."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from runbook.records import Launch
from runbook.resources import data_path

__all__ = ["Pasteable", "pasteable"]


@dataclass(frozen=True, kw_only=True)
class Pasteable:
    """The command line, and what the harness does that the line cannot say."""

    line: str
    notes: tuple[str, ...] = ()


def pasteable(launch: Launch) -> Pasteable:
    """The command line with paths that exist here and with the arms that take turns."""
    argv = [_existing(word) for word in launch.argv]
    if launch.schedule is not None:
        argv += ["--arms", launch.schedule.to_trainer_json()]
    settings = [f"{name}={shlex.quote(_existing(value))}" for name, value in launch.env.items()]
    notes = []
    if launch.config_overrides:
        keys = ", ".join(f"{key}={value}" for key, value in sorted(launch.config_overrides.items()))
        notes.append(f"runs with a copy of the config in which {keys}")
    return Pasteable(line=" ".join([*settings, shlex.join(argv)]), notes=tuple(notes))


def _existing(word: str) -> str:
    """A shipped config's full path where the short one does not exist in this folder."""
    path = Path(word)
    if path.suffix not in (".yaml", ".yml") or path.exists():
        return word
    shipped = data_path("configs") / path.name
    return str(shipped) if shipped.is_file() else word
