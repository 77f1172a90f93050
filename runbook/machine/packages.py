"""Which code an interpreter of this machine imports and runs before ours: asked without importing.

PYTHONPATH, a `.pth` file and `sitecustomize` reach every launch, and git knows nothing of them.
"""

from __future__ import annotations

import importlib.util
import site
import sys
from importlib import metadata
from pathlib import Path

PACKAGES = ("nsa", "runbook", "phases", "reports")
_AT_START = ("sitecustomize", "usercustomize")
# What makes the environment itself writes, in the name of no package.
_OF_AN_ENVIRONMENT = ("_virtualenv.pth", "distutils-precedence.pth")


def package_folders() -> dict[str, Path]:
    """The folder that each of the project's packages is imported from, links resolved."""
    found = {}
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            found[name] = Path(spec.origin).resolve().parent
    return found


def startup_code() -> list[str]:
    """Files that every interpreter here runs before the program and no installed package owns.

    Such a file can change what a launch computes, or how fast. Python's own are left out.
    """
    found = []
    for name in _AT_START:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None and not _is_pythons(Path(spec.origin)):
            found.append(spec.origin)
    lines = [
        path for folder in site.getsitepackages() for path in sorted(Path(folder).glob("*.pth"))
    ]
    running = [path for path in lines if path.name not in _OF_AN_ENVIRONMENT and _runs(path)]
    owned = _owned() if running else set()
    return found + [str(path) for path in running if path.resolve() not in owned]


def _is_pythons(path: Path) -> bool:
    """True for what came with the interpreter (Debian has a `sitecustomize` of its own)."""
    library = Path(sys.base_prefix, "lib").resolve()
    return path.resolve().is_relative_to("/etc") or (
        path.is_relative_to(library) and "site-packages" not in path.parts
    )


def _runs(path: Path) -> bool:
    """Has the file a line that Python executes, and does not take for a folder?"""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return any(line.startswith(("import ", "import\t")) for line in text.splitlines())


def _owned() -> set[Path]:
    """Every `.pth` file that an installed package lists as its own."""
    return {
        Path(str(package.locate_file(file))).resolve()
        for package in metadata.distributions()
        for file in package.files or ()
        if file.suffix == ".pth"
    }
