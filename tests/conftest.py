"""What holds for all tests: two tiers, a machine that may be busy, and a run that several read.

What is marked `slow` is the long tier: left out by default, and said so in the last lines. It runs
with `--long`, where `-m` decides instead, and where tests are named one by one (`FILE::TEST`).
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from nsa.torch_env import for_good
from tests import executed
from tests.cli.shell import Ended, runbook
from tests.shared import once
from tests.tiers import LONG_TIER, begin_long, by_tier

# Hypothesis fails an example that takes over 200 ms. Several tests at a time on a few cores do that
# to any of them, and no test here means to say how fast something is.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")

_LEFT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help=f"the long tier too: marked {LONG_TIER}")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.long:
        begin_long()


def _leaves_the_long_tier(config: pytest.Config) -> bool:
    asked = config.option.long or config.option.markexpr
    return not asked and not all("::" in word for word in config.args)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Thousands of tests and their modules stay for as long as the process."""
    with for_good():
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is allowed to take longer than others begins first, or one worker is last with it."""
    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)
    if _leaves_the_long_tier(config):
        left = [item for item in items if item.get_closest_marker(LONG_TIER)]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not item.get_closest_marker(LONG_TIER)]
        config.stash[_LEFT] = len(left)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Only workers collect, and each of them everything."""
    if (told := getattr(session.config, "workeroutput", None)) is not None:
        told[LONG_TIER] = session.config.stash.get(_LEFT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[_LEFT] = getattr(node, "workeroutput", {}).get(LONG_TIER, 0)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if left := config.stash.get(_LEFT, 0):
        tests = f"{left} test{'s' * (left > 1)} left to the long tier"
        terminalreporter.write_line(f"{tests}: `make test-all` runs everything, `--long` these too")


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


@pytest.fixture(scope="session", params=by_tier(("v2_parity", "preflight"), "v2_parity".__eq__))
def one_phase(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Ended]:
    """A phase for real, by the command, in a folder of its own: for reading only.

    The quickest phase; in the long tier the one that looks at the whole machine, too. Modules with
    the names of ours lie in that folder, and no launch imports them.
    """
    phase: str = request.param

    def run(folder: Path) -> tuple[str, Path, Ended]:
        (folder / "nsa").mkdir()
        for name in ("nsa/__init__.py", "pytest.py", "torch.py", "types.py", "json.py"):
            (folder / name).write_text("raise ImportError('the folder of whoever started the run')")
        words = ("run", "--phase", phase, "--profile", "cpu")
        return phase, folder, runbook(*words, cwd=folder, HF_TOKEN="canary-5566")

    return once(tmp_path_factory, phase, run)


@pytest.fixture
def precision() -> Iterator[None]:
    """That of products of float32 is set for a process; other tests must not see it."""
    import torch

    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)
