"""A run on a real terminal and in a real pipe: what is drawn, what is written, what never is."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from runbook.cli.run.text import Progress, TextObserver
from runbook.console import Console, rendered
from runbook.records.events import Forecast, Pulse, SilentRank
from tests.cli.test_console import Terminal
from tests.cli.test_observers import Clock, running
from tests.reports import samples

ESCAPE, CURSOR = "\x1b", "\x1b[J"


# Whether a terminal gets colors and lines that are redrawn.
@pytest.mark.parametrize(
    ("variables", "color", "redrawn"),
    [
        ({"NO_COLOR": "1"}, False, True),
        ({"CI": "true"}, True, False),
    ],
)
def test_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], color: bool, redrawn: bool
) -> None:
    for name in ("CI", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", **variables}.items():
        monkeypatch.setenv(name, value)
    terminal, clock = Terminal(), Clock()
    with TextObserver(Console(stdout=terminal, stderr=terminal), clock=clock) as observer:
        running(observer, clock)
        observer.show()
        observer.phase_finished(samples.no_go().phases[1])
    written = terminal.getvalue()
    assert ("\x1b[31m" in written) is color
    assert (CURSOR in written) is redrawn


SILENT = (
    SilentRank(rank=1, silent_s=7.2, usual_s=0.31, state="stopped"),
    SilentRank(rank=0, silent_s=7.1, usual_s=0.3, state=""),
)
PULSES = {
    "heard": Pulse(alive=2, wanted=2),
    "silent": Pulse(alive=2, wanted=2, silent=SILENT),
    "one voice": Pulse(alive=1, silent=SILENT[:1]),
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


def shown(progress: Progress, width: int, now: float = 42.0) -> list[str]:
    screen = progress.screen(now)
    return rendered(*screen, width=width, fold=True).splitlines()


@pytest.mark.parametrize(
    "launch", ["run1", "an-arm-with-a-very-long-name-of-its-own", "表表表表表"]
)
@pytest.mark.parametrize("pulse", PULSES)
def test_no_width_is_ever_exceeded(pulse: str, launch: str) -> None:
    progress = training(PULSES[pulse], launch=launch, attempt=2)
    for width in (*range(20, 120, 7), 300):
        for line in shown(progress, width):
            assert cell_len(line) <= width, (width, line)


def test_no_word_is_cut_and_nothing_is_left_out() -> None:
    heard = training(PULSES["heard"])
    assert shown(heard, 20) == [
        *("2/9 baseline/run1", "34 %  1 min 40 s", "left  42 s so far", "━━━━━━╸"),
        *("step 120/300  8,120", "tok/s  ranks 2/2"),
    ]
    assert shown(heard, 80) == [
        "2/9 baseline/run1  34 %  1 min 40 s left  42 s so far",
        "━━━━━━━━━━━━━╸",
        "step 120/300  8,120 tok/s  ranks 2/2",
    ]
    assert shown(training(PULSES["silent"]), 40)[3:] == [
        "rank 1 silent 7 s (usual 0.3 s),",
        "stopped; rank 0 too  step 120/300  ranks",
        "2/2",
    ]
    alone = " ".join(shown(training(PULSES["one voice"]), 80))
    assert "log and console silent 7 s" in alone and "rank" not in alone


def test_the_time_left_runs_down_between_two_forecasts_and_says_where_it_is_a_least() -> None:
    progress = training(PULSES["heard"])
    assert progress.left_text(40.0) == "1 min 42 s left"
    assert progress.left_text(45.0) == "1 min 37 s left"
    assert progress.left_text(1000.0) == "", "something runs: it is not over"
    progress.forecast = Forecast(done_s=40.0, share=0.3, left_s=102.0, unknown=2)
    assert progress.left_text(40.0) == "over 1 min 42 s left"
    progress.forecast = Forecast(done_s=40.0, share=0.3, left_s=102.0, rough=True)
    assert progress.left_text(40.0) == "about 1 min 42 s left"
    progress.forecast = Forecast(done_s=40.0, share=0.3)
    assert progress.left_text(40.0) == ""


def test_what_runs_is_never_all_done() -> None:
    progress = training(PULSES["heard"])
    progress.forecast = Forecast(done_s=40.0, share=1.0, left_s=0.2)
    told = "\n".join([progress.line(41.0), *shown(progress, 120, 41.0)])
    assert "99 %" in told and "100 %" not in told and " left" not in told
