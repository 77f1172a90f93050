"""Completion in real shells: what TAB offers after the words that were typed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.shell import inside, runbook

pytest.importorskip("argcomplete", reason="nsa-runbook[completion] is not installed")

RUNS = ("20260101T000000Z-abc1234", "20260102T000000Z-def5678")

BASH = """\
eval "$SCRIPT"
COMP_LINE=$LINE COMP_POINT=${#LINE} COMP_TYPE=9
_python_argcomplete runbook
printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = """\
eval (string join \\n -- $SCRIPT | string collect)
complete -C "$LINE" | string replace -r '\\t.*' ''
"""
ZSH = """\
autoload -U compinit; compinit -u -D
eval "$SCRIPT"
_describe() { print -rl -- ${(P)2} }
words=(runbook) BUFFER=$LINE CURSOR=${#LINE}
_python_argcomplete
"""
PROGRAMS = {"bash": ["--norc", "-c", BASH], "zsh": ["-f", "-c", ZSH], "fish": ["-N", "-c", FISH]}


@pytest.fixture(params=PROGRAMS)
def shell(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed here")
    return name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tools = tmp_path / "tools"
    tools.mkdir()
    program = tools / "runbook"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m runbook "$@"\n')
    program.chmod(0o755)
    for out, name in (("artifacts", RUNS[0]), ("elsewhere", RUNS[1])):
        run = tmp_path / out / name
        run.mkdir(parents=True)
        (run / "events.jsonl").touch()
    return tmp_path


def offered(shell: str, folder: Path, line: str) -> list[str]:
    """The words that this shell would offer at the end of `line`."""
    script = inside("completion", shell, cwd=folder)
    assert (script.code, script.err) == (0, "")
    done = subprocess.run(
        [shell, *PROGRAMS[shell]],
        cwd=folder,
        env={**os.environ, "PATH": f"{folder / 'tools'}:{os.environ['PATH']}", "HOME": str(folder)}
        | {"SCRIPT": script.out, "LINE": line},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    # zsh shows `word:what it means`.
    return [word.partition(":")[0].strip() for word in done.stdout.splitlines() if word.strip()]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("runbook wa", ["watch"]),
        ("runbook run --dr", ["--dry-run"]),
        ("runbook run --profile h1", ["h100x1", "h100x2_nvlink"]),
        ("runbook run -p h200x2", ["h200x2_nvlink"]),
        ("runbook run --phase preflight,bas", ["preflight,baseline"]),
        ("runbook run --set NSA_DDP_BUCKET", ["NSA_DDP_BUCKET_MB="]),
        ("runbook run --protocol la", ["launches"]),
        ("runbook report 2026", [RUNS[0]]),
        ("runbook report -o elsewhere 2026", [RUNS[1]]),
        ("runbook help ju", ["judge"]),
        ("runbook decide sca", ["scaling"]),
        ("runbook completion z", ["zsh"]),
    ],
)
def test_what_may_follow(shell: str, folder: Path, line: str, expected: list[str]) -> None:
    assert sorted(offered(shell, folder, line)) == expected


def test_a_wrong_word_is_offered_nothing(folder: Path) -> None:
    assert offered("bash", folder, "runbook report 1999") == []


def test_an_unknown_shell_is_refused(tmp_path: Path) -> None:
    ended = inside("completion", "tcsh", cwd=tmp_path)
    assert ended.code == 2
    assert "invalid choice: 'tcsh' (choose from 'bash', 'zsh', 'fish')" in ended.err


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "argcomplete.py").write_text("raise ImportError('not here')\n")
    ended = runbook("completion", "bash", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert (ended.code, ended.out) == (2, "")
    assert "pip install 'nsa-runbook[completion]'" in ended.err
