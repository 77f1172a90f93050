"""Flight records made by hand: where ranks part, who left, who is late."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nsa.contract import NCCL_FLIGHTS
from runbook.launch.incident import bundle
from runbook.launch.incident.flight import (
    find_desync,
    last_numbers,
    left_the_pattern,
    read_flights,
    read_nccl_rows,
)
from runbook.launch.watch import RankWatch
from runbook.launch.watch.rank_state import RankState
from runbook.records import End, LaunchStatus

TOKEN = "ab" * 16
GRAD, BUS = ("all_reduce", [[1000]], ["Float"]), ("all_reduce", [[5]], ["Double"])
START = [("broadcast", [[50]], ["Long"]), ("all_gather", [[1]], ["Long"])]
Op = tuple[str, list[list[int]], list[str]]


def write(folder: Path, rank: int, ops: list[Op], *, late: dict[int, float] | None = None) -> None:
    """One step is GRAD then BUS, 10 ms apart; `late` seconds are added to single entries."""
    entries = [
        [seq, op, sizes, types, int((seq * 0.01 + (late or {}).get(seq, 0.0)) * 1e9), True]
        for seq, (op, sizes, types) in enumerate(ops, start=1)
    ]
    document = {"schema_version": 1, "rank": rank, "token": TOKEN, "entries": entries}
    (folder / f"flight_rank{rank}.json").write_text(json.dumps(document))


def watch(folder: Path) -> RankWatch:
    return RankWatch(folder, TOKEN, 0.0)


def here(_: int) -> str:
    """The node of each rank where there is one machine."""
    return ""


def steps(count: int) -> list[Op]:
    return [*START, *[GRAD, BUS] * count]


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("strange", [("all_gather", [[5]], ["Double"]), BUS, (*GRAD[:2], ["Half"])])
def test_who_left_the_pattern_is_known_with_two_ranks(
    tmp_path: Path, culprit: int, strange: Op
) -> None:
    write(tmp_path, 1 - culprit, steps(9))
    write(tmp_path, culprit, [*steps(8), strange, BUS])
    desync = find_desync(read_flights(tmp_path, token=TOKEN))
    assert desync is not None
    assert (desync.seq, desync.rank) == (19, culprit)
    assert strange[0] in desync.seen[culprit] and "[[1000]] Float" in desync.seen[1 - culprit]
    assert "desync at collective 19: rank 0:" in desync.text()


@pytest.mark.parametrize(
    ("ranks", "seq", "rank"),
    [(([GRAD, BUS], [GRAD, BUS], [GRAD, GRAD]), 2, 2), (([GRAD], [BUS]), 1, None)],
    ids=["the odd one of three", "nobody without a pattern"],
)
def test_who_is_accused_without_earlier_steps(
    tmp_path: Path, ranks: tuple[list[Op], ...], seq: int, rank: int | None
) -> None:
    for number, ops in enumerate(ranks):
        write(tmp_path, number, ops)
    desync = find_desync(read_flights(tmp_path, token=TOKEN))
    assert desync is not None and (desync.seq, desync.rank) == (seq, rank)


def test_damaged_foreign_and_strange_records_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, 0, steps(3))
    whole = (tmp_path / "flight_rank0.json").read_bytes()
    for cut in range(0, len(whole), 7):
        (tmp_path / "flight_rank1.json").write_bytes(whole[:cut])
        assert set(read_flights(tmp_path, token=TOKEN)) == {0}
    assert read_flights(tmp_path, token="cd" * 16) == {}
    odd = {"token": TOKEN, "entries": [None, [], ["x"] * 6, [1, "op", 5, None, 7, True]]}
    (tmp_path / "flight_rank1.json").write_text(json.dumps(odd))
    assert len(read_flights(tmp_path, token=TOKEN)[1]) == 1


def test_an_aborted_rank_is_a_desync_by_the_others_record(tmp_path: Path) -> None:
    """gloo ends the process that gets more bytes than it waits for; it leaves no record."""
    write(tmp_path, 0, steps(9))
    stack = 'Thread 0x1 (most recent call first):\n  File "/x/torch/d.py", line 3 in all_reduce\n'
    stack += '  File "/y/nsa/bus.py", line 51 in wait\n  File "/y/m.py", line 9 in <module>\n'
    (tmp_path / "stackdump_rank1_77.txt").write_text(stack)
    console = ["what(): op.preamble.length <= op.nbytes. 16 vs 8. Received data size"]
    end = End(status=LaunchStatus.CRASHED, cause="rank 1 was ended by SIGABRT", culprit_rank=1)
    told, files, _ = bundle(watch(tmp_path), end, console=console, load=None, where=here)
    assert told.culprit_rank == 1
    assert "desync at collective 20, sizes 16 for 8" in told.cause
    assert "/y/nsa/bus.py:51 in wait" in told.cause
    assert {path.name for path in files} == {
        "stackdump_rank1_77.txt", "flight_rank0.json", "incident.json"
    }  # fmt: skip
    # The one that lives may be the one that strayed, and not by steps that are computed twice.
    twice = [("all_reduce", [[9]], ["Double"]), GRAD, BUS]
    for ops, culprit in (([*steps(9), BUS], 0), ([*twice, *steps(3)[2:], *twice, *twice[:2]], 1)):
        write(tmp_path, 0, ops)
        assert left_the_pattern(read_flights(tmp_path, token=TOKEN)[0]) == (culprit == 0)
        told = bundle(watch(tmp_path), end, console=console, load=None, where=here)[0]
        assert told.culprit_rank == culprit
    plain = bundle(watch(tmp_path), end, console=["of another kind"], load=None, where=here)[0]
    assert plain.cause == end.cause


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
            "collective_seq_id": seq,
            "profiling_name": f"nccl:{op}",
            "time_created_ns": seq * 10_000_000,
            "input_sizes": [tuple(size) for size in sizes] if seq % 2 else sizes,
            "input_dtypes": types,
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
    ranks = watch(tmp_path)
    ranks.ranks = {rank: RankState(rank=rank, path=tmp_path / "x") for rank in (0, 1)}
    exact, files, _ = bundle(ranks, end, console=[], load=None, where=here)
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
