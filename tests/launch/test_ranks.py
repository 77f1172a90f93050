"""The live view of the ranks: what a growing heartbeat file says, whatever happens to the file."""

from __future__ import annotations

import time
from pathlib import Path

from runbook.launch.watch.ranks import RankWatch
from tests.factory import files

TOKEN = "ab12"


def beat(event: str, step: int, **more: object) -> str:
    return files.beat(event, step=step, **{"pid": None, **more})


def test_a_line_counts_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat_rank0.jsonl"
    watch = RankWatch(tmp_path, TOKEN, time.monotonic())
    path.write_text(beat("step_start", 1) + beat("step_end", 1)[:20])
    watch.update()
    assert (watch.ranks[0].event, watch.ranks[0].step) == ("step_start", 1)
    path.write_text(beat("step_start", 1) + beat("step_end", 1) + beat("step_start", 2, token="x"))
    watch.update()
    assert (watch.ranks[0].event, watch.ranks[0].step) == ("step_end", 1)
    assert len(watch.ranks[0].recent) == 2


def test_words_move_the_clock_of_silence_and_quiet_does_not(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat_rank0.jsonl"
    path.write_text(beat("step_end", 1))
    watch = RankWatch(tmp_path, TOKEN, 1.0)
    watch.update()
    heard = watch.ranks[0].changed_at
    assert heard > 1.0
    watch.update()
    assert watch.ranks[0].changed_at == heard
