"""The documents' scripts take the checkout's own environment; the budget names what is over it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from scripts import budget

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


def test_what_is_over_is_named_with_how_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = {"nsa.code": 12, "commands": 3}
    monkeypatch.setattr(budget, "measured", lambda: now)
    file = tmp_path / "pyproject.toml"
    file.write_text("[tool.budget]\ncommands = 3\nnsa = {code = 12}\n")
    assert budget.main(["--pyproject", str(file)]) == 0
    assert capsys.readouterr().err == ""
    file.write_text("[tool.budget]\ncommands = 3\nnsa = {code = 10, files = 1}\n")
    assert budget.main(["--pyproject", str(file)]) == 1
    said = capsys.readouterr()
    assert "over budget: nsa.code: 12 is 2 over 10" in said.err
    assert "over budget: nsa.files: in one of both only" in said.err
    assert re.search(r"commands +3 +3", said.out)
