"""The event stream of real runs, held against the published schema line by line."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from runbook.cli.run.observers import JsonObserver
from runbook.console import Console
from runbook.records.events import Forecast, Pulse, SilentRank, events_schema
from tests.cli.test_observers import Clock
from tests.engine import toys
from tests.reports import samples

SCHEMA = Path(__file__).parents[2] / "docs" / "events.schema.json"


def test_the_published_schema_is_current() -> None:
    """`runbook schema events > docs/events.schema.json` after every change of an event."""
    document = json.loads(SCHEMA.read_text())
    assert document.pop("$schema") == "https://json-schema.org/draft/2020-12/schema"
    assert document == json.loads(json.dumps(events_schema()))


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
    assert len(steps) <= 2 * 60 * 0.05 * 3 + 4, "at most two a second"
    assert not Draft202012Validator(events_schema()).is_valid(events[0] | {"event": "else"})
    assert not Draft202012Validator(events_schema()).is_valid(events[0] | {"ts": "today"})


def test_ranks_are_told_when_something_changes_and_steps_twice_a_second() -> None:
    out, clock = io.StringIO(), Clock()
    observer = JsonObserver(Console(stdout=out, stderr=io.StringIO()), clock=clock)
    launch = samples.entry("baseline", "run1").launch
    observer.launch_started(launch, 1)
    for step in range(1, 101):
        clock.now += 0.1
        observer.launch_progress(launch, step, 100, float("nan"))
        silent = (
            (SilentRank(rank=1, silent_s=step / 10, usual_s=0.1, state=""),) if step > 50 else ()
        )
        observer.launch_ranks(launch, Pulse(alive=2, wanted=2, silent=silent))
    observer.run_forecast(Forecast(done_s=1.0, share=0.5, source="the profile", rough=True))
    events = checked(out.getvalue())
    ranks = [event for event in events if event["event"] == "launch_ranks"]
    assert [[one["rank"] for one in event["silent"]] for event in ranks] == [[], [1]]
    (forecast,) = (event for event in events if event["event"] == "run_forecast")
    assert forecast["rough"] is True and forecast["left_s"] is None
    steps = [event for event in events if event["event"] == "launch_progress"]
    assert len(steps) == 20, "in ten seconds"
    assert steps[0]["toks_per_s"] is None, "a rate that is no number is none"
