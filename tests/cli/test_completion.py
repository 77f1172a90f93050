"""Completion in a real bash: what TAB offers after the words that were typed."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.shell import runbook
from tests.factory.programs import program

argcomplete = pytest.importorskip("argcomplete", reason="nsa-runbook[completion] is not installed")

BASH = """\
eval "$SCRIPT"
COMP_LINE=$LINE COMP_POINT=${#LINE} COMP_TYPE=9
_python_argcomplete runbook
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    script = f'exec {shlex.quote(sys.executable)} -P -m runbook "$@"'
    program(tmp_path / "tools/runbook", script)
    return tmp_path


def offered(folder: Path, line: str) -> list[str]:
    """The words that bash would offer at the end of `line`."""
    done = subprocess.run(
        ["bash", "--norc", "-c", BASH],
        cwd=folder,
        env={**os.environ, "PATH": f"{folder / 'tools'}:{os.environ['PATH']}", "HOME": str(folder)}
        | {"SCRIPT": argcomplete.shellcode(["runbook"], True, "bash"), "LINE": line},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return [word.strip() for word in done.stdout.splitlines() if word.strip()]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("runbook wa", ["watch"]),
        ("runbook run --dr", ["--dry-run"]),
    ],
)
def test_what_may_follow(folder: Path, line: str, expected: list[str]) -> None:
    assert sorted(offered(folder, line)) == expected


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "argcomplete.py").write_text("raise ImportError('not here')\n")
    ended = runbook("wa", cwd=tmp_path, PYTHONPATH=str(tmp_path), _ARGCOMPLETE="1")
    assert (ended.code, ended.out) == (2, "")
    assert "pip install 'nsa-runbook[completion]'" in ended.err
