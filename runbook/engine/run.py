"""`run_plan`: the phases in order, the journal after each, the record and reports at the end."""

from __future__ import annotations

import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from runbook import __version__, registry
from runbook.collect import git
from runbook.engine.journal import EVENTS_FILE, Journal, derive_record, phase_records
from runbook.engine.manifest import artifact_records, write_manifest
from runbook.engine.options import RunOptions, Setup, prepare
from runbook.engine.phase_run import PhaseRun, RunState
from runbook.engine.rendering import report_files, write_reports
from runbook.files import make_private_dir, utc_text, write_atomic
from runbook.launch import StopRequest, stop_on_signals
from runbook.launch.observer import Observer
from runbook.records import PhaseRecord, RunRecord, Verdict

_SHORT_SHA = 7
_TRIES = 100


def create_run_folder(out: Path) -> Path:
    """Create `out/<UTC time>-<sha7>/` for the owner only and return it.

    `nogit` stands for the commit where there is none. A second run within the same second gets a
    number behind. Raises `OSError` if the folder cannot be made.
    """
    checkout = git.find_checkout()
    sha = git.head_sha(checkout) if checkout else None
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{(sha or 'nogit')[:_SHORT_SHA]}"
    out = out.resolve()
    for number in range(1, _TRIES):
        folder = out / (name if number == 1 else f"{name}-{number}")
        try:
            make_private_dir(folder)
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"{out} has {_TRIES} runs of the same second: {name}")


RECORD_FILE = "run.json"


def run_plan(options: RunOptions, *, observer: Observer) -> RunRecord:
    """Run every phase that was asked for and return the record, which also lies in `run.json`.

    A launch or a phase that fails becomes rows, and the run goes on. On SIGINT or SIGTERM
    everything that was started is ended, the rest becomes INCOMPLETE rows, and the reports are
    written. If the disk refuses, the record is returned with that reason and is never GO. Raises
    `UsageError` before anything is created if the options are wrong, and `OSError` if the run's
    folder cannot be made.
    """
    return run_setup(prepare(options), observer=observer)


def run_setup(setup: Setup, *, observer: Observer) -> RunRecord:
    """`run_plan` with its options resolved already."""
    run_root = create_run_folder(Path(setup.options.out))
    with Journal.create(run_root) as journal:
        skeleton = _skeleton(setup, run_root.name)
        journal.append(
            "run_started",
            sync=True,
            record=skeleton.model_dump(mode="json"),
            phases=[phase.name for phase in setup.phases],
            known=_known_phases(setup),
        )
        return continue_run(setup, run_root, journal, observer)


def continue_run(
    setup: Setup,
    run_root: Path,
    journal: Journal,
    observer: Observer,
    *,
    state: RunState | None = None,
) -> RunRecord:
    """Run the phases that the journal does not know as finished, and write the end of the run."""
    names = tuple(phase.name for phase in setup.phases)
    observer.run_started(run_root.name, str(run_root), names)
    with _signals() as stop:
        state = state or RunState(
            setup=setup, run_root=run_root, journal=journal, observer=observer, stop=stop
        )
        state.stop = stop
        try:
            _run_phases(state, stop)
            return _finish(state)
        except OSError as error:
            return _not_written(state, error)


def _run_phases(state: RunState, stop: StopRequest) -> None:
    done = finished_phases(state.journal)
    for phase in state.setup.phases:
        if phase.name in done:
            continue
        if stop.requested:
            return
        record = PhaseRun(phase, state).run()
        _keep_phase(state, record)
        state.observer.phase_finished(record)


def _not_written(state: RunState, error: OSError) -> RunRecord:
    """The record of a run that its disk refused to keep: told, never GO, nothing pretended."""
    what = f"{error.filename or state.run_root}: {error.strerror or error}"
    state.observer.note(f"the run's files cannot be written: {what}")
    record = derive_record(state.journal.events)
    record = record.model_copy(
        update={
            "verdict": Verdict.NO_GO if record.verdict is Verdict.NO_GO else Verdict.INCOMPLETE,
            "reasons": (f"the run's files cannot be written ({what})", *record.reasons[:1]),
        }
    )
    state.observer.run_finished(record, str(state.run_root))
    return record


def finished_phases(journal: Journal) -> dict[str, PhaseRecord]:
    """Records of the phases that ran to their end; an interrupted one is not among them."""
    whole = {
        event["record"]["name"]
        for event in journal.events
        if event["event"] == "phase_finished" and not event["interrupted"]
    }
    records = phase_records(journal.events)
    return {name: record for name, record in records.items() if name in whole}


def record_text(record: RunRecord) -> str:
    """run.json as it is written: one form only, so that an edit anywhere shows."""
    return record.model_dump_json(indent=2) + "\n"


def _keep_phase(state: RunState, record: PhaseRecord) -> None:
    state.choices[record.name] = record.choices
    state.journal.append(
        "phase_finished",
        sync=True,
        record=record.model_dump(mode="json"),
        interrupted=bool(state.stop.requested),
    )
    text = record_text(derive_record(state.journal.events))
    write_atomic(state.run_root / RECORD_FILE, text)


def _finish(state: RunState) -> RunRecord:
    signal = state.stop.requested
    formats = state.setup.options.formats
    state.journal.append(
        "run_interrupted" if signal else "run_finished",
        sync=True,
        signal=signal,
        artifacts=[
            artifact.model_dump(mode="json")
            for artifact in artifact_records(state.run_root, without=_derived_files())
        ],
    )
    record = derive_record(state.journal.events)
    write_atomic(state.run_root / RECORD_FILE, record_text(record))
    if formats:
        write_reports(record, state.run_root, formats)
    write_manifest(state.run_root)
    state.observer.run_finished(record, str(state.run_root))
    return record


def _derived_files() -> list[str]:
    """Files that follow from the record, so that the record cannot hold their digests."""
    return [RECORD_FILE, EVENTS_FILE, *report_files().values()]


def _skeleton(setup: Setup, run_id: str) -> RunRecord:
    profile = setup.profile
    exports = {name: value.value for name, value in profile.env.items()}
    settings = {**setup.settings.toggles}
    settings |= {name: _word(value) for name, value in setup.settings.config_overrides.items()}
    return RunRecord(
        tool_version=__version__,
        run_id=run_id,
        profile=profile.name,
        profile_sha256=setup.profile_sha256(),
        profile_document=setup.profile_document(),
        scope=profile.scope,
        verdict=Verdict.INCOMPLETE,
        reasons=(),
        started_at=utc_text(),
        finished_at=None,
        command=setup.options.command,
        settings=settings,
        options=setup.options.document(),
        environment={
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
        required=profile.required,
        phases=(),
        exports=exports | dict(setup.settings.toggles),
    )


def _word(value: str | int | float | bool) -> str:
    """A config value as a person types it after `--set KEY=`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _known_phases(setup: Setup) -> list[list[str]]:
    phases = {**registry.phases(), **{phase.name: phase for phase in setup.phases}}
    return [[phase.name, phase.title, phase.source] for phase in phases.values()]


@contextmanager
def _signals() -> Iterator[StopRequest]:
    stop = StopRequest()
    if threading.current_thread() is threading.main_thread():
        with stop_on_signals(stop):
            yield stop
    else:  # Python delivers signals to the main thread only; its owner has to deal with them
        yield stop
