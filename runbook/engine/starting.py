"""Before a phase or a launch starts, or starts again: may it, and from which checkpoint.

A run that goes on beyond what was asked of it gets phases more, or runs some again: the journal
only grows, what is added and what is repeated are events of their own, and the earlier attempt's
files are kept beside the new ones, so that a failure that went away is still seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from nsa.contract import HEARTBEATS, checkpoint_step
from nsa.contract.digests import damage, identity_of
from runbook.config.plan import needing_go
from runbook.config.registry import Phase, report_files, select
from runbook.config.setup import setup_of_record
from runbook.errors import RunbookError, UsageError, listed
from runbook.folder import EVENTS_FILE, MANIFEST_FILE, RECORD_FILE, Journal
from runbook.records import (
    Begun,
    Launch,
    LaunchEntry,
    LaunchResult,
    LaunchStatus,
    PhaseRecord,
    RunRecord,
    satisfies,
)
from runbook.records.run import Repeated

# Ends that say nothing about the next start of the same command are not among them: a time limit, a
# signal from outside.
_REPEATABLE = (
    LaunchStatus.CRASHED,
    LaunchStatus.HUNG,
    LaunchStatus.NON_FINITE,
    LaunchStatus.OUT_OF_MEMORY,
)
_TWICE = 2


def not_run(cause: str, *, follows: str) -> LaunchResult:
    """The result of a launch that is not started; `follows` as in `LaunchResult`."""
    return LaunchResult(status=LaunchStatus.NOT_RUN, attempts=0, cause=cause, follows=follows)


def held_back(record: PhaseRecord, *, always: bool) -> LaunchResult | None:
    """What becomes of every launch after this phase, unless all its required checks are satisfied.

    One without an answer holds back like one that is wrong: no number after it can lead to a GO.
    `always`: nothing switches it off, as where a plan stops; else the cause names the option.
    """
    wrong = [check for check in record.checks if check.required and not satisfies(check)]
    if not wrong:
        return None
    worst = min(wrong, key=lambda check: check.outcome.rank)
    others = [check.id for check in wrong if check is not worst]
    more = f" (and {listed(others)})" if others else ""
    way = "" if always else "; see --keep-going"
    cause = f"{worst.id} is {worst.outcome}: {worst.reason}{more}{way}"
    return not_run(cause, follows=worst.id)


def known_end(launch: Launch, entries: Sequence[LaunchEntry]) -> LaunchResult | None:
    """Why this launch of a phase is not started, if the earlier ones leave no doubt; else None.

    A machine that cannot run the trainer refuses every launch, and a config each launch of its
    kind. A fault of the same command comes again; only a signal or a hang may have been an
    accident, and has to come twice. A launch that hung was tried twice by itself.
    """
    for entry in entries:
        if entry.launch.name == launch.resumes and not entry.result.ok:
            cause = f"it goes on from {launch.resumes}, which did not finish"
            return not_run(cause, follows=entry.result.follows or entry.launch.id)
    for entry in entries:
        refused = entry.result.status is LaunchStatus.ENVIRONMENT_ERROR
        if refused or (entry.result.could_not_start and _same(entry.launch, launch)):
            cause = f"{entry.launch.name} was refused: {entry.result.cause}"
            return not_run(cause, follows=entry.launch.id)
    ended = [
        entry
        for entry in entries
        if entry.result.status in _REPEATABLE and _same(entry.launch, launch)
    ]
    for entry in ended:
        place, result = _place(entry.result.cause), entry.result
        alike = [one.result for one in ended if _place(one.result.cause) == place]
        # A hang is tried again, and it hung both times.
        times = sum(one.attempts if one.status is LaunchStatus.HUNG else 1 for one in alike)
        killed = any(rank.signal for rank in result.ranks if rank.rank == result.culprit_rank)
        if times >= (_TWICE if killed or result.status is LaunchStatus.HUNG else 1):
            named = entry.launch.name if entry.launch.phase == launch.phase else entry.launch.id
            cause = f"{named} is the same command and ended badly ({place})"
            return not_run(f"{cause}; see --keep-going", follows=entry.launch.id)
    return None


def _same(first: Launch, second: Launch) -> bool:
    """Does the same command start, apart from where it writes?

    Of a trainer of one's own, phases differ in how many steps it takes alone.
    """
    if first.own is not None and first.own == second.own:
        return (first.env, first.nproc) == (second.env, second.nproc)
    one, other = (
        (launch.words(), launch.env, launch.nproc, launch.commit) for launch in (first, second)
    )
    return one == other


def _place(cause: str) -> str:
    """The cause without the rank, which is a matter of who was first."""
    return re.sub(r"\brank \d+\b", "a rank", cause)


# What stands in the record where a signal's name would. A run that ended so is INCOMPLETE, and no
# signal's number is its exit code.
PREEMPTION = "the pre-emption of its trainer"


def begin_at(run_root: Path, launch: Launch) -> Begun | None:
    """Where a launch that resumes another one of its phase begins.

    At that one's end (`Launch.after`, or the newest that it wrote), so that its own steps are all
    in its own files; where this checkpoint is damaged or is not the one that was written there, at
    the newest other one of the phase, one that a cut-off attempt saved included. None where the
    trainer told no digest of what it wrote.
    Raises `RunbookError` that names what is wrong with each if none is left.
    """
    told = [one for one in _told(run_root, launch) if one.step < launch.steps]
    before = f"{launch.phase}/{launch.resumes}/"
    end = launch.after or max((one.step for one in told if one.path.startswith(before)), default=0)
    refused: list[str] = []
    for one in sorted(
        told,
        key=lambda one: (one.path.startswith(before) and one.step == end, one.step),
        reverse=True,
    ):
        wrong = _wrong(run_root / one.path, one.sha256)
        if wrong is None:
            return one.model_copy(update={"refused": tuple(refused)})
        refused.append(f"{one.path}: {wrong}")
    if refused:
        raise RunbookError(f"no checkpoint of this run is left: {'; '.join(refused)}")
    return None


def _told(run_root: Path, launch: Launch) -> Iterator[Begun]:
    """The checkpoints that launches of the phase say they wrote, moved attempts included."""
    from runbook.folder.launch.rank_log import read_heartbeats

    phase = run_root / launch.phase
    for folder in sorted(phase.iterdir() if phase.is_dir() else ()):
        path = folder / HEARTBEATS.name(0)
        if not path.is_file():
            continue
        for told in read_heartbeats(path, rank=0, relative_to=run_root).checkpoints:
            place, digest = str(told.get("path")), told.get("sha256")
            step = checkpoint_step(Path(place).name)
            if step is not None and isinstance(digest, str):
                where = f"{launch.phase}/{folder.name}/{place}"
                yield Begun(path=where, step=step, sha256=digest)


def _wrong(folder: Path, digest: str) -> str | None:
    try:
        if identity_of(folder) != digest:
            return "is not the checkpoint that was written there (its digest is another one)"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return damage(folder)


_WORD = "repeated"


def extend(journal: Journal, record: RunRecord, wanted: str, command: str) -> None:
    """Write into the journal which phases are added. Raises `UsageError` if that is none."""
    setup = setup_of_record(record)
    chosen = select(wanted, setup.profile.phases)
    added = [one.name for one in chosen if one.name not in setup.phases_by_name]
    if not added:
        raise UsageError(f"--phase {wanted}: {record.run_id} has it already")
    plan, needing = setup.profile.plan, needing_go(setup.profile, added)
    if needing and plan is not None and not plan.go and not setup.options.without_go:
        raise UsageError(
            f"{needing[0]} starts only behind a GO, and {record.run_id} began without one",
            hint="begin a new launch",
        )
    option = ",".join([str(record.options.get("phases") or "all"), *added])
    longer = record.model_copy(update={"options": {**record.options, "phases": option}})
    journal.append(
        "run_extended",
        sync=True,
        phases=[*setup.phases_by_name, *added],
        option=option,
        required=list(setup_of_record(longer).required),
        command=command,
    )


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
    return bool(record.of_profile("plan").get("stops"))


def left_open(record: RunRecord) -> list[str]:
    """The phases that run again where a finished run goes on: those with a required check open.

    A plan goes on only after a crash, a hang, a time limit or a refused start: with the phase in
    which a launch ended so, and those that started nothing because of it.
    """
    required = set(record.required)
    open_ones = {one.phase for one in record.checks() if one.id in required and not satisfies(one)}
    found = [one for one in record.phases if one.started_at and one.name in open_ones]
    if found and follows_plan(record):
        ends = [entry.result for entry in found[0].launches if entry.result.attempts]
        if not ends or ends[-1].status not in _ACCIDENTS:
            return []
    return [phase.name for phase in found]


def repeat(journal: Journal, before: PhaseRecord, *, only_unfinished: bool = False) -> None:
    """Write into the journal that a phase runs again, and how it ended before.

    `only_unfinished`: its launches that finished stay, and it goes on after them.
    """
    kept = [one.launch.name for one in before.launches if one.result.ok and only_unfinished]
    ended = [one.launch for one in before.launches if one.result.attempts]
    worst = min(before.checks, key=lambda check: check.outcome.rank, default=None)
    folder = ended[-1].run_dir if kept else before.name
    number = 1 + len(before.repeated)
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
