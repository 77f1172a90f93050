"""The documents' scripts take the checkout's own environment; the budget names what is over it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
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


def test_files_are_counted_from_the_evidence_to_the_verdict() -> None:
    walked = {str(Path(file).relative_to(ROOT)) for file in budget.judging(ROOT)}
    assert walked >= {
        "phases/baseline.py", "runbook/accounts/gradients.py", "runbook/engine/verify.py",
        "runbook/folder/launch/rows.py", "runbook/records/measurement.py",
    }  # fmt: skip
    assert not walked & {"phases/nvtx.py", "nsa/train/loop.py", "runbook/cli/__init__.py"}


SCRIPT = ROOT / "scripts" / "wheels.py"
NAMES = [
    text.partition(">=")[0]
    for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
]
# A machine with everything but pydantic.
OTHERS = " ".join(name for name in NAMES if name != "pydantic")


def wheel(folder: Path, name: str, version: str, *needs: str, kib: int = 0) -> None:
    """A wheel with nothing in it but its metadata, and that many KiB."""
    info = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {need}" for need in needs]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
        archive.writestr(f"{name}.bin", b"\0" * (kib << 10))


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """The only source that pip has: two versions of pydantic, and what they need."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel(folder, "pydantic", "2.12.0", "typing_extensions>=4.6")
    wheel(folder, "pydantic", "2.14.0", "typing_extensions>=4.14", "annotated_types")
    wheel(folder, "typing_extensions", "4.10.0")
    wheel(folder, "typing_extensions", "4.16.0")
    wheel(folder, "annotated_types", "0.8.0")
    return folder


def ask(
    index: Path, *words: str, check: bool = True
) -> tuple[set[str], subprocess.CompletedProcess[str]]:
    """Names of the wheels that came, and what was said."""
    to = index.parent / "wheels"
    command = [sys.executable, str(SCRIPT), "--python", "3.12", "--to", str(to), *words]
    # Without pip.conf: no source but `index`.
    environ = {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=False, timeout=120
    )
    if check:
        assert done.returncode == 0, done.stderr
    return {path.name.rpartition("-py3")[0] for path in to.glob("*.whl")}, done


def test_what_is_missing_comes_with_what_it_needs(index: Path) -> None:
    found, done = ask(index, "--have", OTHERS)
    assert found == {"pydantic-2.14.0", "typing_extensions-4.16.0", "annotated_types-0.8.0"}
    assert "PYTHONPATH=wheels/packages python3 -m runbook run" in done.stdout


def test_what_is_there_is_neither_downloaded_nor_contradicted(index: Path, tmp_path: Path) -> None:
    """An older typing_extensions stays, so the older pydantic that fits it comes."""
    freeze = tmp_path / "freeze.txt"
    lines = [f"{name}==99.0" for name in OTHERS.split()]
    freeze.write_text("\n".join([*lines, "typing_extensions==4.10.0", "-e /src/own"]) + "\n")
    assert ask(index, "--have", str(freeze))[0] == {"pydantic-2.12.0"}


@pytest.mark.parametrize(
    ("have", "said"),
    [
        ("numpy pandas", "the machine's torch is not among --have"),
        (f"{OTHERS} torch==2.7.1", "torch 2.7.1 is too old"),
        ("/no/such/file", "neither NAME, NAME==VERSION nor a file that is there"),
        ("torch numpy>=2", "--have numpy>=2: neither"),
        ("torch", "pip found no wheels of numpy>="),
    ],
)
def test_what_cannot_be_answered_is_refused(index: Path, have: str, said: str) -> None:
    found, done = ask(index, "--have", have, check=False)
    assert done.returncode == 2 and said in done.stderr and not found


def test_too_much_to_carry_is_refused_and_named(index: Path) -> None:
    wheel(index, "annotated_types", "0.9.0", kib=65 << 10)
    found, done = ask(index, "--have", OTHERS, check=False)
    assert done.returncode == 2 and not found
    assert "the largest annotated_types-0.9.0-py3-none-any.whl" in done.stderr
