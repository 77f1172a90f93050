"""What toggles choose in a launch: other kernels, and by `--arms` what is in force in which steps.

Torch-free, so that a bad schedule, and kernels that this machine lacks, are refused before anything
heavy is loaded.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nsa.contract import NSAError, did_you_mean
from nsa.settings import refusal
from nsa.toggles import ARM_TOGGLES, AUTO, NEEDS_CUDA, TOGGLES, ToggleSet, Value, contradictions

TRITON = "triton"
_COMPILERS = ("g++", "clang++", "c++")


def triton_asked(toggles: ToggleSet, by_config: bool) -> str:
    """1, 0 or auto: are the package's Triton kernels wanted? by_config: its value."""
    given = toggles.values["NSA_USE_TRITON_SEL"]
    return str(int(by_config)) if given is None else str(given)


def why_no_triton(asked: str, device: str) -> str | None:
    """Why the kernels that are asked for by name cannot run, with the remedy, or None."""
    if asked != "1":
        return None
    name = "NSA_USE_TRITON_SEL=1 / runtime.use_triton_sel"
    if device == "cpu":
        why = NEEDS_CUDA["NSA_USE_TRITON_SEL=1"]
        return f"{name}: {why}, this is cpu; set it to 0 or auto"
    if device == "cuda" and importlib.util.find_spec(TRITON) is None:
        return f"{name}: the package triton is not installed; set it to 0 or auto"
    return None


def why_not(toggles: ToggleSet, device: str) -> str | None:
    """Why the layers cannot run as asked by name, with the remedy, or None.

    device: cuda, cpu, or auto while that is not known yet.
    """
    if toggles.values["NSA_CUDA_GRAPHS"] is True and device == "cpu":
        return f"NSA_CUDA_GRAPHS=1: {NEEDS_CUDA['NSA_CUDA_GRAPHS=1']}, this is cpu; set it to 0"
    mode = toggles.text("NSA_COMPILE")
    problem = None if mode in ("off", AUTO) else why_not_compiled(toggles, device)
    return None if problem is None else f"NSA_COMPILE={mode}: {problem}"


def why_not_compiled(toggles: ToggleSet, device: str) -> str | None:
    """Why layers cannot be compiled here, with the remedy, or None; device as for `why_not`."""
    if not toggles.flag("NSA_PREFILL_BATCHED"):
        return "token by token, a graph would hold every token; set NSA_PREFILL_BATCHED=1"
    if device == "cuda" and importlib.util.find_spec(TRITON) is None:
        return "the package triton is not installed, which compiles for CUDA; use off"
    if device == "cpu" and not any(map(shutil.which, _COMPILERS)):
        return f"no C++ compiler here ({', '.join(_COMPILERS)}); install one or use off"
    return None


class ArmBlock(BaseModel):
    """`steps` measured steps with `set` in force, after the schedule's warm-up steps."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    block: Annotated[int, Field(ge=0)]
    arm: Annotated[str, Field(min_length=1, pattern=r"^[^,\n\r\"]+$")]
    steps: Annotated[int, Field(ge=1)]
    set: dict[str, str] = {}


class ArmFile(BaseModel):
    """The file given to `--arms`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    schema_version: Literal[1]
    warmup_steps: Annotated[int, Field(ge=0)]
    blocks: Annotated[list[ArmBlock], Field(min_length=1)]


@dataclass(frozen=True, kw_only=True)
class Block:
    """A stretch of steps under one set of toggles; a plain run is one block without a name."""

    index: int
    arm: str
    warmup_steps: int
    steps: int
    toggles: ToggleSet

    @property
    def total_steps(self) -> int:
        """Rows that the block writes."""
        return self.warmup_steps + self.steps


def load_blocks(path: str | Path, toggles: ToggleSet) -> tuple[list[Block], ArmFile]:
    """Read a schedule over the launch's own toggles; `path` may be the JSON document itself.

    Raises ConfigError with every problem.
    """
    text = str(path)
    inline = text.lstrip().startswith("{")
    path = "{...}" if inline else path
    try:
        file = ArmFile.model_validate_json(text if inline else Path(text).read_bytes())
    except OSError as error:
        raise NSAError(f"--arms {path}: {error.strerror or error}") from error
    except ValidationError as error:
        lines = [
            f"--arms {path}: {'.'.join(map(str, item['loc'])) or 'file'}: {item['msg']}, "
            f"got {item['input']!r}"
            for item in error.errors(include_url=False)
        ]
        raise refusal(lines) from error
    problems: list[str] = []
    blocks = []
    for entry in file.blocks:
        where = f"--arms {path}: block {entry.block} ({entry.arm})"
        values = _values(entry.set, where, problems)
        merged = toggles.replaced(values, f"arm {entry.arm}")
        problems += [f"{where}: {line}" for line in contradictions(merged)]
        blocks.append(
            Block(
                index=entry.block,
                arm=entry.arm,
                warmup_steps=file.warmup_steps,
                steps=entry.steps,
                toggles=merged,
            )
        )
    if problems:
        raise refusal(problems)
    return blocks, file


def _values(given: Mapping[str, str], where: str, problems: list[str]) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for name, text in given.items():
        if name not in ARM_TOGGLES:
            problems.append(
                f"{where}: {name} cannot change inside a launch{did_you_mean(name, ARM_TOGGLES)}; "
                f"allowed: {', '.join(ARM_TOGGLES)}"
            )
            continue
        try:
            values[name] = TOGGLES[name].parse(text)
        except NSAError as error:
            problems.append(f"{where}: {error}")
    return values
