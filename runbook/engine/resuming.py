"""Going on with a run that was cut off, or further than it was asked; what finished stays."""

from __future__ import annotations

from pathlib import Path

from runbook import __version__
from runbook.config.registry import report_files
from runbook.config.setup import Setup, setup_of_record
from runbook.engine.derive import SoFar, derive_record, doubt, so_far
from runbook.engine.earlier.standing import require_standing
from runbook.engine.phase_run import RunState
from runbook.engine.run import go_on, guard, keep_configs, write_out
from runbook.engine.starting import extend, follows_plan, keep_aside, left_open, repeat
from runbook.errors import RunbookError, UsageError, listed
from runbook.folder import ENDS, EVENTS_FILE, MANIFEST_FILE, RECORD_FILE, Journal
from runbook.folder.facts import read_facts
from runbook.folder.manifest import artifact_problems, evidence_problems, load_record, read_manifest
from runbook.launch.observer import Observer, StopRequest
from runbook.machine.identity import identity, refuse_if_unlike
from runbook.records import LaunchResult, LaunchStatus, PhaseRecord, RunRecord, Verdict

_NOT_FINISHED = (LaunchStatus.INTERRUPTED, LaunchStatus.PREEMPTED, LaunchStatus.NOT_RUN)


def resume_run(
    run_root: Path,
    *,
    observer: Observer,
    added: str = "",
    command: str = "",
    stop: StopRequest | None = None,
) -> RunRecord:
    """Continue a run after an interruption, or a crash of harness or machine.

    Phases that had finished stay byte for byte as they are; in the phase that was cut off,
    launches that had ended are not repeated. Of a finished run the phases that did not pass run
    again; a plan that ended with a crash, a hang or a time limit goes on after its last launch that
    finished. `added` are phases that are added by `command`, to a finished run too; phases after
    one that ran are judged again.
    Raises `UsageError` if there is nothing to continue, if a file of a finished run is not as its
    manifest says, or if what is added would not be comparable: another version of the program,
    another commit, machine or software (`identity`);
    `RunbookError` if its journal is damaged.
    """
    run_root = run_root.resolve()
    if not (run_root / EVENTS_FILE).is_file():
        raise UsageError(f"{run_root} holds no run: it has no {EVENTS_FILE}")
    # Before the journal is opened, of which that would cut a torn last line off.
    ended = (run_root / MANIFEST_FILE).is_file()
    if ended and (why := doubt(run_root, load_record(run_root))):
        raise _changed(run_root.name, f"its {RECORD_FILE} {why}")
    with Journal.reopen(run_root) as journal:
        if not journal.events:
            raise RunbookError(f"{run_root / EVENTS_FILE} is empty: the run never started")
        record = derive_record(journal.events)
        is_over = journal.events[-1]["event"] == "run_finished"
        again = left_open(record) if is_over and not added else []
        if is_over and not (added or (run_root / MANIFEST_FILE).is_file()):
            return _close(run_root, journal, record, setup_of_record(record), observer)
        if is_over and not (added or again):
            _refuse_if_changed(run_root, record, journal)
            raise _nothing_left(record)
        _refuse_other_version(record)
        refuse_if_unlike(record, identity())
        _refuse_if_changed(run_root, record, journal)
        if added:
            extend(journal, record, added, command)
            record = derive_record(journal.events)
        setup = setup_of_record(record)
        # Before anything is written, so that a refusal leaves the run as it was.
        require_standing(
            setup, run_root.parent, so_far(journal.events).finished.keys() - set(again)
        )
        for name in again:
            before = next(phase for phase in record.phases if phase.name == name)
            repeat(journal, before, only_unfinished=follows_plan(record))
        told = so_far(journal.events)
        keep_aside(run_root, journal, setup.phases)
        keep_configs(setup, run_root)
        state = RunState(
            setup=setup,
            run_root=run_root,
            journal=journal,
            observer=observer,
            stop=stop or StopRequest(),
        )
        state.finished_launches = _finished_launches(told)
        _restore(state, told.finished)
        journal.append("run_resumed", sync=True)
        (run_root / MANIFEST_FILE).unlink(missing_ok=True)
        return go_on(state)


def _close(
    run_root: Path, journal: Journal, record: RunRecord, setup: Setup, observer: Observer
) -> RunRecord:
    """Write what a run lacks that ended while its reports were written: nothing runs again."""
    _refuse_other_version(record)
    _refuse_if_changed(run_root, record, journal)
    names = tuple(setup.phases_by_name)
    observer.run_started(record.run_id, str(run_root), names)
    observer.note("every phase had ended: its record, reports and manifest are written now")
    return write_out(journal, run_root, observer)


def _nothing_left(record: RunRecord) -> UsageError:
    plan = record.options.get("plan")
    hint = f"`{record.invocation.resume_line(record.run_id, ['PHASE'])}` goes further"
    if plan and record.verdict is not Verdict.PARTIAL:
        hint = "begin a new launch"
    return UsageError(f"{record.run_id} is finished: {record.verdict}", hint=hint)


def _refuse_other_version(record: RunRecord) -> None:
    if record.tool_version != __version__:
        raise UsageError(
            f"{record.run_id} was made by version {record.tool_version}, this is {__version__}",
            hint="continue it with the version that began it",
        )


def _refuse_if_changed(run_root: Path, record: RunRecord, journal: Journal) -> None:
    """A manifest made anew would vouch for what is left; reports may be rendered again.

    A run that was killed has neither a manifest of its own nor a list: then what its phases were
    judged by has to be what is there, but for launches that begin anew.
    """
    path, reports = run_root / MANIFEST_FILE, report_files().values()
    if journal.events[-1]["event"] not in ENDS:
        told = so_far(journal.events)
        kept = _finished_launches(told)
        cut_off = [key for key in told.begun if key[0] not in told.finished and key not in kept]
        changed = evidence_problems(run_root, told.records.values(), cut_off=cut_off)
    else:
        manifest = read_manifest(path) if path.is_file() else {}
        left = {name: digest for name, digest in manifest.items() if name not in reports}
        changed = artifact_problems(run_root, record, left)
    if changed:
        raise _changed(record.run_id, listed(changed, 1))


def _changed(run_id: str, what: str) -> UsageError:
    return UsageError(
        f"{run_id} is not what it was when it ended: {what}",
        hint="`runbook verify` names every file: put it back from a copy, or begin a new run",
    )


def _restore(state: RunState, done: dict[str, PhaseRecord]) -> None:
    if "preflight" in done:
        state.facts |= read_facts(state.run_root)
    for name, record in done.items():
        state.choices[name] = record.choices
        guard(state, record)
        state.evidence[name] = state.read(state.setup.phases_by_name[name], record.launches)


def _finished_launches(told: SoFar) -> dict[tuple[str, str], LaunchResult]:
    """How the launches ended that had ended by themselves, in phases that had not."""
    results = {
        key: LaunchResult.model_validate(result)
        for key, result in told.ended.items()
        if key[0] not in told.finished
    }
    return {key: one for key, one in results.items() if one.status not in _NOT_FINISHED}
