"""Where the shipped data files are: inside the wheel, or beside `pyproject.toml` in a checkout."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from runbook.errors import RunbookError, did_you_mean

__all__ = ["DATA_FOLDERS", "data_path"]

DATA_FOLDERS = ("templates", "configs")


def data_path(name: str) -> Path:
    """Return the folder `templates` or `configs`.

    An installed wheel carries both under `runbook/_data/`; a checkout has them at its top, which
    counts only if `pyproject.toml` sits beside them, so that a stray folder of the same name in
    site-packages is never taken. Raises `RunbookError` if the folder is in neither place.
    """
    if name not in DATA_FOLDERS:
        raise RunbookError(
            f"no data folder {name!r}{did_you_mean(name, DATA_FOLDERS)}; "
            f"there are: {', '.join(DATA_FOLDERS)}"
        )
    package = Path(str(files("runbook")))
    shipped = package / "_data" / name
    if shipped.is_dir():
        return shipped
    checkout = package.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / name).is_dir():
        return checkout / name
    raise RunbookError(
        f"the data folder {name!r} is missing: looked for {shipped} and {checkout / name}; "
        "install the package again"
    )
