"""What the program refuses is data: a line of `refused_*.txt` has a case and what is said of it."""

from __future__ import annotations

from pathlib import Path


def cases(name: str) -> list[str]:
    """The lines of a table beside this file."""
    return Path(__file__).with_name(f"{name}.txt").read_text(encoding="utf-8").splitlines()
