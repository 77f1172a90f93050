"""Find a run folder by what a person types: nothing, an id, the start of an id, or a path."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from runbook.errors import RunbookError, UsageError, did_you_mean

if TYPE_CHECKING:
    from runbook.records import RunRecord

__all__ = ["DEFAULT_OUT", "find_run", "load_run", "near", "run_folders"]

DEFAULT_OUT = "artifacts"
_RECORD = "run.json"


def near(path: str | Path) -> str:
    """The path as one would type it here: relative if it lies below the current folder."""
    absolute, here = Path(path).absolute(), Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)


def run_folders(out_dir: Path) -> list[Path]:
    """The folders of `out_dir` that hold a run, oldest first (an id begins with its UTC time)."""
    if not out_dir.is_dir():
        return []
    return sorted(
        (folder for folder in out_dir.iterdir() if (folder / _RECORD).is_file()),
        key=lambda folder: folder.name,
    )


def find_run(text: str | None, out_dir: Path) -> Path:
    """The run that `text` names; without it the newest one of `out_dir`. Raises UsageError."""
    folders = run_folders(out_dir)
    if text is None:
        if not folders:
            raise UsageError(
                f"no run in {out_dir}/", hint="`runbook run` makes one, --out names another folder"
            )
        return folders[-1]
    path = Path(text)
    if path.name == _RECORD and path.is_file():
        return path.parent
    if (path / _RECORD).is_file():
        return path
    matches = [folder for folder in folders if folder.name.startswith(text)]
    if len(matches) == 1:
        return matches[0]
    names = [folder.name for folder in folders]
    if matches:
        raise UsageError(
            f"run {text!r} is not unique in {out_dir}/: "
            f"{', '.join(folder.name for folder in matches)}"
        )
    known = f"runs in {out_dir}/: {', '.join(names[-5:])}" if names else f"no run in {out_dir}/"
    raise UsageError(
        f"no run {text!r}: neither a folder with {_RECORD} nor the start of a run's id"
        f"{did_you_mean(text, names)}",
        hint=known,
    )


def load_run(folder: Path) -> RunRecord:
    """Read run.json. Raises RunbookError if it is damaged or of another version."""
    from pydantic import ValidationError

    from runbook.records import RunRecord

    path = folder / _RECORD
    try:
        return RunRecord.model_validate_json(path.read_bytes())
    except OSError as error:
        raise RunbookError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the document"
        raise RunbookError(
            f"{path} is not a run record of this version: {place}: {first['msg']}"
            f" ({error.error_count()} problems in all)"
        ) from error
