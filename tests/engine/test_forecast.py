"""How long the rest takes: from measured steps, told once they are done, limits named at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from runbook.config import load_profile
from runbook.engine.forecast import Pace, forecast, remaining, too_long
from runbook.engine.progress import Forecaster
from runbook.launch.observer import Observer
from runbook.records import Launch, LaunchResult, LaunchStatus
from tests.engine import toys
from tests.phases import builder

PROFILE = load_profile("a100x2_pcie4")
WHERE = builder.context("a100x2_pcie4")


def plan(phase: str) -> list[Launch]:
    return builder.PHASES[phase].plan(WHERE)


BASE = plan("baseline")[0]
PACE = Pace(step_s=0.25, startup_s=10.0, launch=BASE)


def test_a_launch_takes_its_start_up_and_its_steps() -> None:
    assert forecast(BASE, PACE, PROFILE) == 10.0 + 100 * 0.25
    (sweep,) = plan("bucket_sweep")
    assert sweep.schedule is not None
    assert forecast(sweep, PACE, PROFILE) == 10.0 + sweep.schedule.total_steps * 0.25
    for launch in plan("preflight"):
        assert forecast(launch, PACE, PROFILE) is None


def test_one_device_with_the_whole_batch_takes_longer_and_with_its_share_the_same() -> None:
    whole, share = plan("single_gpu")[:2]
    assert forecast(whole, PACE, PROFILE) == 10.0 + 100 * 0.5
    assert forecast(share, PACE, PROFILE) == 10.0 + 100 * 0.25
    assert remaining([whole, share, *plan("v2_parity")], PACE, PROFILE) == (95.0, 2)


def test_what_does_not_end_in_time_is_named_with_the_setting() -> None:
    (run,) = plan("long_run")
    assert too_long(run, run.timeout_s) == ""
    text = too_long(run, run.timeout_s + 1)
    assert "long_run/run would take" in text and "phases.long_run.timeout_s" in text


class Told(Observer):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def train(watched: Forecaster, clock: Clock, launch: Launch, step_s: float, steps: int) -> None:
    watched.launch_started(launch, 1)
    clock.now += 10.0
    for step in range(1, steps + 1):
        clock.now += 5.0 if step == 1 else step_s
        watched.launch_progress(launch, step, launch.steps, None)


def watched(launches: Sequence[Launch]) -> tuple[Forecaster, Told, Clock]:
    told, clock = Told(), Clock()
    return Forecaster(told, launches, PROFILE, clock=clock), told, clock


def test_after_some_steps_the_rest_is_told_once() -> None:
    forecaster, told, clock = watched(plan("baseline"))
    train(forecaster, clock, BASE, 0.25, 8)
    assert told.notes == []
    train(forecaster, clock, BASE, 0.25, 20)
    # 9 of 100 steps done when it is told; start-up 15 s: the first step belongs to it.
    left = 3 * (15.0 + 25.0) - 0.09 * 40.0
    assert told.notes == [
        f"about {left // 60:.0f} min {left % 60:.0f} s left, from 0.25 s per step"
    ]


def test_a_limit_that_will_be_exceeded_is_said_at_once() -> None:
    forecaster, told, clock = watched([*plan("preflight"), *plan("baseline"), *plan("long_run")])
    train(forecaster, clock, BASE, 6.0, 10)
    assert len(told.notes) == 2
    assert "2 launch(es) that train nothing not counted" in told.notes[0]
    assert told.notes[1].startswith("long_run/run would take ")
    assert "phases.long_run.timeout_s" in told.notes[1] and "(6 s per step)" in told.notes[1]


def test_tests_have_no_pace_and_what_ended_is_not_left() -> None:
    (sanity, _), launches = plan("preflight"), plan("baseline")
    forecaster, told, clock = watched([sanity, *launches])
    train(forecaster, clock, sanity, 1.0, 50)
    forecaster.launch_finished(sanity, LaunchResult(status=LaunchStatus.COMPLETED))
    assert told.notes == []
    for launch in launches[:2]:
        forecaster.launch_finished(launch, LaunchResult(status=LaunchStatus.COMPLETED))
    train(forecaster, clock, launches[2], 0.25, 10)
    assert told.notes == ["about 36 s left, from 0.25 s per step"]


def test_a_run_passes_every_event_on(tmp_path: Path) -> None:
    class All(Told):
        def __init__(self) -> None:
            super().__init__()
            self.events: list[str] = []

        def __getattribute__(self, name: str) -> object:
            if name in vars(Observer):
                object.__getattribute__(self, "events").append(name)
            return super().__getattribute__(name)

    told = All()
    toys.run(tmp_path, *toys.three_launches(), observer=told)
    told.note("x")
    wanted = {name for name in vars(Observer) if not name.startswith("_")}
    assert wanted <= set(told.events)
    assert {"run_started", "launch_progress", "run_finished"} <= wanted


@pytest.mark.parametrize("name", [name for name in vars(Observer) if not name.startswith("_")])
def test_the_forecaster_forwards_whatever_an_observer_can_hear(name: str) -> None:
    assert name in vars(Forecaster), f"{name} would be swallowed"
