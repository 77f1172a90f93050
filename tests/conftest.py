"""What holds for all tests, because the machine may be busy, and a run that several read."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from tests.cli.shell import Ended, runbook
from tests.shared import once

# Hypothesis fails an example that takes over 200 ms. Several tests at a time on a few cores do that
# to any of them, and no test here means to say how fast something is.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.fixture(scope="session")
def preflight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """The first phase for real, by the command, in a folder of its own: for reading only."""

    def run(folder: Path) -> tuple[Path, Ended]:
        words = ("run", "--phase", "preflight", "--profile", "cpu")
        return folder, runbook(*words, cwd=folder, HF_TOKEN="canary-5566")

    return once(tmp_path_factory, "preflight", run)
