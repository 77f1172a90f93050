"""Where the shipped data files are: inside the wheel, or beside `pyproject.toml` in a checkout."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

from runbook.errors import RunbookError, did_you_mean


def write_atomic(path: Path, text: str) -> None:
    """Write `text` to a temporary name beside `path`, sync it, and rename it into place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_private_dir(path: Path) -> None:
    """Create `path` and its missing parents, each for the owner only; it must not exist yet.

    Raises `FileExistsError` if it does.
    """
    if not path.parent.is_dir():
        make_private_dir(path.parent)
    path.mkdir(mode=0o700)
    path.chmod(0o700)  # whatever the umask was


def utc_text(moment: datetime | None = None) -> str:
    """Now, or `moment`, as `2026-01-31T12:00:00Z`."""
    return (moment or datetime.now(UTC)).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def utc_text_ms() -> str:
    """Now as `2026-01-31T12:00:00.123Z`."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


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
