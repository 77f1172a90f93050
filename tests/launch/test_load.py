"""What the machine shows beside a launch: other work, what ranks hold, the kernel's log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from runbook.folder import LOAD_JSON, RESOURCES_CSV
from runbook.folder.launch.documents import RESOURCES
from runbook.folder.launch.evidence import read_launch
from runbook.folder.launch.rows import read_rows
from runbook.launch.attempt import with_kernel_log
from runbook.launch.watch.live_status import ResourceLog
from runbook.launch.watch.rank_state import RankState
from runbook.machine.kernel_log import MOST_LINES, KernelLine, KernelLog, parse_lines
from runbook.machine.surroundings import LoadMeter
from runbook.records import End, LaunchStatus
from tests.factory.programs import first_on_path, program
from tests.factory.tables import table
from tests.launch.helpers import At, fake_launch, run


def test_work_of_ended_children_is_ours_and_not_that_of_others(tmp_path: Path) -> None:
    meter = LoadMeter()
    others = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        work = "import time\nwhile time.process_time() < 1.0: pass"
        subprocess.run([sys.executable, "-c", work], check=True)
        load = meter.write(tmp_path)
    finally:
        others.kill()
        others.wait()
    document = json.loads((tmp_path / LOAD_JSON).read_text())
    assert document["own_s"] >= 0.9 and document["others_s"] >= 0.3
    assert document["others_s"] <= document["busy_s"] - 1.0 + 0.1
    assert load is not None and load.others > 0 and load.taken <= 1.05


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
        elsewhere = RankState(rank=0, path=folder)
        gone = RankState(rank=2, path=folder, pid=2**22 + 1, handle=0)
        log.look([rank, elsewhere, gone])
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


def dmesg(folder: Path, *lines: str) -> None:
    """The tool in `folder`, as it prints these lines from now on."""
    folder.mkdir(exist_ok=True)
    (folder / "log").write_text("".join(f"<4>[    1.{n:06d}] {t}\n" for n, t in enumerate(lines)))
    program(folder / "dmesg", f"cat {folder}/log")


@table(__file__, "kernel_lines")
def test_a_published_line_is_understood(told: str, text: str) -> None:
    (line,) = parse_lines([text])
    found = [line.kind, line.xid and str(line.xid), line.fatal and "fatal"]
    assert " ".join(filter(None, found)) == told


def test_lines_of_the_window_that_concern_count_with_secrets_blanked_and_no_flood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary-77aa55")
    first_on_path(monkeypatch, tmp_path)
    before = "NVRM: Xid (PCI:0000:17:00): 48, before the launch"
    dmesg(tmp_path, before)
    log = KernelLog()
    within = ["EXT4-fs (vda): mounted", "NVRM: Xid (PCI:0000:17:00): 79, in it"]
    dmesg(tmp_path, before, *within, *["NVRM: says canary-77aa55"] * (MOST_LINES + 6))
    window = log.close(tmp_path)
    document = json.loads((told := tmp_path / "kernel_log.json").read_text())
    assert document["lines"] == [line.text for line in window.lines]
    assert document["lines"][0] == "NVRM: Xid (PCI:0000:17:00): 79, in it"
    assert document["source"] == "dmesg --raw"
    assert (len(window.lines), window.left_out) == (MOST_LINES, 7)
    assert "canary" not in told.read_text()


def test_a_log_that_cannot_be_read_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "bin" / "dmesg", "echo 'Operation not permitted' >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    window = KernelLog().close(tmp_path)
    assert window.source == "" and window.lines == []
    for part in ("dmesg: exit code 1: Operation not", "journalctl: not installed"):
        assert part in window.problem


def test_a_window_begins_after_the_last_line_that_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_on_path(monkeypatch, tmp_path)
    dmesg(tmp_path, "old", "NVRM: Xid (PCI:0000:17:00): 48, old")
    log = KernelLog()
    dmesg(tmp_path, "old", "NVRM: Xid (PCI:0000:17:00): 48, old", "NVRM: new")
    window = log.close(tmp_path)
    assert (window.source, [line.text for line in window.lines]) == ("dmesg --raw", ["NVRM: new"])
    log = KernelLog()
    dmesg(tmp_path, "NVRM: all anew")
    window = log.close(tmp_path)
    assert window.lost and [line.text for line in window.lines] == ["NVRM: all anew"]


def test_the_journal_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = '{"__CURSOR": "s=2", "MESSAGE": "NVRM: Xid (PCI:0000:17:00): 79, off the bus"}'
    program(tmp_path / "dmesg", "exit 1")
    program(
        tmp_path / "journalctl",
        "for last; do :; done\ncase $last in\n"
        '--lines=1) echo \'{"__CURSOR": "s=1", "MESSAGE": "old"}\';;\n'
        f"--after-cursor=s=1) echo '{new}';;\nesac",
    )
    first_on_path(monkeypatch, tmp_path)
    window = KernelLog().close(tmp_path)
    assert window.source == "journalctl -k" and window.lines[0].xid == 79


XID = "NVRM: Xid (PCI:0000:17:00): {}, pid=7"
CRASH = End(status=LaunchStatus.CRASHED, cause="rank 1 ended: CUDA error", culprit_rank=1)
OURS = ("0000:17:00",)


def lines(*numbers: int) -> list[KernelLine]:
    return parse_lines([XID.format(number) for number in numbers])


@pytest.mark.parametrize("number", [48, 64, 74, 79, 94, 95, 119, 120, 13, 31, 43, 45, 63, 92, 999])
def test_an_xid_that_no_program_causes_is_a_hardware_error_and_any_other_is_named(
    number: int,
) -> None:
    end = with_kernel_log(CRASH, lines(number), slots=OURS, pids={})
    hardware = number in (48, 64, 74, 79, 94, 95, 119, 120)
    status = LaunchStatus.HARDWARE_ERROR if hardware else LaunchStatus.CRASHED
    assert (end.status, end.culprit_rank) == (status, 1)
    assert f"GPU 0000:17:00: Xid {number} (" in end.cause and CRASH.cause in end.cause


def test_a_rank_that_the_kernel_killed_for_memory_is_told_by_its_log() -> None:
    killed = parse_lines(["Out of memory: Killed process 4711 (python) total-vm:9kB"])
    end = with_kernel_log(CRASH, killed, slots=(), pids={4711: 0})
    assert end.status is LaunchStatus.OUT_OF_MEMORY and end.culprit_rank == 0
    assert with_kernel_log(CRASH, killed, slots=(), pids={1: 0}) == CRASH


@pytest.mark.parametrize("fault", ["segv", ""])
def test_an_xid_makes_a_crash_a_hardware_error_and_no_good_end_a_bad_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    programs = tmp_path / "bin"
    dmesg(programs)
    first_on_path(monkeypatch, programs)
    launch = fake_launch("--fault", fault, "--at", "20", steps=40)
    # The card falls off the bus while the launch trains.
    result = run(launch, tmp_path, observer=At(1, lambda _: dmesg(programs, XID.format(79))))
    evidence = read_launch(tmp_path, launch, result)
    assert evidence.kernel_log is not None and len(evidence.kernel_log["lines"]) == 1
    assert evidence.devices_after is not None and evidence.problems == ()
    if fault:
        assert result.status is LaunchStatus.HARDWARE_ERROR
        assert "Xid 79 (GPU has fallen off the bus)" in result.cause
        assert "baseline/one/kernel_log.json" in result.evidence
    else:
        assert result.status is LaunchStatus.COMPLETED and result.evidence == ()
