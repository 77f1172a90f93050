"""The documents' scripts outside the environment take the checkout's own, or say what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINES = (
    "bash scripts/run_2xa100_production.sh --help",
    "python scripts/_watchdog.py --help",
    "python scripts/automation/fwe_smoke.py --help",
)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a Python that has no packages."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder, with_pip=False)
    return folder / "bin"


def typed(line: str, checkout: Path, bare: Path) -> tuple[int, str, str]:
    path = f"{bare}{os.pathsep}/usr/bin{os.pathsep}/bin"
    done = subprocess.run(
        ["bash", "-c", line], env={"PATH": path, "HOME": str(checkout)},
        cwd=checkout, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("line", LINES)
def test_they_take_the_environment_of_their_checkout_or_say_how_to_make_one(
    line: str, bare: Path, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    lacks = f"{bare}/python lacks nsa, runbook, pydantic, torch: "
    todo = f"`make demo` in {tmp_path} makes .venv there, which is then taken\n"
    assert typed(line, tmp_path, bare) == (2, "", lacks + todo)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    code, out, err = typed(line, tmp_path, bare)
    assert (code, err) == (0, "") and out.startswith("usage: ")
