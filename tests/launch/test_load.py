"""The CPU time of others while a real launch runs: a busy loop shows, our own work does not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from phases.kit import OTHER_WORK_SHARE
from runbook.folder import LOAD_JSON
from runbook.folder.launch.documents import Load, load_of
from runbook.machine.surroundings import LoadMeter
from tests.launch.helpers import fake_launch, run

_SPIN = "import sys; sys.stdout.write('x'); sys.stdout.flush()\nwhile True: pass"
_WORK = "import time\nwhile time.process_time() < 1.0: pass"


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """So many processes of somebody else that compute all the time."""
    loops = [
        subprocess.Popen([sys.executable, "-c", _SPIN], stdout=subprocess.PIPE)
        for _ in range(count)
    ]
    try:
        for loop in loops:
            assert loop.stdout is not None and loop.stdout.read(1) == b"x"
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.communicate()


def load_in(folder: Path) -> Load:
    found = load_of([json.loads((folder / LOAD_JSON).read_text())])
    assert found is not None
    return found


def test_a_launch_beside_a_busy_machine_says_so(tmp_path: Path) -> None:
    launch = fake_launch("--dt", "0.05", steps=40)
    with busy_loops(load_cpus()):
        assert run(launch, tmp_path).ok
    load = load_in(tmp_path / launch.run_dir)
    assert load.others > OTHER_WORK_SHARE
    assert load.taken <= 1.05


def load_cpus() -> int:
    """As many loops as CPUs: enough whatever else the scheduler has to do."""
    import psutil

    return psutil.cpu_count() or 1


def test_our_own_work_is_not_that_of_others(tmp_path: Path) -> None:
    meter = LoadMeter()
    workers = [subprocess.Popen([sys.executable, "-c", _WORK]) for _ in range(2)]
    for worker in workers:
        assert worker.wait() == 0
    meter.write(tmp_path)
    document = json.loads((tmp_path / LOAD_JSON).read_text())
    assert document["own_s"] >= 2.0, "children that ended are ours"
    assert document["others_s"] <= document["busy_s"] - 2.0 + 0.1
    assert document["total_s"] > 0 and document["problem"] == ""


def test_several_launches_are_one_load_and_nothing_is_none() -> None:
    quiet = {"problem": "", "cpus": 2, "total_s": 60.0, "others_s": 0.0, "steal_s": 0.0}
    busy = quiet | {"total_s": 20.0, "others_s": 8.0, "steal_s": 4.0, "load_after": [3.0, 2.0, 1.0]}
    assert load_of([quiet, None, busy]) == Load(cpus=2, others=0.1, steal=0.05, highest=3.0)
    assert load_of([]) is load_of([None]) is load_of([{"problem": "none"}]) is None
