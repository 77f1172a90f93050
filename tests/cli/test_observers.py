"""What a person sees of a run, word for word, and what a machine reads of it."""

from __future__ import annotations

import io
import json
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from rich.cells import cell_len

from runbook.cli.run.observers import JsonObserver, LogConsole, harmless, tell_github
from runbook.cli.run.text import Progress, RunView, TextObserver
from runbook.console import Console, rendered
from runbook.engine.derive import render
from runbook.folder.manifest import fingerprint_of
from runbook.launch.observer import Forecast, Pulse, SilentRank, events_schema
from runbook.records import Launch, LaunchResult, LaunchStatus, RunRecord
from tests.cli.test_main import Terminal
from tests.engine import toys
from tests.reports import samples

ROOT = "artifacts/20261121T010203Z-840303b"


def play(observer: RunView, record: RunRecord) -> None:
    """The events of a run as the engine tells them."""
    with observer:
        observer.run_started(record.run_id, ROOT, tuple(phase.name for phase in record.phases))
        for phase in record.phases:
            observer.phase_started(phase.name, phase.title, len(phase.launches))
            for entry in phase.launches:
                observer.launch_started(entry.launch, 1)
                observer.launch_progress(entry.launch, 1, entry.launch.steps, 40.0)
                observer.launch_progress(entry.launch, entry.launch.steps, entry.launch.steps, None)
                observer.launch_finished(entry.launch, entry.result)
            observer.phase_finished(phase)
        observer.run_finished(record, ROOT)


def test_progress_in_a_pipe_word_for_word() -> None:
    out, err = io.StringIO(), io.StringIO()
    play(TextObserver(Console(stdout=out, stderr=err)), samples.no_go())
    assert out.getvalue() == ""
    assert err.getvalue().splitlines() == [
        f"runbook 1.0.0  run 20261121T010203Z-840303b  4 phases  -> {ROOT}",
        " 1/4 preflight     PASS          checks: 1 of 1, 1 skipped"
        "                                 2.25 s",
        " 2/4 baseline      FAIL          23 +- 0.575 tok/s (n=3) >= 39  checks: 0 of 1"
        "             3 min 04 s",
        " 3/4 bucket_sweep  INCONCLUSIVE  checks: 0 of 1"
        "                                            3 min 02 s",
        " 4/4 long_run      PASS          checks: 1 of 1"
        "                                            1 h 06 min",
    ]


def test_a_launch_that_ends_badly_has_a_line() -> None:
    err = io.StringIO()
    launch = samples.entry("baseline", "run1").launch
    with TextObserver(Console(stdout=io.StringIO(), stderr=err)) as observer:
        observer.launch_started(launch, 2)
        observer.launch_finished(
            launch,
            LaunchResult(status=LaunchStatus.HUNG, cause="rank 1 silent\nGO (forged)\x1b[2J"),
        )
        stopped = LaunchResult(status=LaunchStatus.INTERRUPTED, cause="interrupted by SIGINT")
        observer.launch_finished(launch, stopped)
    assert err.getvalue().splitlines() == [
        "      baseline/run1 starts again (attempt 2)",
        "      baseline/run1 hung: rank 1 silent\\nGO (forged)\\x1b[2J",
        "      baseline/run1 interrupted by SIGINT",
    ]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def running(observer: RunView, clock: Clock) -> Launch:
    """The observer half a minute into a launch of the second phase."""
    launch = samples.entry("baseline", "run1").launch
    observer.run_started("id", ROOT, ("preflight", "baseline"))
    observer.run_forecast(Forecast(done_s=12.0, share=0.345, left_s=190.0, source="x"))
    observer.phase_started("baseline", "Baseline", 3)
    observer.launch_started(launch, 1)
    clock.now += 30.0
    for step in range(1, 31):
        observer.launch_progress(launch, step, 100, 12345.6)
    observer.launch_ranks(launch, Pulse(alive=2, wanted=2))
    return launch


def test_no_line_about_what_goes_on_comes_after_the_phases_own_line() -> None:
    err, record = io.StringIO(), samples.go().phases[1]

    class Held(Console):
        """Comes to write what goes on while the phase ends."""

        def progress(self, text: str) -> None:
            if "step 30/100" in text:
                ending.start()
                ending.join(0.5)  # it waits; else its line would be there by now
            super().progress(text)

    clock = Clock()
    observer = TextObserver(Held(stdout=io.StringIO(), stderr=err), clock=clock)
    running(observer, clock)
    ending = threading.Thread(target=observer.phase_finished, args=(record,))
    observer.show()
    ending.join()
    observer.show()
    lines = err.getvalue().splitlines()
    assert "step 30/100" in lines[-2] and lines[-1].startswith(f" 2/2 {record.name}")


@pytest.mark.parametrize(
    "text",
    ["::error::x", "  ::stop-commands::x", "fine\n::add-mask::x", "a ##[error]x", "\t::group::"],
)
def test_nothing_that_a_trainer_says_is_a_command(text: str) -> None:
    out = io.StringIO()
    console = LogConsole(Console(stdout=out, stderr=io.StringIO()))
    console.progress(text)
    console.result(text)
    for line in out.getvalue().splitlines():
        assert not line.lstrip().startswith("::") and "##[" not in line
    assert harmless("rate: 5::6 [x]") == "rate: 5::6 [x]"


def test_summary_and_outputs_are_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, record = io.StringIO(), samples.no_go()
    summary, outputs = tmp_path / "summary.md", tmp_path / "outputs"
    summary.write_text("of a step before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    monkeypatch.setenv("GITHUB_OUTPUT", str(outputs))
    console = LogConsole(Console(stdout=out, stderr=io.StringIO()))
    tell_github(console, record, tmp_path / "run", exit_code=1)
    assert out.getvalue() == render(record, "github")
    assert summary.read_text() == "of a step before\n" + render(record, "md")
    assert outputs.read_text().splitlines() == [
        "verdict=NO-GO",
        "exit_code=1",
        f"run={tmp_path}/run",
        f"fingerprint={fingerprint_of(record)}",
        f"report={tmp_path}/run/report.md",
    ]


SCHEMA = Path(__file__).parents[2] / "docs" / "events.schema.json"


def test_the_published_schema_is_current() -> None:
    """`python scripts/schemas.py` writes it after every change of an event."""
    document = json.loads(SCHEMA.read_text())
    assert document.pop("$schema") == "https://json-schema.org/draft/2020-12/schema"
    assert document == json.loads(json.dumps(events_schema()))
    # None of them is any object at all.
    assert not [name for name, one in document["$defs"].items() if one.get("additionalProperties")]


def checked(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each of which fits the schema."""
    validator = Draft202012Validator(json.loads(SCHEMA.read_text()))
    events: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    for event in events:
        validator.validate(event)
    return events


def test_the_stream_of_a_run(tmp_path: Path) -> None:
    out = io.StringIO()
    began = datetime.now(UTC)
    phases = (
        toys.Toy("baseline", steps=60, words=("--dt", "0.05")),
        toys.Toy("long_run", words=("--fault", "crash"), reads=("baseline",)),
    )
    toys.run(tmp_path, *phases, observer=JsonObserver(Console(stdout=out, stderr=io.StringIO())))
    events = checked(out.getvalue())
    names = [event["event"] for event in events]
    assert names[0] == "run_started" and names[-1] == "run_finished"
    assert {"run_forecast", "launch_ranks", "launch_progress", "phase_finished"} <= set(names)
    stamps = [datetime.fromisoformat(event["ts"]) for event in events]
    assert began.timestamp() - 1 < stamps[0].timestamp() <= stamps[-1].timestamp()
    assert all(one.utcoffset() is not None for one in stamps)
    steps = [e["step"] for e in events if e["event"] == "launch_progress" and e["launch"] == "run1"]
    assert 60 in steps, "the last step is told, whatever the rate"
    assert not Draft202012Validator(events_schema()).is_valid(events[0] | {"event": "else"})
    assert not Draft202012Validator(events_schema()).is_valid(events[0] | {"ts": "today"})


def test_what_goes_on_is_told_without_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runbook.cli.run.text.PLAIN_INTERVAL_S", 0.01)
    err, told = io.StringIO(), threading.Event()
    monkeypatch.setattr(err, "flush", lambda: "step 30/100" in err.getvalue() and told.set())
    with TextObserver(Console(stdout=io.StringIO(), stderr=err)) as observer:
        running(observer, Clock())
        assert told.wait(30.0)


@pytest.mark.parametrize("ci", ["", "1"])
def test_what_goes_on_is_redrawn_on_a_terminal_and_not_in_ci(
    monkeypatch: pytest.MonkeyPatch, ci: str
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("CI", ci)
    terminal, clock = Terminal(), Clock()
    with TextObserver(Console(stdout=terminal, stderr=terminal), clock=clock) as observer:
        running(observer, clock)
        observer.show()
        observer.phase_finished(samples.no_go().phases[1])
    assert ("\x1b[J" in terminal.getvalue()) is not bool(ci)


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
        progress.step, progress.total, progress.rate = step, 300, 8000.0 + step
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
