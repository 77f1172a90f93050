"""The CPU time of others while a real launch runs: a busy loop shows, our own work does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from phases.kit import OTHER_WORK_SHARE
from runbook.folder import LOAD_JSON, RESOURCES_CSV
from runbook.folder.launch.documents import RESOURCES, Load, load_of
from runbook.folder.launch.rows import read_rows
from runbook.launch.watch.live_status import ResourceLog
from runbook.launch.watch.rank_state import RankState
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


def test_what_this_process_opens_starts_and_writes_is_in_the_next_look(tmp_path: Path) -> None:
    folder = tmp_path / "launch"
    folder.mkdir()
    log, done = ResourceLog(folder), threading.Event()
    rank = RankState(rank=1, path=folder, step=7, pid=os.getpid(), handle=0)
    log.look([rank])
    with ExitStack() as opened:
        for _ in range(3):
            opened.enter_context(Path(os.devnull).open())
        shared = opened.enter_context(TemporaryFile(dir="/dev/shm"))
        name = Path(f"/dev/shm/runbook_test_{os.getpid()}")
        opened.callback(name.unlink)
        name.write_bytes(bytes(2 << 20))
        threads = [threading.Thread(target=done.wait) for _ in range(2)]
        for thread in threads:
            thread.start()
            opened.callback(thread.join)
        opened.callback(done.set)
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        opened.enter_context(child)
        (folder / "debug.bin").write_bytes(bytes(3 << 20))
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "weights").write_bytes(bytes(5 << 20))
        log.look([rank, RankState(rank=0, path=folder)])
        assert shared.fileno() > 0
    # Before pandas is imported to read the rows.
    statm = Path("/proc/self/statm").read_text().split()
    rows = read_rows(folder / RESOURCES_CSV, RESOURCES)
    assert not rows.problems and list(rows.frame["rank"]) == [1, 1]
    before, after = rows.frame.iloc[0], rows.frame.iloc[1]
    grown = after - before
    assert after["rss_mib"] == pytest.approx(
        int(statm[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20, rel=0.2
    )
    assert grown["threads"] == 2 and grown["children"] == 1
    # Three files, one in /dev/shm, and the child's pipe.
    assert grown["descriptors"] == 5
    assert grown["shm_mib"] == pytest.approx(2.0, abs=0.5)
    assert grown["folder_mib"] == pytest.approx(3.0, abs=0.5)
    assert after["step"] == 7 and after["free_mib"] > 0


def test_a_rank_whose_process_is_elsewhere_or_gone_has_no_row(tmp_path: Path) -> None:
    log = ResourceLog(tmp_path)
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    gone = RankState(rank=0, path=tmp_path, pid=child.pid, handle=0)
    log.look([gone, RankState(rank=1, path=tmp_path)])
    assert not (tmp_path / RESOURCES_CSV).exists()
