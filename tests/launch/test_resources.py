"""What a rank holds besides memory, as the kernel tells it of a real process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from runbook.folder import RESOURCES_CSV
from runbook.folder.launch.documents import RESOURCES
from runbook.folder.launch.rows import read_rows
from runbook.launch.watch.live_status import ResourceLog
from runbook.launch.watch.rank_state import RankState


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
