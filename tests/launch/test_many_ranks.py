"""Following ranks: what a growing file says, and what many take in files that are opened."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from runbook.accounts.tables import written_account
from runbook.launch.end import rank_exits
from runbook.launch.observer import Observer
from runbook.launch.watch import LOOKS_PER_S, RankWatch
from runbook.launch.watch.live_status import LiveStatus
from tests.factory import files
from tests.factory.files import HEADER, row
from tests.launch.helpers import trainer

TOKEN = "ab12"
RANKS = 256


def test_more_ranks_are_not_more_looks_in_a_second(tmp_path: Path) -> None:
    """In heartbeat files that are opened, by the interpreter's own word."""
    opened: list[str] = []

    def note(event: str, words: tuple[Any, ...]) -> None:
        if event == "open" and str(words[0]).startswith(str(tmp_path)):
            opened.append(str(words[0]))

    for number in range(RANKS):
        files.say(tmp_path, number, files.record("step_end", rank=number, step=1, pid=None))
    watch = RankWatch(tmp_path, TOKEN, time.monotonic())
    watch.wait(0.0)
    sys.addaudithook(note)
    began = time.monotonic()
    while time.monotonic() < began + 0.6:
        watch.wait(0.001)
    # The look in whose interval the time ended counts too.
    assert RANKS <= len(opened) <= LOOKS_PER_S * (time.monotonic() - began) + RANKS


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


class Written:
    """A run directory that grows step by step, and who looks at it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.watch = RankWatch(folder, TOKEN, time.monotonic())
        self.live_status = LiveStatus(
            trainer(), folder, steps=9, observer=Observer(), watch=None, enough=None
        )

    def grow(self, name: str, text: str) -> None:
        with (self.folder / name).open("a") as stream:
            stream.write(text)

    def say(self, event: str, step: int) -> None:
        self.grow(
            "heartbeat_rank0.jsonl", files.beat(event, step=step, token=TOKEN, mono=float(step))
        )

    def look(self) -> None:
        self.watch.update()
        self.live_status.tell_step(self.watch.ranks)

    def account(self) -> list[str]:
        return written_account(rank_exits(list(self.watch.ranks.values()), 0, []))


def test_rows_that_are_written_as_they_come(tmp_path: Path) -> None:
    """Looked at after each line; a header that lacks its rows is nothing yet."""
    run = Written(tmp_path)
    run.grow("training.csv", HEADER + "\n")
    run.grow("val.csv", "step,loss\n")
    for step in range(1, 6):
        run.say("step_start", step)
        run.look()
        run.grow("training.csv", row(step) + "\n")
        run.look()
        run.say("progress", step)
        run.look()
        if step == 4:
            run.grow("val.csv", "4,5.5\n")
            run.say("eval", step)
            run.look()
    assert run.account() == []


@pytest.mark.parametrize("header", [True, False])
def test_rows_that_are_kept_in_memory(tmp_path: Path, header: bool) -> None:
    run = Written(tmp_path)
    if header:
        run.grow("training.csv", HEADER + "\n")
    for step in range(1, 6):
        run.say("progress", step)
        run.look()
    head = "" if header else HEADER + "\n"
    run.grow("training.csv", head + "".join(f"{row(step)}\n" for step in range(1, 6)))
    run.say("progress", 6)
    run.look()
    assert run.account() == [
        "training.csv was up to 5 steps behind what rank 0 said of itself while it ran: its rows "
        "were not written as they came"
    ]
