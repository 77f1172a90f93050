"""Two processes run the shipped tests, after one import of torch.

A plugin (`-p nsa.tests.side_by_side`). The second process is a fork that is made once all tests are
collected. A module belongs to the process that takes it first, so its fixtures are made once. What
the fork reports is reported here when both are done: output, JUnit file and exit code are those of
one process. Without a second processor pytest's own loop runs, and where there is a GPU: asking for
its name is enough for CUDA to refuse a fork.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from itertools import groupby, pairwise
from typing import IO

import pytest
import torch

from nsa.launch.process import arm_death_signal

Module = list[pytest.Item]
# The fork's last word: a test may end its process, with any exit code.
_DONE = "done"


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run everything that was collected; True tells pytest that nothing is left to do."""
    modules = [list(items) for _, items in groupby(session.items, key=lambda item: item.path)]
    # The longest first, by what there is to read, so that both processes end at about one time.
    modules.sort(key=lambda items: -items[0].path.stat().st_size)
    alone = len(os.sched_getaffinity(0)) < 2 or torch.cuda.is_available()
    if len(modules) < 2 or alone or session.testsfailed or session.config.option.collectonly:
        return None
    tickets, printer = os.pipe()
    os.write(printer, bytes(range(len(modules))))
    os.close(printer)
    with tempfile.TemporaryFile("w+", encoding="utf-8") as told:
        sys.stdout.flush()
        child = os.fork()
        if not child:
            _end(session, modules, tickets, told)
        _run(modules, tickets)
        os.close(tickets)
        _, status = os.waitpid(child, 0)
        told.seek(0)
        reports = [json.loads(line) for line in told]
    if status or reports[-1:] != [_DONE]:
        code = os.waitstatus_to_exitcode(status)
        raise RuntimeError(f"the second process of the tests ended early, with {code}")
    for words in reports[:-1]:
        hook = session.config.hook
        report = hook.pytest_report_from_serializable(config=session.config, data=words)
        hook.pytest_runtest_logreport(report=report)
    return True


def _run(modules: list[Module], tickets: int) -> None:
    """Take modules and run them while there are any."""
    while ticket := os.read(tickets, 1):
        items = modules[ticket[0]]
        for item, following in pairwise([*items, None]):
            assert item is not None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)


def _end(session: pytest.Session, modules: list[Module], tickets: int, told: IO[str]) -> None:
    """The fork: nothing is printed, reports go into `told`; never returns."""
    code = 1
    try:
        arm_death_signal(os.environ)
        plugins = session.config.pluginmanager
        capture = plugins.getplugin("capturemanager")
        # The file that captured output goes to is the parent's too.
        capture.stop_global_capturing()
        capture.start_global_capturing()
        plugins.unregister(name="terminalreporter")
        plugins.register(_Teller(session.config, told))
        _run(modules, tickets)
        print(json.dumps(_DONE), file=told, flush=True)
        code = 0
    finally:
        if code:
            traceback.print_exc()
            capture.stop_global_capturing()
        os._exit(code)


class _Teller:
    """Writes every report as a line."""

    def __init__(self, config: pytest.Config, told: IO[str]) -> None:
        self.config, self.told = config, told

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """What pytest-xdist sends, in the same form."""
        words = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        print(json.dumps(words), file=self.told)
