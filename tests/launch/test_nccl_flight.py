"""NCCL's flight dumps: read without running anything, and who did not come."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nsa.contract import NCCL_FLIGHTS
from runbook.launch.incident import bundle
from runbook.launch.incident.flight import find_desync, last_numbers, read_flights, read_nccl_rows
from runbook.launch.watch.rank_state import RankState
from runbook.records import End, LaunchStatus
from tests.launch.test_flight import BUS, GRAD, TOKEN, Op, steps, write

TIMEOUT = (
    "rank 0 was ended by SIGABRT at step 4, by NCCL's watchdog: Watchdog caught collective "
    "operation timeout"
)
# torch writes gloo's record by the same code as NCCL's.
REAL = """
import sys, torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
dist.broadcast(torch.ones(2, 2), 0)
sys.stdout.buffer.write(_dump_fr_trace())
"""


def dump(ops: list[Op]) -> dict[str, Any]:
    """What torch puts into a dump (its FlightRecorder, version 2.10), cut to what is read here."""
    entries = [
        {
            "record_id": seq - 1,
            "pg_id": 0,
            "process_group": ("0", "default_pg"),
            "collective_seq_id": seq,
            "p2p_seq_id": 0,
            "op_id": seq,
            "profiling_name": f"nccl:{op}",
            "time_created_ns": seq * 10_000_000,
            "input_sizes": [tuple(size) for size in sizes] if seq % 2 else sizes,
            "input_dtypes": types,
            "output_sizes": sizes,
            "state": "scheduled",
            "retired": False,
            "timeout_ms": 600_000,
            "is_p2p": False,
        }
        for seq, (op, sizes, types) in enumerate(ops, start=1)
    ]
    return {"version": "2.10", "pg_status": {}, "entries": [*entries, {"is_p2p": True}]}


def write_dump(folder: Path, rank: int, ops: list[Op]) -> Path:
    path = folder / NCCL_FLIGHTS.name(rank)
    path.write_bytes(pickle.dumps(dump(ops), protocol=2))
    return path


def test_a_dump_reads_like_the_trainers_own_record(tmp_path: Path) -> None:
    write_dump(tmp_path, 0, steps(9))
    write(tmp_path, 1, steps(9))
    flights = read_flights(tmp_path, token=TOKEN)
    assert set(flights) == {0, 1} and find_desync(flights) is None
    assert last_numbers(flights) == {0: 20, 1: 20}
    write_dump(tmp_path, 0, [*steps(8), BUS, GRAD])
    desync = find_desync(read_flights(tmp_path, token=TOKEN))
    assert desync is not None and (desync.seq, desync.rank) == (19, 0)


def test_a_dump_of_torch_itself_can_be_read(tmp_path: Path) -> None:
    command = [sys.executable, "-c", REAL, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, check=True)
    rows = read_nccl_rows(done.stdout)
    assert rows is not None
    assert [row[:4] for row in rows] == [
        [1, "all_reduce", [[3]], ["Float"]],
        [2, "broadcast", [[2, 2]], ["Float"]],
    ]
    assert all(isinstance(row[4], int) for row in rows)


@pytest.mark.parametrize("late", [0, 1])
def test_the_rank_that_did_not_come_is_to_blame_and_not_the_one_that_was_aborted(
    tmp_path: Path, late: int
) -> None:
    paths = [write_dump(tmp_path, rank, steps(9 - (rank == late))) for rank in (0, 1)]
    end = End(status=LaunchStatus.CRASHED, cause=TIMEOUT, culprit_rank=0)
    ranks = [RankState(rank=rank, path=tmp_path / "x") for rank in (0, 1)]
    exact, files, _ = bundle(tmp_path, ranks, end, token=TOKEN, console=[], load=None)
    assert exact.culprit_rank == late
    assert exact.cause == f"rank {late} did not come to collective 19 ({TIMEOUT})"
    assert set(paths) <= set(files)


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("harm",)


def test_reading_a_dump_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = pickle.dumps({"entries": [Harmful()]})
    assert read_nccl_rows(data) is None
    assert not (tmp_path / "harm").exists()
    pickle.loads(data)
    assert (tmp_path / "harm").exists(), "the harm is real"


def test_a_torn_or_foreign_file_is_no_dump() -> None:
    whole = pickle.dumps(dump(steps(3)), protocol=2)
    assert read_nccl_rows(whole) is not None
    for cut in range(0, len(whole) - 1, 7):
        assert read_nccl_rows(whole[:cut]) is None
    for data in (b"", b"{}", b"\x80\x02K", pickle.dumps([1]), pickle.dumps({"entries": 3})):
        assert read_nccl_rows(data) is None
    assert read_nccl_rows(pickle.dumps({"entries": [None, 3]})) == []
