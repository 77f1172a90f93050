"""Where the shipped data files are: inside the wheel, or beside `pyproject.toml` in a checkout."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from runbook.errors import RunbookError, UsageError


def write_atomic(path: Path, text: str) -> None:
    """`write_whole` of a text."""
    from nsa.contract.writing import write_whole

    write_whole(path, text.encode())


def write_document(path: Path, document: Mapping[str, object]) -> None:
    """`write_whole` of a JSON document that says the version of its form first."""
    write_atomic(path, json.dumps({"schema_version": 1, **document}, indent=2) + "\n")


def not_text(text: str) -> str:
    """Why no file can hold it, as bytes of a command line that are not UTF-8; empty if one can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is not UTF-8 text (or the locale is not), and a run's files are"
    return ""


# The largest file that is read whole (JSON, XML, a log of another trainer), and the largest one
# that is read line by line. A million steps of this trainer make heartbeats of 1.2 GB.
LARGEST_DOCUMENT_BYTES = 64 << 20
LARGEST_TABLE_BYTES = 256 << 20
LARGEST_LOG_BYTES = 2 << 30


def too_large(path: Path, size: int, most: int) -> OSError:
    """What is raised in place of reading a file of that many bytes."""
    return OSError(errno.EFBIG, f"has {size} bytes, at most {most} are read", str(path))


def read_bytes(path: Path, most: int = LARGEST_DOCUMENT_BYTES) -> bytes:
    """The bytes of a file. Raises OSError, also where there are more than `most`."""
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        data = b"" if size > most else stream.read(most + 1)
    if max(size, len(data)) > most:
        raise too_large(path, max(size, len(data)), most)
    return data


def text_there(path: Path) -> str:
    """The text of a file, such as one of the kernel; empty where it is gone or not ours to read."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


_NAME = "runbook"


def read_given(path: Path) -> bytes:
    """The bytes of a file that a person named.

    Raises OSError, also for what is too large, can be read once only or has no end: a device, a
    pipe.
    """
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        text = "is a pipe or a device, and is read more than once; save it as a file"
        raise OSError(errno.EINVAL, text, str(path))
    return read_bytes(path)


def make_private_dir(path: Path) -> None:
    """Create `path` and its missing parents, each for the owner only; it must not exist yet.

    Raises `FileExistsError` if it does.
    """
    if not path.parent.is_dir():
        try:
            make_private_dir(path.parent)
        except FileExistsError:
            # Another node of the job makes the same parents at this moment.
            if not path.parent.is_dir():
                raise
    path.mkdir(mode=0o700)
    path.chmod(0o700)  # whatever the umask was


@contextmanager
def written_to(flag: str, path: Path) -> Iterator[None]:
    """`UsageError` where the machine refuses what a person asked to be written, and by what."""
    try:
        yield
    except OSError as error:
        text = f"{flag} {path}: cannot be written: {error.strerror or error}"
        raise UsageError(text, hint="name a place that can be written") from error


def make_new_dir(flag: str, path: Path) -> None:
    """`make_private_dir` of what a person named. Raises `UsageError` if it cannot be made."""
    if os.path.lexists(path):
        raise UsageError(f"{flag} {path}: is there already", hint="name a new folder")
    with written_to(flag, path):
        make_private_dir(path)


def utc_text(moment: datetime | None = None) -> str:
    """Now, or `moment`, as `2026-01-31T12:00:00Z`."""
    return (moment or datetime.now(UTC)).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def utc_text_ms() -> str:
    """Now as `2026-01-31T12:00:00.123Z`."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def utc_stamp(later_s: float = 0.0) -> str:
    """Now, or so much later, as the names of folders have it: `20260131T120000Z`."""
    return f"{datetime.now(UTC) + timedelta(seconds=later_s):%Y%m%dT%H%M%SZ}"


def utc_seconds(text: str) -> float:
    """When a text of `utc_text` was, s since the epoch; 0 of what is no time with its zone."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return 0.0
    return moment.timestamp() if moment.tzinfo else 0.0


def data_path(name: Literal["templates", "configs", "docs"]) -> Path:
    """Return the folder of this name.

    An installed wheel carries them under `runbook/_data/`; a checkout has them at its top, which
    counts only if `pyproject.toml` sits beside them, so that a stray folder of the same name in
    site-packages is never taken. Raises `RunbookError` if the folder is in neither place.
    """
    package = Path(__file__).parent
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


def page(name: str) -> str:
    """Where this page of the documentation is, as one would type it here."""
    return near(data_path("docs") / f"{name}.md")


def shipped_data(name: str) -> Any:
    """What a YAML file of the shipped configs holds; `name` is its path there, without the end."""
    from nsa.strict_yaml import shipped

    return shipped(data_path("configs") / f"{name}.yaml")


def near(path: str | Path) -> str:
    """The path as one would type it here: relative if it lies below the current folder."""
    absolute, here = Path(path).absolute(), Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)


def typed_here() -> str:
    """What one types for this program here: the path of its script where PATH lacks it.

    Without a script (`python3 -m runbook`) it is the name; `how_to_call` tells of that.
    """
    script = Path(sys.argv[0])
    if script.name != _NAME or not script.is_file() or shutil.which(_NAME):
        return _NAME
    path = near(script)
    return shlex.quote(path if os.sep in path else f"{os.curdir}{os.sep}{path}")


def is_file(name_or_path: str) -> bool:
    """Is this the path of a document of one's own, and not the name of a shipped one?"""
    return "/" in name_or_path or name_or_path.endswith((".yaml", ".yml"))


def shipped_names(folder: Path) -> tuple[str, ...]:
    """Names of the shipped documents in alphabetical order, none of them read: for `--help`."""
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))
