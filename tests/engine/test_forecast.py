"""How long the rest takes: from measured steps, told once they are done, limits named at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from runbook.config.load import load_profile
from runbook.engine.plan.progress import Forecaster, Pace, forecast
from runbook.launch.observer import Observer
from runbook.records import Launch, LaunchResult, LaunchStatus
from runbook.records.events import Forecast, Pulse
from tests.phases import builder
from tests.reports import samples

PROFILE = load_profile("a100x2_pcie4")
WHERE = builder.context("a100x2_pcie4")


# Three launches of a hundred steps, however many a profile has.
def plan(phase: str) -> list[Launch]:
    launches = builder.PHASES[phase].plan(WHERE)
    if phase not in ("baseline", "single_gpu"):
        return launches
    return [launch.model_copy(update={"steps": 100}) for launch in launches[:3]]


BASE = plan("baseline")[0]
PACE = Pace(step_s=0.25, startup_s=10.0, launch=BASE)


def test_one_device_with_the_whole_batch_takes_longer_and_with_its_share_the_same() -> None:
    whole, share = plan("single_gpu")[:2]
    assert forecast(whole, PACE, PROFILE) == 10.0 + 100 * 0.5
    assert forecast(share, PACE, PROFILE) == 10.0 + 100 * 0.25
    assert {forecast(launch, PACE, PROFILE) for launch in plan("preflight")} == {None}


class Told(Observer):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.forecasts: list[Forecast] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def run_forecast(self, forecast: Forecast) -> None:
        self.forecasts.append(forecast)

    @property
    def left_s(self) -> float:
        left_s = self.forecasts[-1].left_s
        assert left_s is not None
        return left_s


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def train(
    watched: Forecaster, clock: Clock, launch: Launch, step_s: float, steps: int, first: int = 1
) -> None:
    watched.launch_started(launch, 1)
    clock.now += 10.0
    for step in range(first, first + steps):
        clock.now += 5.0 if step == first else step_s
        watched.launch_progress(launch, step, launch.steps, None)
        watched.launch_ranks(launch, Pulse())


def watched(
    launches: Sequence[Launch], profile: str = "a100x2_pcie4", **more: Any
) -> tuple[Forecaster, Told, Clock]:
    told, clock = Told(), Clock()
    forecaster = Forecaster(told, launches, load_profile(profile), clock=clock, **more)
    forecaster.run_started("id", "folder", ())
    return forecaster, told, clock


def test_after_some_steps_the_rest_is_known() -> None:
    first, second, third = plan("baseline")
    forecaster, told, clock = watched([first, second, third])
    train(forecaster, clock, BASE, 0.25, 20)
    # 80 of 100 steps are left of this launch (told up to one second ago), and two whole ones with
    # their start-up of 15 s: the first step belongs to it.
    assert told.left_s == pytest.approx(80 * 0.25 + 2 * (15.0 + 25.0), abs=1.0)
    done_s = 10.0 + 5.0 + 19 * 0.25
    assert told.forecasts[-1].share == pytest.approx(done_s / (done_s + 100.0), abs=0.02)
    assert "0.25 s per step" in told.forecasts[-1].source
    forecaster.launch_finished(first, LaunchResult(status=LaunchStatus.COMPLETED))
    assert told.left_s == pytest.approx(2 * 40.0, abs=1.0)
    forecaster.phase_finished(samples.go().phases[1])
    assert (told.left_s, told.forecasts[-1].share) == (0.0, 1.0), "nothing left is all done"


def test_a_hang_makes_nothing_shorter_and_the_bar_never_goes_back() -> None:
    forecaster, told, clock = watched(plan("baseline"))
    train(forecaster, clock, BASE, 0.25, 20)
    before = told.left_s
    for _ in range(60):
        clock.now += 1.0
        forecaster.launch_ranks(BASE, Pulse())
    assert told.left_s == pytest.approx(before, abs=1.0)
    shares = [one.share for one in told.forecasts]
    assert shares == sorted(shares) and shares[0] >= 0.0 and shares[-1] <= 1.0


def test_a_limit_that_will_be_exceeded_is_said_at_once() -> None:
    launches = [*plan("preflight"), *plan("baseline"), *plan("long_run")]
    forecaster, told, clock = watched(launches)
    train(forecaster, clock, BASE, 6.0, 10)
    assert told.forecasts[-1].unknown == 2, "those of preflight train nothing"
    (note,) = told.notes
    assert note.startswith("long_run/run would take ")
    assert "phases.long_run.timeout_s" in note and "(6 s per step)" in note


@pytest.mark.parametrize("name", [name for name in vars(Observer) if not name.startswith("_")])
def test_the_forecaster_forwards_whatever_an_observer_can_hear(name: str) -> None:
    inner = Told()
    forecaster = Forecaster(inner, [BASE], load_profile("cpu"))
    passed_on = getattr(forecaster, name) == getattr(inner, name)
    assert name in vars(Forecaster) or passed_on, f"{name} would be swallowed"
