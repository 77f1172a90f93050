"""What a person sees of a run, word for word, and what a machine reads of it."""

from __future__ import annotations

import hashlib
import io
import re
import threading
from pathlib import Path

import pytest

from runbook.cli.run.observers import print_summary
from runbook.cli.run.text import RunView, TextObserver
from runbook.console import Console
from runbook.engine.derive import render
from runbook.launch.observer import Forecast, Pulse
from runbook.records import Launch, LaunchResult, LaunchStatus, RunRecord
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
        f"runbook 0.1.0  run 20261121T010203Z-840303b  4 phases  -> {ROOT}",
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
    assert err.getvalue().splitlines() == [
        "      baseline/run1 starts again (attempt 2)",
        "      baseline/run1 hung: rank 1 silent\\nGO (forged)\\x1b[2J",
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


@pytest.mark.parametrize("begun", [False, True], ids=["after it", "just before it"])
def test_no_line_about_what_goes_on_comes_after_the_phases_own_line(begun: bool) -> None:
    err, record = io.StringIO(), samples.go().phases[1]

    class Held(Console):
        """Comes to write what goes on while the phase ends."""

        def progress(self, text: str) -> None:
            if begun and "step 30/100" in text:
                ending.start()
                ending.join(0.5)  # it waits; else its line would be there by now
            super().progress(text)

    clock = Clock()
    observer = TextObserver(Held(stdout=io.StringIO(), stderr=err), clock=clock)
    running(observer, clock)
    ending = threading.Thread(target=observer.phase_finished, args=(record,))
    if begun:
        observer.show()
        ending.join()
    else:
        observer.phase_finished(record)
        observer.show()
    lines = err.getvalue().splitlines()
    assert ("step 30/100" in lines[-2]) is begun
    assert lines[-1].startswith(f" 2/2 {record.name}")


@pytest.mark.parametrize("name", samples.SAMPLES)
def test_a_phase_is_counted_alike_while_it_runs_and_in_every_report(name: str) -> None:
    record, err = samples.SAMPLES[name](), io.StringIO()
    play(TextObserver(Console(stdout=io.StringIO(), stderr=err)), record)
    counts = {
        "live": re.findall(r"checks: (\d+ of \d+(?:, \d+ skipped)?)", err.getvalue()),
        "terminal": re.findall(
            r"checks: (\d+ of \d+(?:, \d+ skipped)?)", render(record, "terminal")
        ),
        "md": re.findall(r", checks (\d+ of \d+(?:, \d+ skipped)?),", render(record, "md")),
        "html": re.findall(r">checks (\d+ of \d+(?:, \d+ skipped)?);", render(record, "html")),
    }
    assert len(counts["md"]) >= 1 and all(one == counts["md"] for one in counts.values()), counts


def fingerprint_line(record: RunRecord) -> str:
    """Of run.json as it is written: the first half of its SHA-256."""
    written = record.model_dump_json(indent=2) + "\n"
    return f"fingerprint  {hashlib.sha256(written.encode()).hexdigest()[:32]}"


def test_after_an_interruption_the_way_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "artifacts" / "a-run"
    folder.mkdir(parents=True)
    (folder / "report.md").write_text("x")
    out = io.StringIO()
    print_summary(Console(stdout=out, stderr=io.StringIO()), samples.incomplete(), folder)
    assert out.getvalue().splitlines() == [
        "INCOMPLETE (profile a100x2_pcie4: 2xA100 80GB PCIe Gen4, throughput gated)",
        f"resume  runbook run --resume {samples.incomplete().run_id}",
        fingerprint_line(samples.incomplete()),
        "report  artifacts/a-run/report.md",
    ]
