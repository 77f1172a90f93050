"""A checkout that is run as it is: `python3 -m runbook` in its folder, with nothing installed.

Its phases and reports are then those of its pyproject.toml, and every process that the program
starts finds the packages that the program itself has.
"""

from __future__ import annotations

import json
import os
from collections.abc import MutableMapping
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from runbook import __version__

HOME = Path(__file__).resolve().parent.parent
DISTRIBUTION = "nsa-runbook"

_PYPROJECT = "pyproject.toml"
_PATH = "PYTHONPATH"


class Checkout(Distribution):
    """What an installed distribution says of itself, from the checkout's pyproject.toml."""

    def __init__(self, home: Path, project: dict[str, Any]) -> None:
        self.home, self._project = home, project

    def read_text(self, filename: str) -> str | None:
        """The two metadata files that are asked for; None for any other."""
        if filename == "METADATA":
            return f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {__version__}\n"
        if filename == "entry_points.txt":
            groups: dict[str, dict[str, str]] = self._project.get("entry-points", {})
            lines = []
            for group, entries in groups.items():
                # Sorted, as in an installed distribution, so that both list them alike.
                ours = sorted(entries.items())
                lines += [f"[{group}]", *(f"{name} = {value}" for name, value in ours)]
            return "\n".join(lines) + "\n"
        return None

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        """Where a file of the checkout is."""
        return self.home / path


@cache
def uninstalled(home: Path = HOME) -> Checkout | None:
    """The checkout at `home` that nobody installed from; None if its packages are installed.

    An editable install counts as installed; one of another folder does not.
    """
    pyproject = home / _PYPROJECT
    if not pyproject.is_file() or _installed_from(home):
        return None
    import tomllib

    project = tomllib.loads(pyproject.read_text(encoding="utf-8")).get("project", {})
    return Checkout(home, project) if project.get("name") == DISTRIBUTION else None


def _installed_from(home: Path) -> bool:
    try:
        found = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return False
    if Path(str(found.locate_file("runbook"))).resolve() == home / "runbook":
        return True
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    editable = origin.get("dir_info", {}).get("editable", False)
    return bool(editable) and Path(unquote(urlparse(origin["url"]).path)).resolve() == home


def share_packages(environ: MutableMapping[str, str], home: Path = HOME) -> None:
    """Let processes that are started with `environ`, in whatever folder, import what we import.

    A path of PYTHONPATH counts from the folder where the program was started; a checkout that is
    not installed comes first.
    """
    paths = [
        str(Path(path).absolute()) for path in environ.get(_PATH, "").split(os.pathsep) if path
    ]
    if uninstalled(home) is not None:
        paths = [str(home), *(path for path in paths if path != str(home))]
    if paths:
        environ[_PATH] = os.pathsep.join(paths)


def how_to_call() -> str:
    """One line for a person if the program is not installed, else an empty text."""
    if uninstalled() is None:
        return ""
    return f"not installed, run from {HOME}: for `runbook` type `python3 -m runbook` there"
