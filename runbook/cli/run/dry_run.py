"""`runbook run --dry-run`: the command lines, how long they may take, and what feeds what.

Every command is there in full. The overview comes last, where it is seen.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence

from runbook import DEFAULT_LAUNCHER
from runbook.config.precedence import dropped
from runbook.config.registry import Phase
from runbook.config.setup import Setup
from runbook.console import Console
from runbook.engine.plan.prepare import Needs, needs_of
from runbook.engine.plan.progress import Estimate, estimate, pace_of_the_go
from runbook.engine.scope import departures
from runbook.errors import how_many, in_one_line
from runbook.files import page
from runbook.launch.command import pasteable
from runbook.launch.launcher_api import launcher
from runbook.records import Launch
from runbook.records.measurement import duration_text

Plan = Sequence[tuple[Phase, Sequence[Launch]]]
Estimator = Callable[[Launch], Estimate]


def print_plan(args: argparse.Namespace, console: Console) -> int:
    """Print the plan; start, write and judge nothing."""
    said = args.setup.plan(), args, _estimator(args.setup), needs_of(args.setup)
    if args.json:
        console.json_document(_document(*said))
    else:
        console.page("\n".join(_lines(*said)))
    return 0


def _estimator(setup: Setup) -> Estimator:
    """What tells of a launch how long it takes: by the GO's pace, else by the profile."""
    pace = pace_of_the_go(setup)
    return lambda launch: estimate(launch, setup.profile, pace)


def times(args: argparse.Namespace) -> Iterator[str]:
    """How long each phase of a plan may take and what it costs, and all of them together."""
    return _overview(args.setup.plan(), _estimator(args.setup), args.setup)


def _lines(
    plan: Plan, args: argparse.Namespace, estimator: Estimator, needs: Needs
) -> Iterator[str]:
    """The whole answer: every command stands between comments, so that all of it can be pasted."""
    yield from map(_comment, _head(args, needs))
    for index, (phase, launches) in enumerate(plan, start=1):
        yield ""
        yield _comment(f"{index}/{len(plan)} {phase.name}: {phase.question}")
        yield from (_comment(f"  {text}") for text in _of_phase(phase, plan))
        if not launches:
            yield _comment(f"  starts no process{_why_none(phase, args.setup)}")
        groups = _alike(launches)
        if list(launches) != [launch for group in groups for launch in group]:
            yield _comment("  the commands take turns")
        for alike in groups:
            yield from (_comment(f"  {text}") for text in _of_launches(alike, estimator))
            yield _command(alike[0], args.setup)
    yield ""
    yield from map(_comment, _overview(plan, estimator, args.setup))
    if refused := refusals(args, needs):
        yield _comment(f"this would be refused ({len(refused)} above)")


def _comment(text: str) -> str:
    return in_one_line(f"# {text}")


def _why_none(phase: Phase, setup: Setup) -> str:
    """Why a phase plans no launch; empty where nothing keeps it from one."""
    why = phase.excluded(setup.context({}))
    if not why and setup.profile.own_trainer and not phase.collects:
        why = f"all that it asks needs the trainer's contract ({page('trainer-contract')})"
    return f": {why}" if why else ""


def _overview(plan: Plan, estimator: Estimator, setup: Setup) -> Iterator[str]:
    """What runs, in which order and for how long: a line for each phase, and one for all."""
    width = max(len(phase.name) for phase, _ in plan)
    for index, one in enumerate(plan, start=1):
        time = _total([one], estimator, setup) if one[1] else "starts no process"
        yield f"{index:>{len(str(len(plan)))}}/{len(plan)} {one[0].name:<{width}}  {time}"
    yield f"total   {_total(plan, estimator, setup)}"


def _head(args: argparse.Namespace, needs: Needs) -> Iterator[str]:
    """On what, by which plan, with which settings, and what stands in the way."""
    profile, standing = args.setup.profile, args.setup.standing
    yield "dry run: nothing is started, nothing is judged"
    yield f"profile  {profile.name} ({args.profile_reason})"
    if plan_note := profile.plan:
        yield f"plan     {', '.join(filter(None, (plan_note.name, standing)))}"
    if refused := refusals(args, needs):
        yield f"refused  {'; '.join(refused)}"
    yield from (f"needs    {text}" for text in needs.has)
    yield from (f"lacks    {text}" for text in needs.lacks if not profile.plan)
    if caveats := departures(profile, args.setup.settings):
        yield f"differs  {', '.join(caveats)}: the verdict's first line will say so"
    yield from (f"set      {text}" for text in args.told)
    if text := dropped(os.environ, profile.own_trainer):  # what of this shell no launch gets
        yield f"without  {text}"
    yield from (f"guard    {text}" for text in _guard(args.setup))
    yield f"folder   {args.out}/<UTC time>-<commit>/"


def _guard(setup: Setup) -> Iterator[str]:
    """Which phases have to pass before others start anything."""
    guards = [phase.name for phase in setup.phases[:-1] if phase.guards]
    if setup.stops:
        yield "each phase starts only if every required check before it passed"
    elif guards and setup.options.keep_going:
        yield "none: every launch starts (--keep-going)"
    elif guards:
        yield f"later phases start only if {', '.join(guards)} passes (else add --keep-going)"


def refusals(args: argparse.Namespace, needs: Needs) -> list[str]:
    """Why the plan would not be started; a run begins all the same, and says what it lacks."""
    lacks = needs.lacks if args.setup.profile.plan else ()
    return [text for text in (args.setup.refused, *lacks) if text]


def _alike(launches: Sequence[Launch]) -> list[list[Launch]]:
    """Launches of the same command, those that differ in their folders alone, together."""
    found: dict[tuple[str, float], list[Launch]] = {}
    for launch in launches:
        found.setdefault((pasteable(launch).lines, launch.timeout_s), []).append(launch)
    return list(found.values())


def _command(launch: Launch, setup: Setup) -> str:
    """What a person types to start the launch as the run does."""
    return launcher(setup.options.launcher).printed(launch, setup)


def _of_launches(alike: Sequence[Launch], estimator: Estimator) -> Iterator[str]:
    """What a command that is told once is for, and how often and under which names it runs."""
    launch, others = alike[0], alike[1:]
    yield f"{launch.name}: {launch.purpose}" if launch.purpose else launch.name
    if others:
        last = f" to {others[-1].name}" if len(others) > 1 else ""
        asked = sum(one.conditional for one in others)
        needed = f", {asked} of them only if they are needed" if asked else ""
        again = "again" if len(others) == 1 else f"{len(others)} times more"
        yield f"{again}: {others[0].name}{last}{needed}"
    yield f"{estimator(launch).text}; stopped after {duration_text(launch.timeout_s)}"
    yield from pasteable(launch).notes


def _of_phase(phase: Phase, plan: Plan) -> Iterator[str]:
    """Its source, what it takes from others, and which others take from it."""
    running = {other.name for other, _ in plan}
    yield f"source  {phase.source}"
    if taken := [name for name in phase.reads if name in running]:
        yield f"uses    {', '.join(taken)} (what it chose or measured)"
    if absent := [name for name in phase.reads if name not in running]:
        yield f"without {', '.join(absent)} (not in this run)"
    if readers := [other.name for other, _ in plan if phase.name in other.reads]:
        yield f"feeds   {', '.join(readers)}"
    if phase.collects:
        yield "collects facts about the checkout, torch, GPUs, disk, ports and processes"


def _total(plan: Plan, estimator: Estimator, setup: Setup) -> str:
    """How many launches, how long they may take, and what that costs if a price is given."""
    estimates = [estimator(launch) for _, launches in plan for launch in launches]
    count = how_many(len(estimates), "launch", "launches")
    limit = duration_text(sum(launch.timeout_s for _, launches in plan for launch in launches))
    known = [estimate.seconds for estimate in estimates if estimate.seconds is not None]
    if not known:
        return f"{count}, at most {limit}"
    missing = len(estimates) - len(known)
    without = f" not counting the {missing} without an estimate" if missing else ""
    price, cost = setup.options.gpu_hour_price, ""
    if price is not None:
        spent = setup.profile.cost(sum(known), price)
        cost = f", cost about {spent:.2f} at {price:g} per GPU hour"
    return f"{count}, about {duration_text(sum(known))}{without}{cost}, at most {limit}"


def _document(
    plan: Plan, args: argparse.Namespace, estimator: Estimator, needs: Needs
) -> dict[str, object]:
    return {
        "schema_version": 1,
        "dry_run": True,
        "profile": args.options.profile,
        "profile_reason": args.profile_reason,
        "caveats": departures(args.setup.profile, args.setup.settings),
        "refused": refusals(args, needs),
        "lacks": list(needs.lacks),
        "needs": list(needs.has),
        "settings": args.setup.settings.texts(),
        "sources": args.setup.sources,
        "out_dir": str(args.out),
        "phases": [
            {
                "name": phase.name,
                "question": phase.question,
                "source": phase.source,
                "reads": list(phase.reads),
                "collects": phase.collects,
                "launches": [_launch_document(one, estimator, args.setup) for one in launches],
            }
            for phase, launches in plan
        ],
    }


def _launch_document(launch: Launch, estimator: Estimator, setup: Setup) -> dict[str, object]:
    alone = setup.options.launcher == DEFAULT_LAUNCHER
    found = estimator(launch)
    return {
        **launch.model_dump(mode="json"),
        "command": pasteable(launch).line if alone else _command(launch, setup),
        "notes": list(pasteable(launch).notes),
        "estimate_s": found.seconds,
        "estimate": found.text,
    }
