"""What is known of the stages so far: written after every change, so that nothing can take it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from pydantic import Field, ValidationError

from runbook import __version__
from runbook.errors import ProgramExit, RunbookError
from runbook.files import utc_text, write_atomic
from runbook.records.measurement import Record
from runbook.tools.acceptance.stages import Stage

STATE_FILE = "state.json"


class Status(StrEnum):
    """How a stage stands."""

    PASS = "PASS"  # noqa: S105 - an outcome, not a password
    FAIL = "FAIL"
    UNDECIDED = "UNDECIDED"
    CUT_OFF = "CUT OFF"
    NOT_RUN = "NOT RUN"

    @property
    def finished(self) -> bool:
        """Nothing of it is left to do."""
        return self in (Status.PASS, Status.FAIL, Status.UNDECIDED)


class CommandEnd(Record):
    """A command that ran to its own end."""

    name: str
    code: int
    seconds: float = Field(ge=0)


class StageState(Record):
    """One stage so far. `seconds` and `parts` are those of all calls together."""

    status: Status = Status.NOT_RUN
    reason: str = "not asked for yet"
    seconds: float = Field(default=0.0, ge=0)
    parts: int = Field(default=0, ge=0)
    started_at: str = ""
    commit: str = ""
    commands: tuple[CommandEnd, ...] = ()


class State(Record):
    """All stages of one device."""

    schema_version: int = 1
    tool_version: str = __version__
    device: str
    stand_in: bool
    profile: str
    created_at: str = Field(default_factory=utc_text)
    stages: dict[str, StageState]

    @classmethod
    def new(cls, device: str, profile: str, stages: Sequence[Stage], *, stand_in: bool) -> State:
        """Nothing has run."""
        return cls(
            device=device,
            stand_in=stand_in,
            profile=profile,
            stages={stage.name: StageState() for stage in stages},
        )

    @classmethod
    def read(cls, work: Path) -> State | None:
        """What an earlier call left; None if there was none. Raises RunbookError if damaged."""
        path = work / STATE_FILE
        if not path.is_file():
            return None
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise RunbookError(
                f"{path} is damaged or of another version: {error.errors()[0]['msg']}; "
                "name another --work folder"
            ) from error

    def write(self, work: Path) -> None:
        """Keep it in the folder of the work."""
        write_atomic(work / STATE_FILE, self.model_dump_json(indent=2) + "\n")

    def with_stage(self, name: str, **changes: object) -> State:
        """The same with one stage changed."""
        stages = self.stages | {name: self.stages[name].model_copy(update=changes)}
        return self.model_copy(update={"stages": stages})

    def exit_code(self, asked: Sequence[str]) -> int:
        """0 all passed, 1 one failed, 3 one that was asked for is open, 4 those asked passed."""
        statuses = {name: state.status for name, state in self.stages.items()}
        if Status.FAIL in statuses.values():
            return ProgramExit.NO_GO
        if any(statuses[name] is not Status.PASS for name in asked):
            return ProgramExit.INCOMPLETE
        whole = all(status is Status.PASS for status in statuses.values())
        return ProgramExit.GO if whole else ProgramExit.PARTIAL


def read_result(folder: Path) -> dict[str, object]:
    """What a stage's program said of itself in result.json; empty if it did not come to that."""
    try:
        document = json.loads((folder / "result.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
