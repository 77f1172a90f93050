"""The folder of a run: made once, never reused."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from runbook.collect import git
from runbook.files import make_private_dir

__all__ = ["create_run_folder"]

_SHORT_SHA = 7
_TRIES = 100


def create_run_folder(out: Path) -> Path:
    """Create `out/<UTC time>-<sha7>/` for the owner only and return it.

    `nogit` stands for the commit where there is none. A second run within the same second gets a
    number behind. Raises `OSError` if the folder cannot be made.
    """
    checkout = git.find_checkout()
    sha = git.head_sha(checkout) if checkout else None
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{(sha or 'nogit')[:_SHORT_SHA]}"
    out = out.resolve()
    for number in range(1, _TRIES):
        folder = out / (name if number == 1 else f"{name}-{number}")
        try:
            make_private_dir(folder)
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"{out} has {_TRIES} runs of the same second: {name}")
