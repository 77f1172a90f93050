"""A run: the phases in order, the journal after each, the record and reports at the end.

`run_setup` begins one; `runbook.engine.resuming` goes on where one was cut off.
"""

from __future__ import annotations

import shlex
import sys
from contextlib import suppress
from pathlib import Path

from runbook import __version__
from runbook.checkout import how_to_call
from runbook.config.registry import Phase, report_files
from runbook.config.setup import Setup
from runbook.engine import is_as_planned, was_judged
from runbook.engine.derive import (
    NOT_WRITTEN,
    derive_record,
    known_phases,
    refused,
    so_far,
    write_reports,
)
from runbook.engine.phase_run import PhaseRun, RunState
from runbook.engine.plan import config_before
from runbook.engine.plan.progress import Forecaster, pace_of_the_go
from runbook.engine.starting import held_back, keep_aside, repeat
from runbook.errors import RunbookError, UsageError
from runbook.files import make_private_dir, not_text, typed_here, utc_stamp, utc_text, written_to
from runbook.folder import EVENTS_FILE, RECORD_FILE, Journal, run_folders
from runbook.folder.manifest import (
    RUN_ID,
    artifact_records,
    load_record,
    write_manifest,
    write_record,
)
from runbook.launch.command import keep_config, remove_checkouts
from runbook.launch.launcher_api import launcher
from runbook.launch.observer import Observer, StopRequest
from runbook.machine import git
from runbook.machine.identity import identity, package_folders
from runbook.records import PhaseRecord, RunRecord, Verdict
from runbook.records.run import PACKAGE_PATH, PROGRAM, TAKES_OUT, Screen

_SHORT_SHA = 7
_TRIES = 100
# Machines that share a folder may differ by less than anybody needs between two runs.
_CLOCKS_DIFFER_S = 60.0


def create_run_folder(out: Path) -> Path:
    """Create `out/<UTC time>-<sha7>/` for the owner only and return it.

    `nogit` stands for the commit where there is none. A second run within the same second gets a
    number behind. Raises `UsageError` if the folder cannot be made, or if a run there is of the
    future: by their names it is known whether a NO-GO came after a GO.
    """
    checkout = git.find_checkout()
    sha = git.commit_of(checkout) if checkout else None
    name = f"{utc_stamp()}-{(sha or 'nogit')[:_SHORT_SHA]}"
    out = out.resolve()
    if why := not_text(str(out)):
        raise UsageError(f"--out {out}: its name {why}", hint="name another folder")
    runs = [folder.name for folder in run_folders(out) if RUN_ID.fullmatch(folder.name)]
    if runs and runs[-1] > utc_stamp(_CLOCKS_DIFFER_S):
        raise UsageError(
            f"--out {out}: its run {runs[-1]} is of the future, here it is {utc_stamp()}",
            hint="set the clock of this machine right, or name another folder",
        )
    with written_to("--out", out):
        if not out.is_dir():
            make_private_dir(out)
        for number in range(1, _TRIES):
            folder = out / (name if number == 1 else f"{name}-{number}")
            with suppress(FileExistsError):
                make_private_dir(folder)
                return folder
    raise UsageError(f"--out {out} has {_TRIES} runs of the same second: {name}")


def run_setup(setup: Setup, *, observer: Observer, stop: StopRequest | None = None) -> RunRecord:
    """Run every phase that was asked for and return the record, which also lies in `run.json`.

    A launch or a phase that fails becomes rows, and the run goes on. Once `stop` is
    asked for, to which its owner routes signals, everything that was started is ended, the rest
    becomes INCOMPLETE rows, and the reports are written; `resume_run` goes on from there. If the
    disk refuses, the record is returned with that reason and is never GO. Raises `UsageError`
    before anything is created if the run's folder cannot be made.
    """
    run_root = create_run_folder(Path(setup.options.out))
    keep_configs(setup, run_root)
    with Journal.create(run_root) as journal:
        skeleton = _skeleton(setup, run_root.name)
        journal.append(
            "run_started",
            sync=True,
            record=skeleton.model_dump(mode="json"),
            phases=list(setup.phases_by_name),
            known=[[name, *told] for name, told in known_phases(setup).items()],
        )
        # From here on it is found by its name, and goes on, wherever it is cut off.
        write_record(run_root, derive_record(journal.events))
        state = RunState(
            setup=setup,
            run_root=run_root,
            journal=journal,
            observer=observer,
            stop=stop or StopRequest(),
        )
        return go_on(state)


def keep_configs(setup: Setup, run_root: Path) -> None:
    """Copy the trainer's configs into the run's folder, where its launches read them."""
    for name in dict.fromkeys(launch.config for launch in setup.planned if launch.config):
        keep_config(run_root, name)


def go_on(state: RunState) -> RunRecord:
    """Run the phases that the journal does not know as finished, and write the end of the run."""
    names = tuple(state.setup.phases_by_name)
    done = so_far(state.journal.events).finished
    left = [
        launch
        for launch in state.setup.planned
        if launch.phase not in done
        and (launch.phase, launch.name) not in state.finished_launches
        and not launch.conditional
    ]
    state.observer = Forecaster(
        state.observer,
        left,
        state.setup.profile,
        done_s=sum(record.duration_s for record in done.values()),
        pace=pace_of_the_go(state.setup),
    )
    state.observer.run_started(state.run_root.name, str(state.run_root), names)
    try:
        try:
            _run_phases(state)
        finally:
            remove_checkouts(state.run_root)
        return _finish(state)
    except OSError as error:
        return _not_written(state, error)


def _run_phases(state: RunState) -> None:
    done = so_far(state.journal.events).finished
    newest = 0
    for phase in state.setup.phases:
        if state.stop.requested:
            return
        before = done.get(phase.name)
        if before is None:
            _run_phase(state, phase)
        elif newest > so_far(state.journal.events).judged_at[phase.name] and was_judged(before):
            _settle(state, phase, before)
        newest = max(newest, so_far(state.journal.events).judged_at.get(phase.name, 0))


def _run_phase(state: RunState, phase: Phase) -> None:
    record = PhaseRun(phase, state).run()
    _keep_phase(state, record)
    state.observer.phase_finished(record)
    guard(state, record)
    last = phase.name == state.setup.phases[-1].name
    if state.blocked and not last and state.blocked.follows.partition(".")[0] == phase.name:
        state.observer.note(f"later phases start nothing: {state.blocked.cause}")


def _settle(state: RunState, phase: Phase, before: PhaseRecord) -> None:
    """A finished phase after an earlier one that ran since: it may rest on that one.

    It is judged again from its files; if it would be launched otherwise now, it runs again.
    """
    if not is_as_planned(phase, state.context(phase), before):
        state.observer.note(f"{phase.name} runs again: an earlier phase chose other settings")
        repeat(state.journal, before)
        keep_aside(state.run_root, state.journal, state.setup.phases)
        _run_phase(state, phase)
        return
    record = state.judged_again(phase, before)
    if record != before:
        state.observer.note(f"{phase.name} is judged again, with what ran before it")
        _keep_phase(state, record)
        state.observer.phase_finished(record)


def guard(state: RunState, record: PhaseRecord) -> None:
    """Let later phases start nothing where a required row of a guarding one is not satisfied.

    Where a plan stops, every phase of it guards the next ones, and nothing switches that off.
    """
    setup = state.setup
    guards = setup.phases_by_name[record.name].guards and not setup.options.keep_going
    if state.blocked is None and (setup.stops or guards):
        state.blocked = held_back(record, always=setup.stops)


def _not_written(state: RunState, error: OSError) -> RunRecord:
    """The record of a run that its disk refused to keep: told, never GO, nothing pretended."""
    what = f"{error.filename or state.run_root}: {error.strerror or error}"
    state.observer.note(f"{NOT_WRITTEN}: {what}")
    record = refused(derive_record(state.journal.events), what)
    try:
        write_record(state.run_root, record)
    except OSError:
        record = _as_kept(record, state.run_root)
    state.observer.run_finished(record, str(state.run_root))
    return record


def _as_kept(record: RunRecord, run_root: Path) -> RunRecord:
    """NO-GO only if the run.json that lies there says it too; else what is told had no record."""
    try:
        kept = load_record(run_root).verdict
    except RunbookError:
        kept = Verdict.INCOMPLETE
    agree = kept is record.verdict
    return record if agree else record.model_copy(update={"verdict": Verdict.INCOMPLETE})


def _keep_phase(state: RunState, record: PhaseRecord) -> None:
    state.choices[record.name] = record.choices
    state.journal.append(
        "phase_finished",
        sync=True,
        record=record.model_dump(mode="json"),
        interrupted=bool(state.stop.requested),
    )
    write_record(state.run_root, derive_record(state.journal.events))


def _finish(state: RunState) -> RunRecord:
    signal = state.stop.requested
    state.journal.append(
        "run_interrupted" if signal else "run_finished",
        sync=True,
        signal=signal,
        artifacts=[
            artifact.model_dump(mode="json")
            # Files that follow from the record, which cannot hold their digests, are left out.
            for artifact in artifact_records(
                state.run_root, without=[RECORD_FILE, EVENTS_FILE, *report_files().values()]
            )
        ],
    )
    return write_out(state.journal, state.run_root, state.observer)


def write_out(journal: Journal, run_root: Path, observer: Observer) -> RunRecord:
    """All that follows from a journal that is at its end: record, reports and manifest."""
    record = derive_record(journal.events)
    write_record(run_root, record)
    write_reports(record, run_root)
    write_manifest(run_root)
    observer.run_finished(record, str(run_root))
    return record


def _skeleton(setup: Setup, run_id: str) -> RunRecord:
    profile, plan, options = setup.profile, setup.profile.plan, setup.options
    return RunRecord(
        tool_version=__version__,
        run_id=run_id,
        profile=profile.name,
        profile_sha256=setup.profile_sha256(),
        profile_document=setup.profile_document(),
        scope="",
        verdict=Verdict.INCOMPLETE,
        reasons=(),
        started_at=utc_text(),
        finished_at=None,
        command=options.command,
        settings=setup.settings.texts(),
        sources=setup.sources,
        config_before=config_before(setup),
        options=options.document(),
        environment={
            **identity(),
            PACKAGE_PATH: str(package_folders()["nsa"]),
            **({"plan": plan.name, "behind": plan.go or "no GO"} if plan else {}),
            **({PROGRAM: called} if (called := _how_to_type()) else {}),
            **({TAKES_OUT: typed} if (typed := launcher(options.launcher).takes_out()) else {}),
        },
        required=setup.required,
        phases=(),
        exports=setup.exports,
    )


def _how_to_type() -> str:
    """What a page of this run says of its commands, which name the program only; empty if nothing.

    It must read the same wherever it is opened, so the place is a fact of the run.
    """
    if typed_here() == Screen.program:
        return how_to_call()
    path = shlex.quote(str(Path(sys.argv[0]).absolute()))
    return f"not on PATH where this ran: for `runbook` type `{path}` there"
