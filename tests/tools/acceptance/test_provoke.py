"""What a hang has to leave; a folder that lacks one of it does not pass."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from nsa.inject.__main__ import KINDS
from runbook.config import load_profile
from runbook.records import LaunchResult, LaunchStatus
from runbook.tools.acceptance.provoke import (
    ON_GPU,
    STAND_IN,
    Hang,
    hang_launch,
    judge,
    keep_fixtures,
)

ASLEEP, STUCK = ON_GPU
GAVE_UP = "NCCL's watchdog: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)"
SILENT = "hang: rank 0 silent for 5.6 s in phase step at step 6 (budget 5 s)"
HUNG = LaunchResult(status=LaunchStatus.HUNG, cause=f"{SILENT}; {GAVE_UP}")
CRASHED = LaunchResult(status=LaunchStatus.CRASHED, cause=GAVE_UP)


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """What both hangs together would leave of one rank."""
    (tmp_path / "injected.json").write_text(json.dumps({"mono": 1.0}))
    (tmp_path / "stackdump_rank0_77.txt").write_text(f"File {tmp_path}/a.py\n")
    (tmp_path / "heartbeat_rank0.jsonl").write_text("{}\n")
    (tmp_path / "flight_rank0.json").write_text(json.dumps({"entries": [[1, "all_reduce"]]}))
    entry = {"collective_seq_id": 1, "profiling_name": "nccl:all_reduce", "input_sizes": [[4]]}
    (tmp_path / "nccl_flight_rank0").write_bytes(pickle.dumps({"entries": [entry]}))
    return tmp_path


def test_all_of_it(left: Path) -> None:
    assert judge(ASLEEP, HUNG, left, ranks=1) == []
    assert judge(STUCK, CRASHED, left, ranks=1) == []


def test_a_rank_alone_keeps_no_record_of_collectives_and_two_have_to(left: Path) -> None:
    (left / "flight_rank0.json").unlink()
    assert judge(ASLEEP, HUNG, left, ranks=1) == []
    (left / "heartbeat_rank1.jsonl").write_text("{}\n")
    assert judge(ASLEEP, HUNG, left, ranks=2) == ["no flight record with a collective"]


def test_the_cause_has_to_say_what_was_seen(left: Path) -> None:
    wordless = LaunchResult(status=LaunchStatus.HUNG, cause="a hang")
    assert judge(ASLEEP, wordless, left, ranks=1) == ["no silence in the cause"]
    assert judge(STUCK, wordless.model_copy(update={"cause": SILENT}), left, ranks=1) == [
        "no word of NCCL's watchdog in the cause"
    ]


@pytest.mark.parametrize(
    ("hang", "name", "said"),
    [
        (ASLEEP, "injected.json", "the hang was never injected"),
        (ASLEEP, "stackdump_rank0_77.txt", "no stack dump"),
        (ASLEEP, "heartbeat_rank0.jsonl", "no heartbeat of every rank"),
        (STUCK, "nccl_flight_rank0", "no dump of NCCL's watchdog that can be read"),
    ],
)
def test_one_is_missing(left: Path, hang: Hang, name: str, said: str) -> None:
    (left / name).unlink()
    assert said in judge(hang, HUNG, left, ranks=1)


@pytest.mark.parametrize("content", [b"", b"\x80\x05", pickle.dumps({"entries": []})])
def test_a_dump_that_says_nothing(left: Path, content: bytes) -> None:
    (left / "nccl_flight_rank0").write_bytes(content)
    assert judge(STUCK, CRASHED, left, ranks=1) == ["no dump of NCCL's watchdog that can be read"]


def test_a_launch_that_ended_well_was_no_hang(left: Path) -> None:
    done = LaunchResult(status=LaunchStatus.COMPLETED)
    assert judge(ASLEEP, done, left, ranks=1) == ["ended as completed, wanted hung"]


def test_fixtures_name_no_place(left: Path, tmp_path: Path) -> None:
    target = tmp_path / "fixtures"
    kept = keep_fixtures(left, target)
    assert kept == ["flight_rank0.json", "stackdump_rank0_77.txt", "nccl_flight_rank0.json"]
    rows = json.loads((target / "nccl_flight_rank0.json").read_text())
    assert rows[0][:2] == [1, "all_reduce"]


@pytest.mark.parametrize("name", ["h200x1", "a100x2_pcie4", "cpu"])
def test_the_launches_are_such_as_the_trainer_takes(name: str) -> None:
    profile = load_profile(name)
    for hang in (*ON_GPU, *STAND_IN):
        words = hang_launch(hang, profile).words()
        assert words[words.index("nsa.inject") + 1] in KINDS
        assert words[words.index("nsa.inject") + 2] == str(profile.ranks - 1)
