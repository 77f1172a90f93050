"""One finished run of toys for all that spoil a copy of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.engine import toys
from tests.shared import once


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two phases of three launches, with all reports: for reading only."""

    def make(out: Path) -> Path:
        return toys.run(out, *toys.PHASES.values())[1]

    return once(tmp_path_factory, "toys", make)


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(finished, tmp_path / finished.name))
