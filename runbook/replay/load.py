"""Read a replay file; everything wrong with it in one message."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pydantic import ValidationError

from nsa.settings import load_strict
from runbook.errors import UsageError, did_you_mean
from runbook.replay.models import (
    Acceptance,
    PhaseTable,
    ReplayFile,
    Result,
    RunConfig,
    ScoredRow,
)
from runbook.resources import data_path

__all__ = ["load_replay", "replay_names"]

_KEYS = sorted(
    {
        key
        for model in (ReplayFile, Acceptance, PhaseTable, Result, RunConfig, ScoredRow)
        for key in model.model_fields
    }
)


def replay_names() -> tuple[str, ...]:
    """Names of the shipped replays."""
    return tuple(sorted(path.stem for path in (data_path("configs") / "replays").glob("*.yaml")))


def load_replay(name_or_path: str) -> tuple[ReplayFile, Path, str]:
    """The table, its path and the sha256 of the file.

    Args:
        name_or_path: a file, or the name of a shipped replay such as `seed_001_v4`.

    Raises:
        UsageError: no such file, not YAML, unknown keys, values that are not allowed.
    """
    path = Path(name_or_path)
    if name_or_path in replay_names():
        path = data_path("configs") / "replays" / f"{name_or_path}.yaml"
    try:
        data = path.read_bytes()
        text = data.decode("utf-8")
    except OSError as error:
        near = did_you_mean(name_or_path, replay_names())
        raise UsageError(
            f"{name_or_path}: {error.strerror or error}{near}",
            hint=f"a path to a YAML file, or one of: {', '.join(replay_names())}",
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start})") from error
    document, problems = load_strict(text)
    if not problems and not isinstance(document, dict):
        problems = [f"expected a mapping of keys, got {type(document).__name__}"]
    if problems:
        raise UsageError([f"{path}: {problem}" for problem in problems])
    try:
        replay = ReplayFile.model_validate(document)
    except ValidationError as error:
        raise UsageError([f"{path}: {text}" for text in _problems(error)]) from error
    return replay, path, hashlib.sha256(data).hexdigest()


def _problems(error: ValidationError) -> list[str]:
    found = []
    for detail in error.errors():
        place = ".".join(str(part) for part in detail["loc"] if part != "[key]") or "file"
        message = detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "extra_forbidden":
            message = f"unknown key{did_you_mean(str(detail['loc'][-1]), _KEYS)}"
        shown = "" if isinstance(detail["input"], dict) else f", got {detail['input']!r}"
        found.append(f"{place}: {message}{shown}")
    return found
