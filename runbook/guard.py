"""Start-up guard: the packages with everyday names must be the ones that came with this program.

`phases` and `reports` are names that other projects use too. A folder of that name in the current
directory (with `python -m` or PYTHONPATH) or a second distribution that overwrote ours would
otherwise run in place of this program's code.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from runbook.errors import RunbookError

PACKAGES = ("nsa", "phases", "reports")
MARKER = '__distribution__ = "nsa-runbook"'


def check_packages(packages: tuple[str, ...] = PACKAGES) -> None:
    """Raise RunbookError if one of the sibling packages is not this distribution's own."""
    home = Path(__file__).resolve().parent.parent
    problems = [problem for name in packages if (problem := _problem(name, home))]
    if problems:
        raise RunbookError(
            "; ".join(problems) + "; start `runbook` outside that folder and without PYTHONPATH, "
            "or reinstall nsa-runbook in a virtual environment of its own"
        )


def _problem(name: str, home: Path) -> str:
    spec = importlib.util.find_spec(name)
    if spec is None:
        return f"package {name!r} is missing beside runbook in {home}"
    if spec.origin is None:
        return f"package {name!r} is a bare folder in {_first(spec.submodule_search_locations)}"
    origin = Path(spec.origin).resolve()
    if origin.parent.parent != home:
        return f"package {name!r} comes from {origin.parent}, not from {home}"
    if MARKER not in origin.read_text(encoding="utf-8"):
        return f"package {name!r} in {origin.parent} was overwritten by another distribution"
    return ""


def _first(locations: object) -> str:
    return next(iter(locations), "?") if isinstance(locations, list | tuple) else str(locations)
