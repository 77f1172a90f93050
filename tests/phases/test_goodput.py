"""Row `goodput`: where the time of a launch went, from spans that are laid out by hand."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pandas as pd
import pytest

from phases.kit.finding import Finding
from phases.stage import time_of
from runbook.records import Launch, LaunchResult, LaunchStatus
from runbook.records.evidence import LaunchEvidence, RankLog, SetAside, TrainingLog
from runbook.records.launch import Begun

T0 = 1_800_000_000.0


def leg(name: str, *, at: float, lasts: float, first: int, ends: list[float]) -> LaunchEvidence:
    """A leg from `at` on, whose steps, the first one `first`, end at `ends` (s after its start).

    A step takes 2 s by dt_s; what lies beside it is a pause.
    """
    steps = list(range(first, first + len(ends)))
    frame = pd.DataFrame({"step": steps, "dt_s": [2.0] * len(steps)})
    marks = pd.DataFrame({"step": steps, "ts": [T0 + at + end for end in ends]})
    rank = RankLog(
        rank=0, path="h", sha256="", events=0, tokens=frozenset(), first_step=first,
        last_step=steps[-1], exit_code=0, exit_reason="", param_hash=None, counts={}, steps=marks,
    )  # fmt: skip
    launch = Launch(
        name=name, phase="production", kind="trainer", argv=(), env={}, nproc=1, steps=steps[-1],
        run_dir=f"production/{name}", timeout_s=1,
    )  # fmt: skip
    result = LaunchResult(
        status=LaunchStatus.COMPLETED,
        started_at=datetime.fromtimestamp(T0 + at, UTC).isoformat(),
        duration_s=lasts,
        begun=Begun(path="c", step=first - 1, sha256="") if first > 1 else None,
    )
    log = TrainingLog(path="t", frame=frame, sha256="")
    return LaunchEvidence(launch=launch, result=result, training=log, ranks=(rank,))


def parts(*legs: LaunchEvidence) -> dict[str, float]:
    time = time_of(legs)
    assert not time.wrong
    names = ("steps", "pauses", "starting", "lost", "waiting", "wall")
    return {name: round(getattr(time, name), 6) for name in names}


ONE = leg("leg1", at=0.0, lasts=20.0, first=1, ends=[8.0, 10.0, 12.0, 17.0])
TWO = leg("leg2", at=100.0, lasts=15.0, first=5, ends=[9.0, 11.0, 13.0])


def test_a_launch_without_a_stumble() -> None:
    """8 s to the first step's end, three steps with a save of 3 s, 3 s until it has ended."""
    assert parts(ONE) == {
        "steps": 6.0, "pauses": 3.0, "starting": 11.0, "lost": 0.0, "waiting": 0.0, "wall": 20.0,
    }  # fmt: skip


def test_what_a_start_trained_that_was_cut_off_is_lost_and_between_starts_it_waits() -> None:
    """Cut off: started at 25, its first step ended at 31, its last word at 55. Then a night."""
    aside = SetAside(folder="f", began=T0 + 25, first_step=T0 + 31, ended=T0 + 55)
    assert parts(ONE, replace(TWO, aside=(aside,))) == {
        "steps": 10.0, "pauses": 3.0, "starting": 11.0 + 6.0 + 11.0, "lost": 24.0,
        "waiting": 5.0 + 45.0, "wall": 115.0,
    }  # fmt: skip
    stillborn = replace(aside, first_step=None)
    assert parts(ONE, replace(TWO, aside=(stillborn,)))["lost"] == 0.0


def test_steps_behind_the_checkpoint_that_a_later_leg_went_on_from_are_lost() -> None:
    """The checkpoint of step 4 was damaged: leg 2 went on from step 3 and trained 4 again."""
    again = leg("leg2", at=100.0, lasts=15.0, first=4, ends=[9.0, 11.0, 13.0])
    found = parts(ONE, again)
    assert (found["steps"], found["lost"]) == (4.0 + 4.0, 2.0)


SOON = SetAside(folder="f", began=T0 + 25, first_step=T0 + 60, ended=T0 + 30)


@pytest.mark.parametrize(
    ("second", "told"),
    [
        (replace(TWO, result=ONE.result), "ran at once"),
        (leg("leg2", at=100.0, lasts=15.0, first=5, ends=[9.0] * 6), "own times are longer"),
        (leg("leg2", at=100.0, lasts=15.0, first=5, ends=[9.0, 40.0, 55.0]), "the harness saw"),
        (replace(TWO, aside=(SOON,)), "before its first step"),
    ],
)
def test_where_clocks_disagree_it_is_told(second: LaunchEvidence, told: str) -> None:
    assert any(told in text for text in time_of([ONE, second]).wrong)


def test_a_leg_without_steps_has_no_goodput() -> None:
    with pytest.raises(Finding, match="has no step"):
        time_of([replace(ONE, ranks=())])
