"""Rows that come after the heartbeat that tells of them, while the harness looks."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from runbook.accounts.tables import written_account
from runbook.launch.end import rank_exits
from runbook.launch.observer import Observer
from runbook.launch.watch import RankWatch
from runbook.launch.watch.live_status import LiveStatus
from tests.factory.files import HEADER, beat, row
from tests.launch.helpers import trainer

TOKEN = "ab12"


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
        self.grow("heartbeat_rank0.jsonl", beat(event, step=step, token=TOKEN, mono=float(step)))

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


def test_files_of_another_machine_may_come_late(tmp_path: Path) -> None:
    run = Written(tmp_path)
    run.say("step_start", 1)
    run.look()
    run.watch.ranks[0].elsewhere = True
    run.say("progress", 2)
    run.look()
    assert run.account() == []
    line = json.loads((tmp_path / "heartbeat_rank0.jsonl").read_text().splitlines()[-1])
    assert line["event"] == "progress", "else nothing was told"
