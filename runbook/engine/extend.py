"""A run that goes on beyond what was asked of it: phases are added, or run again.

The journal only grows: what is added and what is repeated are events of their own, and the earlier
attempt's files are kept beside the new ones, so that a failure that went away is still seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from runbook.config.phase import Phase
from runbook.config.plan import needing_go
from runbook.config.registry import report_files, select
from runbook.config.setup import Setup
from runbook.errors import UsageError
from runbook.folder import EVENTS_FILE, MANIFEST_FILE, RECORD_FILE
from runbook.folder.journal import Journal
from runbook.records import LaunchStatus, PhaseRecord, RunRecord
from runbook.records.outcome import satisfies
from runbook.records.run import Repeated

_WORD = "repeated"


def extend(
    journal: Journal,
    record: RunRecord,
    wanted: str,
    command: str,
    make_setup: Callable[[RunRecord], Setup],
) -> None:
    """Write into the journal which phases are added. Raises `UsageError` if that is none."""
    before_it = make_setup(record)
    present = [phase.name for phase in before_it.phases]
    added = _added(wanted, before_it, record)
    before = str(record.options.get("phases") or "all")
    options = {**record.options, "phases": ",".join([before, *added])}
    setup = make_setup(record.model_copy(update={"options": options}))
    journal.append(
        "run_extended",
        sync=True,
        phases=[*present, *added],
        option=options["phases"],
        required=list(setup.required),
        command=command,
    )


def _added(wanted: str, setup: Setup, record: RunRecord) -> list[str]:
    present, settings = [phase.name for phase in setup.phases], setup.profile.phases
    added = [one.name for one in select(wanted, settings) if one.name not in present]
    if not added:
        raise UsageError(f"--phase {wanted}: {record.run_id} has it already")
    plan = setup.profile.plan
    needing = needing_go(setup.profile, added)
    if needing and plan is not None and not plan.go and not setup.options.without_go:
        raise UsageError(
            f"{needing[0]} starts only behind a GO, and {record.run_id} began without one",
            hint="begin a new launch",
        )
    return added


# How a process or the machine failed, or what a start was refused for (data that changed), which
# says nothing against what is trained.
_ACCIDENTS = (
    LaunchStatus.CRASHED,
    LaunchStatus.HUNG,
    LaunchStatus.SILENT,
    LaunchStatus.TIMED_OUT,
    LaunchStatus.HARDWARE_ERROR,
    LaunchStatus.ENVIRONMENT_ERROR,
    LaunchStatus.CONFIG_ERROR,
)


def follows_plan(record: RunRecord) -> bool:
    """Is it a run of phases of which each starts only behind the one before?"""
    plan = record.profile_document.get("plan")
    return isinstance(plan, Mapping) and bool(plan.get("stops"))


def left_open(record: RunRecord) -> list[str]:
    """The phases that run again where a finished run goes on: those with a required check open.

    A plan goes on only after a crash, a hang, a time limit or a refused start: with the phase in
    which a launch ended so, and those that started nothing because of it.
    """
    found = [one for one in record.phases if one.started_at and any(_required_open(record, one))]
    if found and follows_plan(record):
        ends = [entry.result for entry in found[0].launches if entry.result.attempts]
        if not ends or ends[-1].status not in _ACCIDENTS:
            return []
    return [phase.name for phase in found]


def _required_open(record: RunRecord, phase: PhaseRecord) -> Iterator[bool]:
    required = set(record.required)
    return (check.id in required and not satisfies(check) for check in phase.checks)


def repeat(journal: Journal, before: PhaseRecord, *, only_unfinished: bool = False) -> None:
    """Write into the journal that a phase runs again, and how it ended before.

    `only_unfinished`: its launches that finished stay, and it goes on after them.
    """
    kept = [one.launch.name for one in before.launches if one.result.ok and only_unfinished]
    ended = [one.launch for one in before.launches if one.result.attempts]
    worst = min(before.checks, key=lambda check: check.outcome.rank, default=None)
    folder = ended[-1].run_dir if kept else before.name
    events = [one for one in journal.events if one["event"] == "phase_repeated"]
    number = 1 + sum(one["phase"] == before.name for one in events)
    journal.append(
        "phase_repeated",
        sync=True,
        phase=before.name,
        kept=kept,
        repeated=Repeated(
            outcome=before.outcome,
            reason=f"{worst.id} is {worst.outcome}: {worst.reason}" if worst else "no check",
            started=any(entry.result.attempts for entry in before.launches),
            folder=f"{folder}.{_WORD}{number}",
        ).model_dump(mode="json"),
    )


def keep_aside(run_root: Path, journal: Journal, phases: Sequence[Phase]) -> None:
    """Move the files of all that is about to run again; what was moved before stays.

    It may be called again after a crash, as long as the phase has not begun.
    """
    pending: dict[str, Repeated] = {}
    for event in journal.events:
        if event["event"] == "phase_repeated":
            pending[event["phase"]] = Repeated.model_validate(event["repeated"])
        elif event["event"] == "phase_started":
            pending.pop(event["phase"], None)
    collecting = {phase.name for phase in phases if phase.collects}
    for name, repeated in pending.items():
        aside = run_root / repeated.folder
        left = run_root / repeated.folder.rpartition(".")[0]
        if left.is_dir() and not aside.exists():
            left.rename(aside)
        if name in collecting:
            _move_facts(run_root, aside)


def _move_facts(run_root: Path, aside: Path) -> None:
    """What the collectors wrote beside the phases' folders, which they would overwrite."""
    own = {EVENTS_FILE, RECORD_FILE, MANIFEST_FILE, *report_files().values()}
    aside.mkdir(mode=0o700, exist_ok=True)
    for path in sorted(run_root.iterdir()):
        told = path.name in own or path.name.startswith("harness_error_")
        if path.is_file() and not told and not (aside / path.name).exists():
            path.rename(aside / path.name)
