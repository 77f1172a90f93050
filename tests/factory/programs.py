"""Programs that stand in for those of a machine, and git as a person without settings."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest


def program(path: Path, script: str) -> Path:
    """An executable that `sh` runs; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def first_on_path(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Programs of this folder are found before all others."""
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def git(folder: Path, *words: str) -> str:
    """What git says in this folder, as somebody without a configuration of their own."""
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    done = subprocess.run(
        ["git", "-C", str(folder), *who, *words],
        check=True, capture_output=True, text=True,
        env={**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null"},
    )  # fmt: skip
    return done.stdout.strip()
