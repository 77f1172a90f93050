"""The schedule of `--arms`: which toggles are in force in which steps of one launch.

Torch-free, so that a bad schedule is refused before anything heavy is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nsa.contract import NSAError, did_you_mean
from nsa.settings import refusal
from nsa.toggles import ARM_TOGGLES, TOGGLES, ToggleSet, Value, contradictions


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
