"""Lines that fit any width, and what stands in them when there is room for little."""

from __future__ import annotations

import pytest

from runbook.cli._progress import Progress
from runbook.console import cells
from runbook.launch.observer import Forecast, Pulse, Silence

SILENT = (
    Silence(rank=1, silent_s=7.2, usual_s=0.31, state="stopped"),
    Silence(rank=0, silent_s=7.1, usual_s=0.3),
)
PULSES = {
    "heard": Pulse(alive=2, wanted=2),
    "silent": Pulse(alive=2, wanted=2, silent=SILENT),
    "busy": Pulse(alive=2, wanted=2, busy="checkpoint", busy_s=12.0),
    "ended": Pulse(alive=0, wanted=2),
    "no ranks": Pulse(),
}


def training(pulse: Pulse, *, launch: str = "run1", attempt: int = 1) -> Progress:
    progress = Progress(began=0.0, forecast_at=40.0)
    progress.enter("2/9", "baseline", 30.0)
    progress.start(launch, attempt, 300, 32.0)
    for step in range(1, 121):
        progress.advance(step, 300, 8000.0 + step)
    progress.pulse = pulse
    progress.forecast = Forecast(done_s=40.0, share=0.349, left_s=102.0)
    return progress


@pytest.mark.parametrize("unicode", [True, False])
@pytest.mark.parametrize(
    "launch", ["run1", "an-arm-with-a-very-long-name-of-its-own", "表表表表表"]
)
@pytest.mark.parametrize("pulse", PULSES)
def test_no_width_is_ever_exceeded(pulse: str, launch: str, unicode: bool) -> None:
    for attempt in (1, 2):
        progress = training(PULSES[pulse], launch=launch, attempt=attempt)
        for width in range(20, 301):
            for line in progress.screen(width, 42.0, unicode=unicode):
                assert cells(line) <= width, (width, line)


def test_without_a_launch_it_says_what_is_done_instead() -> None:
    progress = training(PULSES["heard"])
    progress.enter("2/9", "baseline", 40.0)
    assert "collecting and judging, 2 s" in progress.line(42.0)


def test_the_clock_of_the_run_does_not_begin_anew_with_a_launch() -> None:
    progress = training(PULSES["heard"])
    progress.start("run2", 1, 300, 90.0)
    assert "1 min 35 s so far" in progress.screen(120, 95.0, unicode=True)[0]
    assert "running, 5 s" in progress.screen(120, 95.0, unicode=True)[1]


def test_the_time_left_runs_down_between_two_forecasts_and_says_where_it_is_a_least() -> None:
    progress = training(PULSES["heard"])
    assert progress.left_text(40.0) == "1 min 42 s left"
    assert progress.left_text(45.0) == "1 min 37 s left"
    assert progress.left_text(1000.0) == "", "something runs: it is not over"
    progress.forecast = Forecast(done_s=40.0, share=0.3, left_s=102.0, unknown=2)
    assert progress.left_text(40.0) == "over 1 min 42 s left"
    progress.forecast = Forecast(done_s=40.0, share=0.3)
    assert progress.left_text(40.0) == ""


def test_what_runs_is_never_all_done() -> None:
    progress = training(PULSES["heard"])
    progress.forecast = Forecast(done_s=40.0, share=1.0, left_s=0.2)
    told = "\n".join([progress.line(41.0), *progress.screen(120, 41.0, unicode=True)])
    assert "99 %" in told and "100 %" not in told and " left" not in told
