"""What holds for all tests, because the machine may be busy, and a run that several read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from tests.cli.shell import Ended, runbook
from tests.shared import once

# Hypothesis fails an example that takes over 200 ms. Several tests at a time on a few cores do that
# to any of them, and no test here means to say how fast something is.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The marker `gpu` is all that a test has to say."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")


def pytest_xdist_auto_num_workers() -> int | None:
    """One worker more than there are processors: a test of a hang waits most of its time."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # xdist reads it
    return len(os.sched_getaffinity(0)) + 1


@pytest.fixture(scope="session")
def preflight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """The first phase for real, by the command, in a folder of its own: for reading only."""

    def run(folder: Path) -> tuple[Path, Ended]:
        words = ("run", "--phase", "preflight", "--profile", "cpu")
        return folder, runbook(*words, cwd=folder, HF_TOKEN="canary-5566")

    return once(tmp_path_factory, "preflight", run)
