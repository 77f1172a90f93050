"""`resume_run`: goes on where a run was cut off, without repeating what had finished."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from runbook import __version__
from runbook.engine.journal import EVENTS_FILE, Journal, derive_record
from runbook.engine.judge import read_facts, read_phase
from runbook.engine.manifest import MANIFEST_FILE
from runbook.engine.options import Setup, setup_of_record
from runbook.engine.phase_run import RunState
from runbook.engine.run import continue_run, finished_phases
from runbook.errors import RunbookError, UsageError
from runbook.launch import StopRequest
from runbook.launch.observer import Observer
from runbook.records import LaunchResult, LaunchStatus, PhaseRecord, RunRecord

_NOT_FINISHED = (LaunchStatus.INTERRUPTED, LaunchStatus.NOT_RUN)


def resume_run(
    run_root: Path,
    *,
    observer: Observer,
    make_setup: Callable[[RunRecord], Setup] = setup_of_record,
) -> RunRecord:
    """Continue a run after an interruption or a crash of harness or machine.

    Phases that had finished stay byte for byte as they are; in the phase that was cut off,
    launches that had ended are not repeated. Raises `UsageError` if there is nothing to continue
    or another version of the program made the run, `RunbookError` if its journal is damaged.
    """
    run_root = run_root.resolve()
    if not (run_root / EVENTS_FILE).is_file():
        raise UsageError(f"{run_root} holds no run: it has no {EVENTS_FILE}")
    with Journal.reopen(run_root) as journal:
        if not journal.events:
            raise RunbookError(f"{run_root / EVENTS_FILE} is empty: the run never started")
        record = derive_record(journal.events)
        _refuse_if_pointless(record, journal)
        setup = make_setup(record)
        done = finished_phases(journal)
        state = RunState(
            setup=setup,
            run_root=run_root,
            journal=journal,
            observer=observer,
            stop=StopRequest(),
            finished_launches=_finished_launches(journal, done),
        )
        _restore(state, done)
        journal.append("run_resumed", sync=True)
        (run_root / MANIFEST_FILE).unlink(missing_ok=True)
        return continue_run(setup, run_root, journal, observer, state=state)


def _refuse_if_pointless(record: RunRecord, journal: Journal) -> None:
    if any(event["event"] == "run_finished" for event in journal.events):
        raise UsageError(
            f"{record.run_id} is finished: {record.verdict}", hint="start a new run instead"
        )
    if record.tool_version != __version__:
        raise UsageError(
            f"{record.run_id} was made by version {record.tool_version}, this is {__version__}",
            hint="continue it with the version that began it",
        )


def _restore(state: RunState, done: dict[str, PhaseRecord]) -> None:
    if "preflight" in done:
        state.facts |= read_facts(state.run_root)
    for name, record in done.items():
        state.choices[name] = record.choices
        state.evidence[name] = read_phase(
            state.run_root, record.launches, facts=state.facts, earlier={}
        )


def _finished_launches(
    journal: Journal, done: dict[str, PhaseRecord]
) -> dict[tuple[str, str], LaunchResult]:
    found = {}
    for event in journal.events:
        if event["event"] == "launch_finished" and event["phase"] not in done:
            result = LaunchResult.model_validate(event["result"])
            if result.status not in _NOT_FINISHED:
                found[(event["phase"], event["launch"])] = result
    return found
