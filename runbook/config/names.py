"""What is shipped, by name; found without reading any of it, so that `--help` can list it."""

from __future__ import annotations

from pathlib import Path

from runbook.files import data_path


def presets_folder() -> Path:
    """Where the shipped presets lie. Raises RunbookError."""
    return data_path("configs") / "presets"


def shipped_names(folder: Path) -> tuple[str, ...]:
    """Names of the shipped documents, in alphabetical order."""
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))


def preset_names() -> tuple[str, ...]:
    """Names of the shipped presets, in alphabetical order."""
    return shipped_names(presets_folder())
