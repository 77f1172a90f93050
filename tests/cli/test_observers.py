"""What a person sees of a run, word for word, and what a machine reads of it."""

from __future__ import annotations

import hashlib
import io
import json
import threading
import time
from pathlib import Path

import pytest

from runbook.cli.run import text
from runbook.cli.run.json_lines import JsonObserver
from runbook.cli.run.observers import print_summary
from runbook.cli.run.text import RunView, TextObserver, headline
from runbook.console import Console
from runbook.launch.observer import Forecast, Pulse, Silence
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
        " 1/4 preflight     PASS          1 of 1 checks"
        "                                             2.25 s",
        " 2/4 baseline      FAIL          23 +- 0.575 tok/s (n=3) >= 39  0 of 1 checks"
        "              3 min 04 s",
        " 3/4 bucket_sweep  INCONCLUSIVE  0 of 1 checks"
        "                                             3 min 02 s",
        " 4/4 long_run      PASS          1 of 1 checks"
        "                                             1 h 06 min",
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


def test_a_pipe_hears_what_runs_word_for_word() -> None:
    err, clock = io.StringIO(), Clock()
    observer = TextObserver(Console(stdout=io.StringIO(), stderr=err), clock=clock)
    launch = running(observer, clock)
    observer.show()
    silent = (
        Silence(rank=1, silent_s=7.2, usual_s=0.31, state="stopped"),
        Silence(rank=0, silent_s=7.1, usual_s=0.3),
    )
    observer.launch_ranks(launch, Pulse(alive=2, wanted=2, silent=silent))
    observer.show()
    observer.launch_ranks(launch, Pulse(alive=2, wanted=2, busy="checkpoint", busy_s=12.0))
    observer.show()
    assert err.getvalue().splitlines()[1:] == [
        "      2/2 baseline/run1  step 30/100  12,346 tok/s  ranks 2/2  34 %  2 min 40 s left",
        "      2/2 baseline/run1  rank 1 silent 7 s (usual 0.3 s), stopped; rank 0 too"
        "  step 30/100  ranks 2/2  34 %  2 min 40 s left",
        "      2/2 baseline/run1  step 30/100  writing a checkpoint, 12 s  ranks 2/2"
        "  34 %  2 min 40 s left",
    ]


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


def test_a_pipe_hears_it_every_thirty_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert text.PLAIN_INTERVAL_S == 30.0
    monkeypatch.setattr(text, "PLAIN_INTERVAL_S", 0.05)
    err = io.StringIO()
    with TextObserver(Console(stdout=io.StringIO(), stderr=err)) as observer:
        running(observer, Clock())
        deadline = time.monotonic() + 20.0
        while err.getvalue().count("step 30/100") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        observer.run_finished(samples.go(), ROOT)
        told = err.getvalue()
        time.sleep(0.2)
    assert told.count("step 30/100") >= 2
    assert err.getvalue() == told, "nothing more once the run is over"


def test_quiet_says_nothing_on_the_way() -> None:
    err = io.StringIO()
    play(TextObserver(Console(stdout=io.StringIO(), stderr=err, quiet=True)), samples.no_go())
    assert err.getvalue() == ""


def test_json_lines_hold_the_same_facts() -> None:
    out, err = io.StringIO(), io.StringIO()
    record = samples.no_go()
    play(JsonObserver(Console(stdout=out, stderr=err)), record)
    assert err.getvalue() == ""
    events = [json.loads(line) for line in out.getvalue().splitlines()]
    assert all(event.pop("schema_version") == 1 and event["ts"].endswith("Z") for event in events)
    del events[0]["ts"]
    assert events[0] == {
        "event": "run_started",
        "run_id": record.run_id,
        "run_root": ROOT,
        "phases": [phase.name for phase in record.phases],
    }
    assert events[-1]["event"] == "run_finished"
    assert events[-1]["verdict"] == "NO-GO"
    assert events[-1]["scope"] == record.scope
    assert events[-1]["caveats"] == ["settings changed (NSA_PREFILL_BATCHED=0)"]
    finished = [event for event in events if event["event"] == "phase_finished"]
    assert [(event["phase"], event["outcome"]) for event in finished] == [
        (phase.name, phase.outcome.value) for phase in record.phases
    ]
    assert finished[1]["checks"] == [
        check.model_dump(mode="json") for check in record.phases[1].checks
    ]
    started = next(event for event in events if event["event"] == "launch_started")
    assert started["command"].startswith("NSA_PREFILL_BATCHED=1 NCCL_ALGO=Ring torchrun ")


# What a person set for this run alone is the first suspect.
WHY = "NSA_PREFILL_BATCHED=0 was set by hand (--set)."
FIRST = "first without --set NSA_PREFILL_BATCHED=0, which was set by hand; if it comes back: "


def test_the_summary_word_for_word(tmp_path: Path) -> None:
    for name in ("report.html", "report.md", "junit.xml"):
        (tmp_path / name).write_text("x")
    out = io.StringIO()
    print_summary(Console(stdout=out, stderr=io.StringIO()), samples.no_go(), tmp_path)
    assert out.getvalue().splitlines() == [
        "NO-GO, settings changed (NSA_PREFILL_BATCHED=0) "
        "(profile a100x2_pcie4: 2xA100 80GB PCIe Gen4, throughput gated)",
        "  Do not start the production run.",
        "  baseline.throughput: 23 tok/s is below 39",
        "  bucket_sweep.best: only 2 of 6 rounds are valid",
        "  2 causes; of 4 required checks 2 passed, 1 failed and 1 was inconclusive. "
        "5 checks in all.",
        "FAIL  baseline.throughput: 23 tok/s is below 39 "
        "(23 ± 0.575 tok/s, interval 22.31 to 23.69 against >= 39 tok/s)",
        f"    why    {WHY}",
        "    see    baseline/launch_0/training.csv",
        "    see    baseline/launch_0/env.json",
        f"    try    {FIRST}set NSA_DDP_BUCKET_MB=50; check that flash is not disabled",
        "    rerun  runbook run --phase baseline --profile a100x2_pcie4",
        "INCONCLUSIVE  bucket_sweep.best: only 2 of 6 rounds are valid",
        f"    why    {WHY}",
        "    see    bucket_sweep/arms/training.csv",
        f"    try    {FIRST}run the sweep again on a machine that nothing else uses",
        "    rerun  runbook run --phase bucket_sweep --profile a100x2_pcie4",
        fingerprint_line(samples.no_go()),
        f"report  {tmp_path}/report.html",
        f"report  {tmp_path}/report.md",
    ]


def fingerprint_line(record: RunRecord) -> str:
    """Of run.json as it is written: the first half of its SHA-256."""
    written = record.model_dump_json(indent=2) + "\n"
    return f"fingerprint  {hashlib.sha256(written.encode()).hexdigest()[:32]}"


def test_a_quiet_summary_is_the_verdict_and_the_report(tmp_path: Path) -> None:
    (tmp_path / "report.md").write_text("x")
    out = io.StringIO()
    print_summary(Console(stdout=out, stderr=io.StringIO(), quiet=True), samples.go(), tmp_path)
    assert out.getvalue().splitlines() == [
        "GO (profile a100x2_pcie4: 2xA100 80GB PCIe Gen4, throughput gated)",
        fingerprint_line(samples.go()),
        f"report  {tmp_path}/report.md",
    ]


def test_a_phase_without_checks_says_so() -> None:
    phase = samples.preflight().model_copy(update={"checks": ()})
    assert headline(phase) == "no checks"


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
        "resume  runbook run --resume artifacts/a-run",
        fingerprint_line(samples.incomplete()),
        "report  artifacts/a-run/report.md",
    ]
