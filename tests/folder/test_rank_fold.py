"""One rank's heartbeats, record by record: clocks, steps, strangers, and how much is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runbook.folder.launch.heartbeats import RankFold, fold_file, heartbeats_in, whole_number
from runbook.folder.launch.rank_log import read_heartbeats
from runbook.records.evidence import RankLog
from tests.factory.files import beat

KEPT = 4096


def folded(*records: dict[str, Any]) -> RankFold:
    fold = RankFold(rank=0)
    for record in records:
        fold.take({"event": "step_end", "rank": 0, "pid": 42, **record})
    return fold


def read(folder: Path, text: str) -> RankLog:
    path = folder / "heartbeat_rank0.jsonl"
    path.write_text(text)
    return read_heartbeats(path, rank=0, relative_to=folder)


def test_clocks_go_back_only_within_one_process() -> None:
    fold = folded(
        {"mono": 10.0, "ts": 100.0},
        {"mono": 10.0, "ts": 100.0},
        {"mono": 9.0, "ts": 107.5},
        {"mono": 2.0, "ts": 104.0, "pid": 43},
        {"mono": 17.0, "ts": 106.0, "pid": 43},
    )
    assert (fold.clock_back, fold.wall_clock_back, fold.silence_s) == (1, 1, 7.5)
    assert (fold.first_mono, fold.mono, fold.clock_s) == (10.0, 17.0, 7.0)
    assert list(fold.pids) == [42, 43]


def test_the_name_of_an_event_of_another_trainer() -> None:
    fold = RankFold(rank=2)
    for record in ({"msg": "hi", "token": 1, "rank": 2}, {"event": 5, "rank": 7, "phase": "x"},
                   {"rank": 0}):  # fmt: skip
        fold.take(record)
    assert (fold.events, fold.unnamed, fold.event, fold.phase) == (1, 2, "", "x")
    assert (list(fold.tokens), fold.other_ranks) == (["1"], {0, 7})
    assert fold.strangers() == ["heartbeats of other ranks in the file: [0, 7]"]


@pytest.mark.parametrize(
    ("value", "found"),
    [(2**64 - 1, 2**64 - 1), (2**64, None), (1 - 2**64, 1 - 2**64), (-(2**64), None), (True, None)],
)
def test_a_whole_number_fits_into_64_bits(value: object, found: int | None) -> None:
    assert whole_number(value) == found


@pytest.mark.parametrize("block", [1 << 21, 64])
def test_lines_that_only_look_like_records_are_dropped_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr("runbook.folder.launch.lines._BLOCK_BYTES", block)
    path = tmp_path / "x"
    path.write_text(beat("boot") + "{no json}\n" + "\n" + beat("step_end", step=1) + '{"event')
    fold = RankFold(rank=0)
    _, torn = fold_file(path, fold)
    assert (fold.events, fold.dropped, torn) == (2, 1, len('{"event'))
    assert [record["event"] for record in heartbeats_in(path)] == ["boot", "step_end"]
    path.write_text(beat("boot")[:-1])
    assert list(heartbeats_in(path)) == []


# What of it is evidence


@pytest.mark.parametrize("many", [KEPT, KEPT + 1, KEPT + 3])
def test_of_rare_events_so_many_are_kept_and_the_last_one(tmp_path: Path, many: int) -> None:
    text = "".join(
        beat("effect", toggle=str(number)) + beat("arm_failed", arm=str(number))
        for number in range(1, many + 1)
    )
    log = read(tmp_path, text)
    assert [effect.toggle for effect in log.effects] == [str(n + 1) for n in range(KEPT)]
    arms = [failure["arm"] for failure in log.arm_failures]
    assert arms == [*(str(n + 1) for n in range(KEPT - 1)), str(many)]
    assert log.counts == {"effect": many, "arm_failed": many}


@pytest.mark.parametrize(
    ("data", "kept"), [("f" * 16, True), ("A", True), ("f" * 17, False), ("", False), (7, False)]
)
def test_a_digest_has_up_to_64_bits(tmp_path: Path, data: object, kept: bool) -> None:
    log = read(tmp_path, beat("step_end", step=1, data=data))
    assert log.steps is not None
    assert log.steps["data"].notna().tolist() == [kept]
    assert log.damaged is not kept
