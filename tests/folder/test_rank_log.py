"""One rank's heartbeats: clocks, steps, strangers, how much is kept, whatever the file holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runbook.folder.launch.lines import heartbeats_in, whole_number
from runbook.folder.launch.rank_lines import RankLines
from runbook.folder.launch.rank_log import read_heartbeats
from runbook.records.evidence import RankLog
from tests.factory.files import beat

KEPT = 4096


def read(folder: Path, text: str) -> RankLog:
    path = folder / "heartbeat_rank0.jsonl"
    path.write_text(text)
    return read_heartbeats(path, rank=0, relative_to=folder)


def test_clocks_go_back_only_within_one_process(tmp_path: Path) -> None:
    """Lines without a clock between them change nothing."""
    lines = (
        beat("step_end", mono=10.0, ts=100.0),
        beat("step_end", mono=10.0, ts=100.0),
        json.dumps({"event": "boot", "pid": 42, "ts": "noon"}) + "\n",
        beat("step_end", mono=9.0, ts=107.5),
        beat("step_end", mono=2.0, ts=104.0, pid=43),
        beat("step_end", mono=17.0, ts=106.0, pid=43),
    )
    found = read(tmp_path, "".join(lines))
    assert (found.clocks_back, found.silence_s) == (2, 7.5)
    assert "the monotonic clock goes back at 1 places" in found.problems
    assert (found.clock_s, found.last_ts, list(found.pids)) == (7.0, 106.0, [42, 43])


def test_the_name_of_an_event_of_another_trainer(tmp_path: Path) -> None:
    records = ({"msg": "hi", "token": 1, "rank": 0}, {"event": 5, "rank": 7}, {"rank": 0})
    found = read(tmp_path, "".join(json.dumps(record) + "\n" for record in records))
    assert (found.events, found.last_event, found.counts) == (1, "", {"hi": 1})
    assert list(found.tokens) == ["1"]
    assert found.problems[:2] == (
        "heartbeats of other ranks in the file: [7]",
        "2 unreadable lines were dropped",
    )


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ([3, 2, 5], (2, 5, 1)),
        ([3, 2**53, -1, 4.0, True, None], (3, 3, 0)),
        ([], (None, None, 0)),
    ],
)
def test_how_far_it_went(
    tmp_path: Path, told: list[object], found: tuple[int | None, int | None, int]
) -> None:
    """An evaluation is no step of the training; its step stands all the same."""
    text = [beat("boot"), *(beat("step_end", step=step) for step in told), beat("eval", step=9)]
    said = read(tmp_path, "".join(text))
    assert (said.first_step, said.last_step, said.steps_back) == found


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
    path = tmp_path / "heartbeat_rank0.jsonl"
    outside = json.dumps({"event": "checkpoint", "path": "\udcff"}) + "\n"
    path.write_text(beat("boot") + "{no json}\n[]\n\n" + outside + beat("step_end") + '{"event')
    found = RankLines.read(path, rank=0)
    assert (found.lines, found.dropped, found.torn_bytes) == (3, 2, len('{"event'))
    assert found.kept["checkpoint"][0]["path"] == "\udcff"
    assert [record["event"] for record in heartbeats_in(path)] == [
        "boot",
        "checkpoint",
        "step_end",
    ]
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
