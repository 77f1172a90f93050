"""What an end means, and whose it is: from exit heartbeats, the kernel and the console."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from nsa.contract import PARTED
from runbook.folder.launch.lines import Exit
from runbook.launch.end import (
    classify_pytest,
    classify_trainer,
    is_communication_failure,
    rank_exits,
)
from runbook.launch.watch.rank_state import RankState
from runbook.records import End, Kind, LaunchStatus
from tests.factory.tables import table
from tests.launch.helpers import rank

ENDS = yaml.safe_load(Path(__file__).with_name("ends.yaml").read_text("utf-8"))


def state(number: int, said: dict[str, Any]) -> RankState:
    step = said.get("step", 0)
    found = rank(number, age=said.get("age", 5.0 - number), step=step)
    if "code" in said:
        found.exit = Exit(code=said["code"], reason=said.get("reason", ""), steps_done=step)
    found.died_at, found.parent_saw = said.get("died"), said.get("saw")
    return found


def end_of(
    ranks: Sequence[dict[str, Any]], console: Sequence[str] = (), oom: Sequence[int | None] = (0, 0)
) -> End:
    states = [state(number, said) for number, said in enumerate(ranks)]
    exits = rank_exits(states, 1, console)
    before, after = oom
    return classify_trainer(
        states, exits, child_code=1, wanted=2, oom=(before, after), console=console
    )


@pytest.mark.parametrize("case", ENDS.values(), ids=ENDS)
def test_an_end(case: dict[str, Any]) -> None:
    console = case.get("console", ())
    end = end_of(case.get("ranks", ()), console, case.get("oom", (0, 0)))
    assert (end.status, end.culprit_rank) == (case["is"], case.get("culprit"))
    assert case.get("cause", end.cause) == end.cause
    assert case.get("says", end.cause) in end.cause and "\n" not in end.cause
    assert is_communication_failure(end, console) is case.get("again", False)


@table(__file__, "ends_of_pytest")
def test_tests_that_fail_are_completed_where_their_report_says_so(
    code: int, junit: bool, status: str
) -> None:
    assert classify_pytest(code, junit=junit, console=[]).status == status


def test_ranks_that_parted_have_a_kind_and_no_culprit() -> None:
    said = f"{PARTED} (seen first in step 2: the weights of 1 of 16 parameters, first a.b): DDP did"
    end = end_of([{"code": 1, "reason": said, "step": 4}] * 2)
    assert (end.status, end.kind, end.culprit_rank, end.cause) == (
        LaunchStatus.CRASHED, Kind.PARTED, None, said
    )  # fmt: skip
