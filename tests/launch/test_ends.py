"""What an end means, and whose it is; budgets, hangs, and which rank is to blame for one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from nsa.contract import PARTED
from runbook.folder.launch import Exit
from runbook.launch.end import (
    Aftermath,
    classify_pytest,
    classify_trainer,
    is_communication_failure,
    rank_exits,
)
from runbook.launch.observer import Pulse
from runbook.launch.watch.live_status import pulse_of
from runbook.launch.watch.rank_state import RankState
from runbook.launch.watch.watchdog import Budgets, Watchdog, blame
from runbook.records import End, Kind, LaunchStatus
from tests.factory.tables import table
from tests.launch.helpers import fake_launch, rank

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
    told = Aftermath(exit_code=1, oom=(before, after))
    return classify_trainer(states, exits, told, child_code=1, wanted=2, console=console)


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


def test_budgets_depend_on_what_a_rank_does() -> None:
    budgets = Budgets.for_launch(fake_launch(env={"NSA_WATCH_HEARTBEAT_STALL_S": "3"}))
    assert (budgets.of_phase("step"), budgets.of_phase("data")) == (3, 3)
    assert budgets.of_phase("checkpoint") > 60
    assert budgets.of_phase("step", longest_step_s=2.0) == 10
    assert Budgets.for_launch(fake_launch(timeout_s=1200)).step_s == 180


@table(__file__, "blamed")
def test_who_is_to_blame(
    why: str, ranks: list[dict[str, Any]], known: dict[str, Any], culprit: int
) -> None:
    assert blame([rank(n, **said) for n, said in enumerate(ranks)], **known).rank == culprit, why


def test_a_hang_is_found_at_its_budget_and_not_before() -> None:
    watchdog = Watchdog(Budgets(step_s=3), wanted=2)
    for age, found in ((2.9, False), (3.1, True)):
        ranks = [rank(0, age=age), rank(1, age=age + 0.1)]
        hang = watchdog.find_hang(ranks, now=1000.0)
        assert (hang is not None) == found
    assert hang is not None and hang.culprit_rank == 1


def test_waiting_for_a_slow_rank_is_excused_also_right_after() -> None:
    watchdog = Watchdog(Budgets(step_s=3, checkpoint_s=60), wanted=2)
    assert (
        watchdog.find_hang([rank(0, age=5, phase="checkpoint"), rank(1, age=5)], now=1000) is None
    )
    # Rank 0 has just gone on; rank 1 has had no chance to.
    assert watchdog.find_hang([rank(0, age=0.0), rank(1, age=5)], now=1000.1) is None
    late = [rank(0, age=0.0), rank(1, age=5)]
    assert watchdog.find_hang(late, now=1003.2) is not None


@pytest.mark.parametrize(("age", "hangs"), [(170, False), (599, False), (601, True)])
def test_saving_a_profile_has_a_budget_of_its_own(age: float, hangs: bool) -> None:
    """Two write their traces, for which rank 1 waits, and neither waits for the other."""
    watchdog = Watchdog(Budgets(step_s=3), wanted=3)
    both = [rank(number, age=age, phase="profile", step=13) for number in (0, 2)]
    ranks = [*both, rank(1, age=age, step=14)]
    hang = watchdog.find_hang(ranks, now=1000.0)
    assert (hang is not None) is hangs
    assert hang is None or (hang.culprit_rank == 0 and "phase profile" in hang.cause)
    silent = [rank(0, age=age, step=13), rank(1, age=age, step=14)]
    assert Watchdog(Budgets(step_s=3), wanted=2).find_hang(silent, now=1000.0) is not None


NOW = 1000.0


def heard(number: int, *, age: float, pause: float, **more: Any) -> RankState:
    """A rank that was heard every `pause` s, and then for `age` s no more."""
    state = rank(number, age=age + 8 * pause, **more)
    for _ in range(8):
        state.arrived(state.changed_at + pause)
    return state


def test_a_pause_like_any_other_is_no_silence() -> None:
    ranks = [heard(0, age=0.3, pause=0.3), heard(1, age=0.9, pause=0.3)]
    assert pulse_of(ranks, wanted=2, now=NOW) == Pulse(alive=2, wanted=2)


def test_what_is_usual_depends_on_the_rank() -> None:
    slow, quick = heard(0, age=7.0, pause=5.0), heard(1, age=7.0, pause=0.3)
    (silent,) = pulse_of([slow, quick], wanted=2, now=NOW).silent
    assert silent.rank == 1
    assert (silent.silent_s, silent.usual_s) == (pytest.approx(7.0), pytest.approx(0.3))


def test_a_rank_that_was_seldom_heard_gets_more_time() -> None:
    assert pulse_of([rank(0, age=9.0)], wanted=1, now=NOW).silent == ()
    (silent,) = pulse_of([rank(0, age=11.0)], wanted=1, now=NOW).silent
    assert silent.usual_s is None


def test_the_rank_that_the_others_wait_for_comes_first() -> None:
    ranks = [heard(0, age=7.0, pause=0.3, step=9), heard(1, age=7.0, pause=0.3, step=8)]
    assert [one.rank for one in pulse_of(ranks, wanted=2, now=NOW).silent] == [1, 0]


def test_nobody_is_silent_while_a_rank_is_in_something_slow() -> None:
    writing = heard(0, age=12.0, pause=0.3, phase="checkpoint")
    writing.phase_since = NOW - 12.0
    pulse = pulse_of([writing, heard(1, age=12.0, pause=0.3)], wanted=2, now=NOW)
    assert (pulse.busy, pulse.busy_s, pulse.silent) == ("checkpoint", 12.0, ())
