"""What a production launch stands on: a run that was GO for the same configuration and machine.

`planned_profile` makes of that, and of the plan, the profile that everything is planned from.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from nsa.contract import NSAError
from nsa.settings import load_config
from runbook.config import PhaseSettings, Profile
from runbook.config.plan import load_plan, needing_go, with_plan, without_board
from runbook.config.settings import Settings
from runbook.config.setup import RunOptions, Setup
from runbook.engine import earlier
from runbook.engine.verify import verify_run
from runbook.errors import RunbookError, UsageError, choice_for
from runbook.files import is_file
from runbook.folder import manifest
from runbook.launch.command import resolve_config
from runbook.records import RunRecord, Verdict


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The accepted run: its id, what it said, and the variables that its phases chose.

    `parameters`: how many its model has. Without a run `run_id` is empty, and `left_out` says why
    of each run that was not taken.
    """

    run_id: str = ""
    said: str = ""
    parameters: int = 0
    chosen: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def why_not(self) -> str:
        """Why there is none, in words."""
        told = [f"{name}: {why}" for name, why in list(self.left_out.items())[: earlier.NAMED]]
        return "; ".join(told) or "no run there was GO"


def find_standing(
    out: Path,
    profile: Profile,
    settings: Settings,
    needing: Sequence[PhaseSettings] = (),
    *,
    steps_scale: float = 1.0,
) -> Standing:
    """The newest run in `out` that was GO with this configuration, on this machine and code.

    `needing`: the phases of the plan that start only behind it, with what they change themselves.
    It answered what `profile` requires, at `steps_scale` or more, and `runbook verify` finds
    nothing in it. A newer NO-GO of the same configuration leaves none, nor does a newer run that is
    damaged. A run of a plan that itself
    needs a GO is none. Raises `UsageError` if the profile's config is wrong.
    """
    wanted = [earlier.launch_of(profile, settings, phase) for phase in needing or (None,)]
    left_out: dict[str, str] = {}
    for folder in manifest.earlier_runs(out, left_out):
        try:
            document = manifest.run_document(folder)
        except manifest.DamagedRunError as error:
            # It is newer than any GO behind it, and nobody knows whether it was a NO-GO.
            return Standing(left_out={**left_out, folder.name: str(error)})
        except (RunbookError, OSError) as error:
            left_out[folder.name] = str(error)
            continue
        try:
            if not manifest.is_go(document):
                if why := _refused(folder, document, profile, wanted):
                    return Standing(left_out={**left_out, folder.name: why})
                continue
            record = manifest.valid_record(document)
            if _launched(record):
                continue
            parameters = _check(folder, record, profile, wanted, steps_scale)
        except (RunbookError, OSError) as error:
            left_out[folder.name] = str(error)
            continue
        chosen = {name: v for phase in record.phases for name, v in phase.choices.items() if v}
        return Standing(
            run_id=record.run_id, said=record.said, parameters=parameters, chosen=chosen
        )
    return Standing(left_out=left_out)


def require_standing(setup: Setup, out: Path, done: Container[str]) -> None:
    """Raise `UsageError` unless the GO that a launch began behind is there as it was.

    Asked where a launch goes on: its config and code are those that it began with, so only the GO
    can have changed. `done`: phases that have finished.
    """
    profile, names = setup.profile, list(setup.phases_by_name)
    left = [name for name in needing_go(profile, names) if name not in done]
    if not left or profile.plan is None or not profile.plan.go:
        return
    run_id, _, said = profile.plan.go.partition(": ")
    try:
        record = manifest.go_record(out / run_id)
        if record is None:
            raise manifest.DamagedRunError("it is gone, or no longer a GO")
        if record.said != said:
            raise manifest.DamagedRunError(f"it says {record.said} now, and said {said}")
        _verify(out / run_id)
    except (RunbookError, OSError) as error:
        raise UsageError(
            f"{left[0]} starts only behind a GO, and {run_id}, behind which this launch began, "
            f"is none any more: {error}",
            hint="put its folder back, or validate the machine and begin a new launch",
        ) from error


def _launched(record: RunRecord) -> bool:
    stages = (record.of_profile("phases", name, "stage") for name in record.of_profile("phases"))
    return any(stage.get("needs_go") for stage in stages)


def _refused(
    folder: Path, document: object, profile: Profile, wanted: Sequence[earlier.Wanted]
) -> str:
    """In words that the run was NO-GO for what is wanted; empty if it was not."""
    try:
        record = manifest.valid_record(document)
    except RunbookError:
        return ""
    if record.verdict is not Verdict.NO_GO or _launched(record):
        return ""
    ground = earlier.ground_of(record, profile.ranks, finished=False)
    if not ground or earlier.other_profile(record, profile):
        return ""
    if earlier.compared(folder, record, wanted, ground)[0]:
        return ""
    why = f": {record.reasons[0]}" if record.reasons else ""
    return f"this configuration was {record.said} here since{why}"


def _check(
    folder: Path,
    record: RunRecord,
    profile: Profile,
    wanted: Sequence[earlier.Wanted],
    steps_scale: float,
) -> int:
    """How many parameters it trained. Raise `RunbookError` that says in what it is another one."""
    if why := manifest.renamed(folder, record):
        raise RunbookError(why)
    if other := earlier.other_devices(record, profile):
        raise RunbookError(other)
    ground = earlier.ground_of(record, profile.ranks)
    differ, counts = earlier.compared(folder, record, wanted, ground)
    differ += earlier.less_than_asked(record, profile, steps_scale)
    if not ground:
        differ.append(f"no launch of it trained its own config on {profile.ranks} rank(s)")
    if len(counts) > 1:
        told = " and ".join(sorted(map(str, counts)))
        differ.append(f"its launches trained models of {told} parameters")
    if differ:
        raise RunbookError(", ".join(differ[: earlier.NAMED]))
    _verify(folder)
    count = counts.pop()
    return count if isinstance(count, int) else 0


def _verify(folder: Path) -> None:
    """Raise `DamagedRunError` unless all is as the run wrote it, and gives its numbers again."""
    if found := verify_run(folder).differences:
        more = f" (and {len(found) - 1} more; runbook verify tells them)" if found[1:] else ""
        raise manifest.DamagedRunError(f"{found[0]}{more}")


def planned_profile(
    options: RunOptions,
    profile: Profile,
    settings: Settings,
    run_problem: Callable[[RunOptions], str],
) -> tuple[Profile, str]:
    """The machine's profile with the plan, its config and the accepted run behind it.

    And why it must not start: a phase that needs a GO is asked for and none is found; else empty.
    `run_problem` tells why a run with such options is refused, so that no such run is proposed.
    Raises UsageError for a plan or a config that does not fit.
    """
    if own := profile.own_trainer:
        raise UsageError(
            f"plan {options.plan}: {own.name} is a trainer of your own; a plan needs the trainer's "
            "contract, by which a phase goes on from the one before"
        )
    if settings.config:
        profile = _with_workload(profile, settings.config)
    plan = without_board(load_plan(options.plan, has_gpu=profile.has_gpu))
    named = not is_file(options.plan)
    known = with_plan(profile, plan, shipped=named)
    asked = asked_for(known, options.until)
    found, refused = Standing(), ""
    if not options.without_go:
        needing = needing_go(known, asked)
        phases = [known.phases[name] for name in needing]
        found = find_standing(
            Path(options.out), profile, settings, phases, steps_scale=options.steps_scale
        )
        if not found.run_id and needing:
            whole = replace(options, plan="", steps_scale=1.0)
            given = replace(whole, settings=settings.words()).invocation()
            why = run_problem(whole).partition(": ")[0]
            first = f"a run of all phases is refused too: {why}" if why else ""
            first = first or f"first: {given.line(['all'])}"
            refused = _refusal(first, options, needing, asked, found)
    chosen = {name: v for name, v in found.chosen.items() if name not in settings.toggles}
    go = f"{found.run_id}: {found.said}" if found.run_id else ""
    planned = with_plan(
        profile, plan, shipped=named, chosen=chosen, go=go, parameters=found.parameters
    )
    return planned, refused


def _with_workload(profile: Profile, config: str) -> Profile:
    """The profile with the workload that another config trains."""
    try:
        train = load_config(resolve_config(config)).config
    except NSAError as error:
        raise UsageError([f"CONFIG={config}: {text}" for text in error.problems]) from error
    workload = profile.workload.model_copy(
        update={
            "seq_len": train.train.seq_len,
            "global_batch": train.train.batch_size,
            "accumulation": train.train.accumulate_grad_batches,
            "dtype": train.runtime.precision,
            "source": f"CONFIG={config}",
        }
    )
    return profile.model_copy(update={"workload": workload})


def asked_for(profile: Profile, until: str) -> tuple[str, ...]:
    """The plan's phases as far as `until`, all without it. Raises UsageError for an unknown one."""
    names = profile.plan.phases if profile.plan else ()
    if until and until not in names:
        raise UsageError(f"--until {until}: no such phase in the plan{choice_for(until, names)}")
    return names[: names.index(until) + 1] if until else names


def _refusal(
    first: str, options: RunOptions, needing: Sequence[str], asked: Sequence[str], found: Standing
) -> str:
    before = asked[: asked.index(needing[0])]
    ways = [first]
    ways += [f"or train only as far as {before[-1]}: add --until {before[-1]}"] if before else []
    ways.append("or start without: add --without-go (the verdict will say so)")
    return (
        f"{needing[0]} needs a GO of this configuration on this machine, and {options.out}/ has "
        f"none yet: {found.why_not}; {'; '.join(ways)}"
    )
