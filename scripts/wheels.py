"""Download what another machine lacks to run a checkout, as wheels: `make wheels`.

    python3 scripts/wheels.py --python 3.12 --have "torch numpy pandas" [--have FILE] [--to wheels]

FILE is what `pip list` or `pip freeze` printed there: what it names is not downloaded, unless it is
older than pyproject.toml demands. The wheels fit manylinux, and that Python. Standard library only.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from environment import Refused, check_python

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
LIMIT_MIB = 64
# glibc 2.28, as of RHEL 8 and Ubuntu 20.04, and everything before it that wheels are tagged for.
_TAGS = [*(f"manylinux_2_{minor}" for minor in range(28, 4, -1)), "manylinux2014"]
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)>=([0-9.]+)(?:,<[0-9.]+)?")
_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:==(\d\S*))?")
# A row of `pip list`, or a line of `pip freeze`: NAME==VERSION, or NAME @ wherever it came from.
_LISTED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\s*==\s*|\s+)(?:(\d\S*)|@ )")


def main(words: list[str] | None = None) -> int:
    """Download; 0, or 2 with the reason on stderr."""
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", default=here, metavar="3.N", help=f"its Python ({here})")
    parser.add_argument("--arch", default=platform.machine(), help="its architecture (as here)")
    parser.add_argument("--have", action="append", default=[], metavar="NAMES|FILE")
    parser.add_argument("--to", type=Path, default=ROOT / "wheels", metavar="FOLDER")
    args = parser.parse_args(words)
    try:
        check_python()
        have = read_have(args.have)
        lacking = missing(requirements(ROOT / "pyproject.toml"), have)
        found = download(lacking, have, args) if lacking else []
        tell(found, args.to)
    except (ValueError, Refused) as error:
        print(f"wheels: {error}", file=sys.stderr)
        return 2
    return 0


def requirements(pyproject: Path) -> dict[str, str]:
    """Lowest version by name, of what the program needs. Raises ValueError for any other form."""
    import tomllib

    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    table = {}
    for text in project["dependencies"]:
        found = _REQUIREMENT.fullmatch(text)
        if found is None:
            raise ValueError(f"{pyproject}: {text!r} is not of the form NAME>=VERSION")
        table[normal(found[1])] = found[2]
    return table


def read_have(given: Iterable[str]) -> dict[str, str]:
    """Version by name of what the machine has; an empty text where none is said.

    Raises ValueError for a word that is neither a package nor a file, and without torch.
    """
    have: dict[str, str] = {}
    for text in given:
        if is_file(text):
            lines = Path(text).read_text(encoding="utf-8").splitlines()
            # Other lines are titles, options and comments.
            matches = [found for line in lines if (found := _LISTED.match(line.strip()))]
        else:
            matches = [word_of(word) for word in text.split()]
        have |= {normal(found[1]): found[2] or "" for found in matches}
    if "torch" not in have:
        raise ValueError(
            "the machine's torch is not among --have: it uses the one that fits its driver, which "
            "is not carried; name it with what else is there (--have torch, or its `pip list`)"
        )
    return have


def is_file(text: str) -> bool:
    """Is there such a file? A list of names may be longer than the name of a file can be."""
    try:
        return Path(text).is_file()
    except OSError:
        return False


def word_of(word: str) -> re.Match[str]:
    """NAME or NAME==VERSION. Raises ValueError for anything else."""
    found = _NAMED.fullmatch(word)
    if found is None:
        raise ValueError(f"--have {word}: neither NAME, NAME==VERSION nor a file that is there")
    return found


def missing(wanted: Mapping[str, str], have: Mapping[str, str]) -> list[str]:
    """The requirements that are not there, or too old there. Raises ValueError for an old torch."""
    lacking = [
        f"{name}>={lowest}"
        for name, lowest in wanted.items()
        if name not in have or (have[name] and numbers(have[name]) < numbers(lowest))
    ]
    if any(text.startswith("torch>=") for text in lacking):
        raise ValueError(f"torch {have['torch']} is too old: {wanted['torch']} is needed")
    return lacking


def download(lacking: list[str], have: Mapping[str, str], args: argparse.Namespace) -> list[Path]:
    """The wheels of `lacking` and of what they need and the machine has not. Raises ValueError."""
    replaced = {normal(text.partition(">=")[0]) for text in lacking}
    there = {name: version for name, version in have.items() if name not in replaced}
    with tempfile.TemporaryDirectory() as folder:
        target, fixed = Path(folder) / "new", Path(folder) / "there.txt"
        # So that the new packages fit the ones that stay.
        fixed.write_text("".join(f"{n}=={v}\n" for n, v in there.items() if v), encoding="utf-8")
        command = [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"),
            *("--only-binary=:all:", "--implementation", "cp", "--python-version", args.python),
            *(f"--platform={tag}_{args.arch}" for tag in _TAGS),
            *("--constraint", str(fixed), "--dest", str(target), *lacking),
        ]
        if subprocess.run(command, check=False).returncode != 0:
            raise ValueError(f"pip found no wheels of {', '.join(lacking)}, see above")
        new = [path for path in sorted(target.iterdir()) if distribution(path) not in there]
        size_mib = sum(path.stat().st_size for path in new) / MIB
        if size_mib > LIMIT_MIB:
            largest = max(new, key=lambda path: path.stat().st_size)
            raise ValueError(
                f"{len(new)} wheels of {size_mib:.0f} MiB, the largest {largest.name}: more than "
                f"{LIMIT_MIB} MiB; name what the machine has: --have FILE of its `pip list`"
            )
        args.to.mkdir(parents=True, exist_ok=True)
        for old in args.to.glob("*.whl"):
            old.unlink()
        return [Path(shutil.move(path, args.to / path.name)) for path in new]


def tell(found: list[Path], folder: Path) -> None:
    """What there is now, and how to use it."""
    for path in found:
        print(f"{path.stat().st_size / MIB:6.1f} MiB  {path.name}")
    if not found:
        print("the machine lacks nothing; in the checkout: python3 -m runbook run")
        return
    name = folder.name
    print(
        f"take {folder} along with the checkout, and there:\n"
        f"  python3 -m pip install --no-index --no-deps --target {name}/packages {name}/*.whl\n"
        f"  PYTHONPATH={name}/packages python3 -m runbook run"
    )


def normal(name: str) -> str:
    """The one spelling of a package's name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def distribution(wheel: Path) -> str:
    """The package of a wheel file."""
    return normal(wheel.name.partition("-")[0])


def numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with, without trailing zeros."""
    found = [int(number) for number in re.match(r"\d+(?:\.\d+)*", version)[0].split(".")]
    while found and found[-1] == 0:
        found.pop()
    return tuple(found)


if __name__ == "__main__":
    raise SystemExit(main())
