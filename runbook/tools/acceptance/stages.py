"""The stages as they stand in `configs/acceptance/stages.yaml`, and what each needs."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from runbook.errors import RunbookError, UsageError, did_you_mean
from runbook.files import data_path, read_given
from runbook.records.measurement import Record

STAGES_FILE = "acceptance/stages.yaml"
# What a stage's program exits with when its time is over and it can go on: EX_TEMPFAIL of sysexits.
TO_BE_CONTINUED = 75
_WORDS = ("python", "out", "profile", "left_s")
_NEEDS = ("gpu", "checkout", "module:", "program:")


class StageCommand(Record):
    """One program of a stage. `device` words follow `argv` on a GPU, `stand_in` without one."""

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    argv: tuple[str, ...] = Field(min_length=1)
    device: tuple[str, ...] = ()
    stand_in: tuple[str, ...] = ()

    def words(self, values: Mapping[str, str], *, stand_in: bool) -> list[str]:
        """What is started, with the placeholders filled in."""
        words = (*self.argv, *(self.stand_in if stand_in else self.device))
        return [word.format_map(values) for word in words]

    @model_validator(mode="after")
    def _fills_in(self) -> StageCommand:
        try:
            self.words(dict.fromkeys(_WORDS, ""), stand_in=True)
            self.words(dict.fromkeys(_WORDS, ""), stand_in=False)
        except (KeyError, IndexError, ValueError) as error:
            known = ", ".join(f"{{{word}}}" for word in _WORDS)
            raise ValueError(f"unknown placeholder {error}; there are: {known}") from error
        return self


class Stage(Record):
    """One stage: what it runs, seconds for one part of it, and what it needs."""

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    title: str = Field(min_length=1)
    budget_s: float = Field(gt=0, le=480)
    least_s: float = Field(gt=0)
    parts: int = Field(default=1, ge=1)
    needs: tuple[str, ...] = ()
    commands: tuple[StageCommand, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _sound(self) -> Stage:
        odd = [need for need in self.needs if not need.startswith(_NEEDS)]
        if odd:
            raise ValueError(f"needs {', '.join(odd)}; there are: {', '.join(_NEEDS)}")
        if self.least_s > self.budget_s:
            raise ValueError(f"least_s {self.least_s:g} is more than budget_s {self.budget_s:g}")
        return self


class StageFile(Record):
    """All stages, and what they may take together."""

    schema_version: Literal[1]
    total_s: float = Field(gt=0)
    stages: tuple[Stage, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _fits(self) -> StageFile:
        planned = sum(stage.budget_s * stage.parts for stage in self.stages)
        if planned > self.total_s:
            raise ValueError(f"the stages take {planned:g} s, more than total_s {self.total_s:g}")
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError(f"a stage occurs twice: {', '.join(names)}")
        return self


def load_stages(path: Path | None = None) -> tuple[Stage, ...]:
    """The shipped stages, or those of a file of the same form.

    Raises UsageError that lists everything wrong with it.
    """
    path = path or data_path("configs") / STAGES_FILE
    try:
        document = yaml.safe_load(read_given(path).decode("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunbookError(f"{path} cannot be read: {reason}") from error
    try:
        return StageFile.model_validate(document).stages
    except ValidationError as error:
        raise UsageError(
            [
                f"{path}: {'.'.join(str(part) for part in item['loc']) or 'file'}: {item['msg']}"
                for item in error.errors(include_url=False)
            ]
        ) from error


def select_stages(names: Sequence[str], stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages of these names (each may be a comma-separated list), in the file's order.

    No names mean all. Raises UsageError that lists every unknown one.
    """
    wanted = [part.strip() for name in names for part in name.split(",") if part.strip()]
    known = [stage.name for stage in stages]
    wrong = [
        f"--stage {n}: no such stage{did_you_mean(n, known)}" for n in wanted if n not in known
    ]
    if wrong:
        raise UsageError(wrong, hint=f"there are: {', '.join(known)}")
    return tuple(stage for stage in stages if not wanted or stage.name in wanted)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the stages run: the checkout if there is one, and the profile's name."""

    checkout: Path | None
    profile: str
    stand_in: bool

    def values(self, out: Path, left_s: float) -> dict[str, str]:
        """What the placeholders of a command stand for."""
        return {
            "python": sys.executable,
            "out": str(out),
            "profile": self.profile,
            "left_s": f"{left_s:.0f}",
        }

    def missing(self, stage: Stage) -> list[str]:
        """What the stage needs and is not here, each with what to do. A GPU is asked for before."""
        return [text for need in stage.needs if (text := self._missing(need))]

    def _missing(self, need: str) -> str:
        kind, _, name = need.partition(":")
        if kind == "checkout" and self.checkout is None:
            return "no checkout: tests and benchmarks are not in the wheel; run it in a checkout"
        if kind == "module" and not _importable(name):
            return f"no module {name}: install it, or a version of this program that has it"
        if kind == "program" and shutil.which(name) is None:
            return f"no program {name} on PATH"
        return ""


def find_checkout() -> Path | None:
    """The folder with tests and benchmarks beside the installed package, or the current one."""
    package = Path(__file__).resolve().parents[3]
    for folder in (package, Path.cwd()):
        if (folder / "pyproject.toml").is_file() and (folder / "benchmarks").is_dir():
            return folder
    return None


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
