"""What holds for all tests, because the machine may be busy, and a run that several read."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from nsa.loading import for_good
from tests import executed
from tests.cli.shell import Ended, runbook
from tests.shared import once

# Hypothesis fails an example that takes over 200 ms. Several tests at a time on a few cores do that
# to any of them, and no test here means to say how fast something is.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Thousands of tests and their modules stay for as long as the process."""
    with for_good():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is allowed to take longer than others begins first, or one worker is last with it."""
    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The marker `gpu` is all that a test has to say."""
    executed.forget()
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """A test that is marked to execute kinds of commands fails where it did not."""
    result = yield
    said = {kind for mark in item.iter_markers(executed.MARK) for kind in mark.args}
    if missing := sorted(said - executed.noted()):
        pytest.fail(f"marked with commands that it did not execute: {', '.join(missing)}")
    return result


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
