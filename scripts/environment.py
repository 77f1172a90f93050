"""Make the virtual environment of `make demo`, `make test` and `make lint`, or take the one there.

    python3 scripts/environment.py .venv [--dev] [--keep]

Standard library only, and read by old Pythons too: it says which ones work. A folder in which an
earlier installation did not come to its end is made anew. A torch that the interpreter has already
is used; where there is no GPU, torch's CPU build is taken if there is one to be had. uv installs,
if it is there and pip has not been told where packages come from.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT, CONSTRAINTS = ROOT / "pyproject.toml", ROOT / "constraints.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# torch from PyPI is for CUDA 13; its builds for 12.6 run on drivers from three years before too.
CUDA_12_INDEX = "https://download.pytorch.org/whl/cu126"
# The oldest Linux drivers for them, as `phases/machine/__init__.py` has them.
OLDEST_FOR_CUDA_13, OLDEST_FOR_CUDA_12 = "580.65.06", "525.60.13"
DRIVER_FILE = Path("/proc/driver/nvidia/version")
# Is there from the first moment on, and removed when all is installed.
UNFINISHED = ".unfinished"
INSTALLED = ".installed"
VENV = ("-m", "venv")
PACKAGES = ("nsa", "phases", "reports", "runbook")
_REACH_S = 5
# Settings that say where pip takes packages from, or which. uv does not read them.
_SOURCES = (
    "index-url",
    "extra-index-url",
    "find-links",
    "no-index",
    "constraint",
    "proxy",
    "cert",
    "client-cert",
    "trusted-host",
)


def main(words: list[str] | None = None) -> int:
    """Make or complete the environment; 0, or 2 with the reason on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dev", action="store_true", help="with the development tools")
    parser.add_argument("--keep", action="store_true", help="whatever Python the folder has")
    args = parser.parse_args(words)
    try:
        make(args.folder, dev=args.dev, keep=args.keep)
    except Refused as refused:
        print(refused, file=sys.stderr)
        return 2
    return 0


class Refused(Exception):
    """What is wrong and what to do, for a person."""


def make(folder: Path, *, dev: bool, keep: bool) -> None:
    """Everything installed in `folder`. Raises Refused."""
    usable = is_usable(folder, keep=keep)
    if not usable:
        check_python()
        create(folder)
    kind, stamp = ("dev" if dev else "runtime"), folder / INSTALLED
    inputs = hashlib.sha256(PYPROJECT.read_bytes() + CONSTRAINTS.read_bytes()).hexdigest()
    done = stamp.read_text().split() if stamp.is_file() else []
    if done[:1] == [inputs] and (kind in done or "dev" in done):
        return
    install(folder, dev=dev)
    stamp.write_text(f"{inputs} {kind}\n")
    (folder / UNFINISHED).unlink(missing_ok=True)


def is_usable(folder: Path, *, keep: bool) -> bool:
    """Is a finished environment there? One that is not is removed. Raises Refused."""
    if not folder.exists():
        return False
    config = folder / "pyvenv.cfg"
    if not config.is_file() and not (folder / UNFINISHED).is_file():
        raise Refused(f"{folder} is there and no virtual environment; take another: VENV=FOLDER")
    reason = unusable(folder, config, keep=keep)
    if reason:
        print(f"{folder} {reason}: it is made anew")
        shutil.rmtree(folder)
    return not reason


def unusable(folder: Path, config: Path, *, keep: bool) -> str:
    """Why the environment cannot be used; an empty text if it can."""
    if (folder / UNFINISHED).is_file():
        return "was not finished"
    if not os.access(folder / "bin" / "python", os.X_OK):
        return "has no Python"
    found = re.search(r"^version(?:_info)? *= *(\d+)\.(\d+)", config.read_text(), re.MULTILINE)
    theirs = tuple(map(int, found.groups())) if found else None
    if not keep and theirs != sys.version_info[:2]:
        return "has another Python than PYTHON"
    return ""


def check_python() -> None:
    """Raises Refused if this Python is not one that pyproject.toml names."""
    found = re.search(r'^requires-python = ">=3\.(\d+),<3\.(\d+)"', PYPROJECT.read_text(), re.M)
    if found is None:
        raise Refused(f"{PYPROJECT}: no requires-python of the form >=3.A,<3.B")
    wanted = range(int(found[1]), int(found[2]))
    if sys.version_info[0] == 3 and sys.version_info[1] in wanted:
        return
    there = [f"python3.{minor}" for minor in wanted if shutil.which(f"python3.{minor}")]
    advice = f"PYTHON={there[-1]}" if there else f"PYTHON=/path/to/one. {_GET_ONE}"
    raise Refused(
        f"{sys.executable} is Python {sys.version.split()[0]}; nsa-runbook runs on "
        f"{', '.join(f'3.{minor}' for minor in wanted)}: give {advice}"
    )


_GET_ONE = """\
None is on PATH; to get one, either of
  uv python install 3.12 && make demo PYTHON="$(uv python find 3.12)"
  pyenv install 3.12 && make demo PYTHON="$(pyenv prefix 3.12)/bin/python\""""


def create(folder: Path) -> None:
    """A new environment, marked as unfinished. Raises Refused."""
    folder.mkdir(parents=True)
    (folder / UNFINISHED).touch()
    command = [sys.executable, *VENV, str(folder)]
    # What an active environment has is out of reach: shared are the packages of its base.
    is_base = sys.prefix == sys.base_prefix
    if is_base and importlib.util.find_spec("torch") is not None:
        print(f"the environment shares the packages of {sys.executable}, which has a torch")
        command.append("--system-site-packages")
    if subprocess.run(command, check=False).returncode != 0:
        shutil.rmtree(folder)
        raise Refused(f"{sys.executable} -m venv failed (on Debian and Ubuntu: python3-venv)")


def install(folder: Path, *, dev: bool) -> None:
    """The checkout and what it needs. Raises Refused."""
    python = str(folder / "bin" / "python")
    command = installer(python)
    probe = [python, "-c", "import importlib.util as u; raise SystemExit(not u.find_spec('torch'))"]
    if subprocess.run(probe, check=False).returncode != 0:
        install_torch(command)
    what = f"{ROOT}[dev]" if dev else str(ROOT)
    by = "uv" if command[0] != python else "pip"
    tools = " and the development tools" if dev else ""
    print(f"{by} installs nsa-runbook{tools} into {folder}; it says nothing while it downloads")
    if subprocess.run([*command, "--editable", what], check=False).returncode != 0:
        raise Refused(f"{by} could not install it into {folder}: see above, and try again")
    compile_all(python)


def compile_all(python: str) -> None:
    """Bytecode of the checkout, which an editable installation leaves to the first import.

    Where PYTHONDONTWRITEBYTECODE is set, as in many containers, each process would compile anew.
    """
    folders = [str(ROOT / name) for name in PACKAGES]
    subprocess.run([python, "-m", "compileall", "-q", *folders], check=False)


def installer(python: str) -> list[str]:
    """The command to which packages are added: uv's where it is there and obeys, else pip's.

    uv reads none of pip's settings: where they say where packages come from, pip installs. By
    itself uv stops at the first source that has a package; it is told to look at all, as pip does.
    """
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    uv = shutil.which("uv")
    if uv is not None:
        listed = subprocess.run(
            [*pip, "config", "list"], check=False, capture_output=True, text=True
        )
        names = {line.partition("=")[0].rpartition(".")[2] for line in listed.stdout.splitlines()}
        if listed.returncode == 0 and names.isdisjoint(_SOURCES):
            strategy = ["--index-strategy", "unsafe-best-match"]
            # By itself it leaves compiling to the first import, of torch a minute.
            options = ["--quiet", "--compile-bytecode", *strategy]
            return [uv, "pip", "install", "--python", python, *options]
    return [*pip, "install", "-qq"]


def install_torch(command: list[str]) -> None:
    """torch's CPU build where there is no GPU, that for CUDA 12 where the driver needs it.

    Else torch comes with the rest. Raises Refused where the driver can run none that is to be had.
    """
    if "PIP_CONSTRAINT" in os.environ or "UV_CONSTRAINT" in os.environ:
        return  # somebody has chosen one
    driver = driver_version()
    if not has_gpu():
        print("no NVIDIA driver here: torch without CUDA will do (about 200 MB)")
        if install_build(command, "cpu", CPU_INDEX):
            return
    elif driver and numbers(driver) < numbers(OLDEST_FOR_CUDA_13):
        needs = f"needs {OLDEST_FOR_CUDA_13} or newer (CUDA 13)"
        why = f"NVIDIA driver {driver}: torch from PyPI {needs}"
        print(f"{why}; its build for CUDA 12.6 does not (about 3 GB)")
        enough = numbers(driver) >= numbers(OLDEST_FOR_CUDA_12)
        if enough and install_build(command, "cu126", CUDA_12_INDEX):
            return
        raise Refused(
            f"{why}. Update the driver, or give a Python that has a torch which runs on this one: "
            "PYTHON=/path/to/it (docs/versions.md says how to get one)"
        )
    print("torch comes with its CUDA libraries, a download of about 3 GB")


def install_build(command: list[str], kind: str, index: str) -> bool:
    """Install the build of that kind, in the version of the constraints; False if there is none."""
    pinned = f"{CONSTRAINTS.read_text().split()[0]}+{kind}"
    print(f"looking for {pinned}")
    sources = ["--extra-index-url", index] if reachable(index) else []
    if subprocess.run([*command, *sources, pinned], check=False, capture_output=True).returncode:
        print(f"there is none for this Python in the sources set here, nor at {index}")
        return False
    return True


def has_gpu() -> bool:
    """Is there an NVIDIA driver?"""
    return DRIVER_FILE.exists() or shutil.which("nvidia-smi") is not None


def driver_version() -> str:
    """The NVIDIA driver's version; empty where that is not known."""
    try:
        text = DRIVER_FILE.read_text()
    except OSError:
        tool = shutil.which("nvidia-smi")
        if tool is None:
            return ""
        asked = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        text = subprocess.run(asked, check=False, capture_output=True, text=True).stdout
    found = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", text)
    return found[0] if found else ""


def numbers(version: str) -> list[int]:
    """A version as what can be compared."""
    return [int(part) for part in version.split(".")]


def reachable(url: str) -> bool:
    """Does the server answer? pip would try an index that does not for minutes."""
    try:
        with urllib.request.urlopen(f"{url}/torch/", timeout=_REACH_S):  # noqa: S310 - https
            return True
    except OSError:
        return False


if __name__ == "__main__":
    raise SystemExit(main())
