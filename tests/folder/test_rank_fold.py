"""One rank's heartbeats, record by record: clocks, steps, strangers, and how much is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runbook.folder.launch.heartbeats import RankFold, fold_file, heartbeats_in, whole_number
from runbook.folder.launch.rank_log import read_heartbeats
from runbook.records.evidence import RankLog
from tests.folder.files import beat, heartbeats

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


def test_without_a_clock_nothing_is_measured() -> None:
    fold = folded({"mono": None, "ts": "x"}, {"mono": float("nan"), "ts": 5.0})
    assert (fold.clock_s, fold.mono, fold.silence_s, fold.ts) == (None, None, None, 5.0)
    assert folded({"mono": 0.0}, {"mono": 3.0}).clock_s == 3.0
    assert folded({"ts": 1.0}, {"ts": 1.5}, {"ts": 1.25}).silence_s == 0.5


@pytest.mark.parametrize(
    ("steps", "back", "span"),
    [
        ([1, 2, 3], 0, (1, 3)),
        ([3, 3, 2, 5], 1, (2, 5)),
        ([0, -1, 2**53, 2**53 + 1], 0, (0, 2**53)),
        ([-1, None, 1.5, True, 2**53 + 1], 0, (None, None)),
    ],
)
def test_steps_of_a_training(steps: list[Any], back: int, span: tuple[Any, Any]) -> None:
    fold = folded(*({"step": step} for step in steps))
    assert (fold.steps_back, (fold.first_step, fold.last_step)) == (back, span)


@pytest.mark.parametrize(
    ("event", "counts"), [("step_start", True), ("another", True), ("boot", False), ("exit", False)]
)
def test_what_is_said_beside_the_steps_is_no_step(event: str, counts: bool) -> None:
    fold = folded({"step": 3}, {"step": 7, "event": event})
    assert (fold.step, fold.last_step) == (7, 7 if counts else 3)


def test_the_name_of_an_event_of_another_trainer() -> None:
    fold = RankFold(rank=2)
    for record in ({"msg": "hi", "token": 1, "rank": 2}, {"event": 5, "rank": 7, "phase": "x"},
                   {"rank": 0}):  # fmt: skip
        fold.take(record)
    assert (fold.events, fold.unnamed, fold.event, fold.phase) == (1, 2, "", "x")
    assert (list(fold.tokens), fold.other_ranks) == (["1"], {0, 7})
    assert fold.strangers() == ["heartbeats of other ranks in the file: [0, 7]"]


def test_two_launches_are_said_and_not_their_processes() -> None:
    assert folded({"token": "a"}, {"token": "b", "pid": 43}).strangers() == [
        "heartbeats of 2 launches in one file"
    ]
    assert folded({"token": "a"}, {"token": "a", "pid": 43}).strangers() == [
        "heartbeats of 2 processes in one file: 42, 43"
    ]
    assert folded({"token": "a"}).strangers() == []


def test_an_exit_says_how_it_ended() -> None:
    fold = folded({"event": "exit", "code": 0, "reason": None, "steps_done": 7})
    assert (fold.exit_code, fold.exit_reason, fold.steps_done) == (0, "", 7)
    assert folded({"event": "halt", "code": 3}).exit_code is None


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


def test_a_healthy_file_is_read_all_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Line by line it takes several times as long."""
    monkeypatch.setattr("runbook.folder.launch.heartbeats.parse_heartbeat", lambda line: None)
    log = read(tmp_path, heartbeats(7))
    assert (log.events, log.dropped_lines) == (2 + 3 * 7, 0)


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
    ("many", "says"), [(1, ""), (2, " and 1 more"), (KEPT + 9, f" and {KEPT - 1} more")]
)
def test_values_of_another_type_are_counted(tmp_path: Path, many: int, says: str) -> None:
    log = read(
        tmp_path, "".join(beat("step_end", step=s, embedded="x") for s in range(1, many + 1))
    )
    assert log.problems == (f"step 1: step_end.embedded has an unexpected value: 'x'{says}",)
    assert log.damaged and log.steps is not None and log.steps["embedded"].isna().all()


def test_a_long_value_is_quoted_in_part(tmp_path: Path) -> None:
    text = beat("step_end", data="g" * 50) + beat("exit", code=0, largest_lr="y" * 50)
    (problem,) = read(tmp_path, text).problems
    assert problem == f"step 0: step_end.data is no digest: {'g' * 40!r} and 1 more"
    (problem,) = read(tmp_path, beat("exit", code=0, largest_lr="y" * 50)).problems
    assert problem == f"step 0: exit.largest_lr has an unexpected value: {'y' * 40!r}"
    (problem,) = read(tmp_path, beat("step_end", step=1, embedded="z" * 50)).problems
    assert problem == f"step 1: step_end.embedded has an unexpected value: {'z' * 40!r}"


@pytest.mark.parametrize(
    ("data", "kept"), [("f" * 16, True), ("A", True), ("f" * 17, False), ("", False), (7, False)]
)
def test_a_digest_has_up_to_64_bits(tmp_path: Path, data: object, kept: bool) -> None:
    log = read(tmp_path, beat("step_end", step=1, data=data))
    assert log.steps is not None
    assert log.steps["data"].notna().tolist() == [kept]
    assert log.damaged is not kept


def test_a_step_is_alone_if_nothing_else_came_since_the_last_one(tmp_path: Path) -> None:
    events = ["step_start", "fetched", "progress", "step_end"]
    text = beat("boot")
    for step in range(1, 5):
        text += beat("checkpoint", step=step) * (step == 3)
        text += "".join(beat(event, step=step, mono=step, loss=float(step)) for event in events)
    text += beat("progress", step=4, loss=9.0) + beat("step_end", step=5, mono=float("inf"))
    steps = read(tmp_path, text).steps
    assert steps is not None
    assert steps["alone"].tolist() == [False, True, False, True, True]
    assert steps["loss"].tolist()[:4] == [1.0, 2.0, 3.0, 4.0]
    assert steps["mono"].isna().tolist() == [False] * 4 + [True]


def test_what_no_step_says_is_nan_in_all_of_them(tmp_path: Path) -> None:
    steps = read(tmp_path, "".join(beat("step_end", step=s, rss_mib=None) for s in (1, 2))).steps
    assert steps is not None
    numbers = [
        "mono",
        "embedded",
        "mem_mib",
        "rss_mib",
        "cuda_mib",
        "loss",
        "toks_per_s",
        "grad_norm",
    ]
    assert set(steps[numbers].dtypes.astype(str)) == {"float64"}
    assert steps[numbers[1:]].isna().all(axis=None)


def test_unreadable_lines_and_a_torn_one_are_told_apart(tmp_path: Path) -> None:
    log = read(tmp_path, beat("boot") + "{}\n" + "nonsense\n" + json.dumps({"event": "x"}))
    assert log.problems == (
        "2 unreadable lines were dropped",
        "a torn last line was dropped (14 bytes)",
    )
    assert (log.dropped_lines, log.damaged) == (3, True)
    assert (log.param_hash, log.halt_reason, log.nonfinite, log.proof) == (None, None, None, None)
    assert read(tmp_path, beat("halt")).halt_reason == ""


def test_an_effect_without_fields_says_nothing(tmp_path: Path) -> None:
    (effect,) = read(tmp_path, beat("effect", took_effect=1, block="2")).effects
    assert (effect.toggle, effect.value, effect.took_effect, effect.evidence) == (
        "",
        "",
        None,
        None,
    )
    assert (effect.arm, effect.block, effect.rank) == ("", 0, 0)
