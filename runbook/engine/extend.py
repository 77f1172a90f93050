"""A run that goes on beyond what was asked of it: phases are added, or run again.

The journal only grows: what is added and what is repeated are events of their own, and the earlier
attempt's files are kept beside the new ones, so that a failure that went away is still seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class Extension:
    """What a finished or interrupted run is asked for besides: phases by name, or `failed` ones."""

    phases: str = ""
    failed: bool = False
    command: str = ""

    def __bool__(self) -> bool:
        return bool(self.phases) or self.failed


def extend(
    journal: Journal,
    record: RunRecord,
    wanted: Extension,
    make_setup: Callable[[RunRecord], Setup],
) -> None:
    """Write into the journal what is added and repeated. Raises `UsageError` if that is nothing."""
    before_it = make_setup(record)
    present = [phase.name for phase in before_it.phases]
    added = _added(wanted, before_it, record) if wanted.phases else []
    failed = failed_phases(record) if wanted.failed else []
    if wanted.failed and not failed:
        raise UsageError(
            f"{record.run_id} has nothing to run again: every required check that was asked for "
            "passed",
            hint="--resume RUN --phase NAME adds a phase",
        )
    before = str(record.options.get("phases") or "all")
    options = {**record.options, "phases": ",".join([before, *added])}
    setup = make_setup(record.model_copy(update={"options": options}))
    journal.append(
        "run_extended",
        sync=True,
        phases=[*present, *added],
        option=options["phases"],
        required=list(setup.required),
        command=wanted.command,
    )
    for name in failed:
        repeat(journal, next(phase for phase in record.phases if phase.name == name))


def _added(wanted: Extension, setup: Setup, record: RunRecord) -> list[str]:
    present, settings = [phase.name for phase in setup.phases], setup.profile.phases
    added = [one.name for one in select(wanted.phases, settings) if one.name not in present]
    if not added:
        raise UsageError(
            f"--phase {wanted.phases}: {record.run_id} has it already",
            hint="--failed runs again what did not pass",
        )
    plan = setup.profile.plan
    needing = needing_go(setup.profile, added)
    if needing and plan is not None and not plan.go and not setup.options.without_go:
        raise UsageError(
            f"{needing[0]} starts only behind a GO, and {record.run_id} began without one",
            hint="begin a new launch",
        )
    return added


def failed_phases(record: RunRecord) -> list[str]:
    """Phases that began and of which a required check did not pass."""
    return [
        phase.name
        for phase in record.phases
        if phase.started_at and any(_required_open(record, phase))
    ]


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


def after_an_accident(record: RunRecord) -> list[str]:
    """The phases of a plan that go on after a crash, a hang, a time limit or a refused start.

    They are the one in which a launch ended so, and those that started nothing because of it;
    none after any other end.
    """
    failed = [phase for phase in record.phases if any(_required_open(record, phase))]
    plan = record.profile_document.get("plan")
    if not isinstance(plan, Mapping) or not plan.get("stops") or not failed:
        return []
    ends = [entry.result for entry in failed[0].launches if entry.result.attempts]
    if not ends or ends[-1].status not in _ACCIDENTS:
        return []
    return [phase.name for phase in failed if phase.started_at]


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
