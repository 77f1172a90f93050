"""Rows of checkpoints: is there room, is writing fast enough, and does a resumed launch go on?"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import NamedTuple

from nsa.contract import checkpoint_step
from phases.kit import CHECKPOINTS_KEPT, RESUMED_TOLERANCE
from phases.kit.case import Case
from phases.kit.finding import (
    Finding,
    ending,
    failed,
    in_a_row,
    incomplete,
    inconclusive,
    invalid,
    missing,
    passed,
)
from phases.kit.measure import against, derived, log_value, rank_value
from phases.training.plausible import alike, other_checkpoint
from runbook.accounts.first_weights import DISK_MARGIN, checkpoint_gib
from runbook.records import Outcome, Reason
from runbook.records.evidence import LaunchEvidence, RankLog
from runbook.stats.throughput import step_times


def storage(case: Case, names: Sequence[str]) -> Finding:
    """PASS if what is free where the run writes holds every checkpoint of the production run."""
    free = case.known("disk.free_gib")
    parameters = (case.env(names[0]).get("effective") or {}).get("n_params")
    if not parameters:
        raise missing(f"{names[0]}: env.json does not say how many parameters it trains")
    size = checkpoint_gib(parameters)
    count = CHECKPOINTS_KEPT
    needed = count * size * DISK_MARGIN
    value = derived(free, name="disk_free", unit="GiB")
    text = (
        f"{float(free.value):.1f} GiB free, {count} checkpoints of {size:.2f} GiB "
        f"(12 bytes a parameter) need {needed:.1f} GiB with a margin of {DISK_MARGIN - 1:.0%}"
    )
    if float(free.value) >= needed:
        return passed(text, measurement=value)
    return invalid(Reason.WRONG_ENVIRONMENT, text, measurement=value, topic="disk")


def checkpoint_time(case: Case, names: Sequence[str]) -> Finding:
    """The time of writing a checkpoint, as a share of the steps between two of production's."""

    written = [(name, rank) for name in names for rank in case.completed(name).ranks]
    slow = max(
        ((_slowest(rank), name, rank) for name, rank in written if rank.checkpoints),
        key=lambda one: one[0],
        default=None,
    )
    if slow is None:
        raise missing(f"{', '.join(names)} wrote no checkpoint")
    seconds, name, rank = slow
    every = _save_every(case, name)
    between = every * statistics.median(step_times(case.log(name)).tolist())
    share = seconds / (seconds + between)
    base = rank_value(rank, "checkpoint_write", seconds, "s")
    value = derived(base, name="checkpoint_share", value=share, unit="", n=len(rank.checkpoints))
    text = f"{seconds:.2f} s to write a checkpoint ({name}, rank {rank.rank}), every {every} steps"
    return against(value, case.limit("checkpoint_share"), text)


def resumed(case: Case, first: str, others: Sequence[str]) -> Finding:
    """PASS if launches from checkpoints train the same steps as `first` to the same numbers.

    On a CPU bit for bit; on a GPU, whose sums are in no fixed order, within the rounding. What a
    launch that is stopped trains beyond the last step of `first` has nothing to be held against.
    """
    before = case.log(first)
    apart = [_apart(case, first, second) for second in others]
    compared = [step for one in apart for step in one.steps]
    largest = max((one.largest for one in apart), default=0.0)
    after = case.log(others[-1])
    base = log_value(after, "loss_last", float(after.frame["loss"].iloc[-1]), "nats")
    also = [log_value(before, "loss", 0.0, "nats")]
    value = derived(base, name="resumed_loss", value=largest, unit="", also=also)
    took = [_slowest(rank) for rank in case.completed(first).ranks if rank.checkpoints]
    told = f"; the checkpoint took {max(took):.2f} s to write" if took else ""
    if problems := [text for one in apart for text in one.problems]:
        return failed(Reason.MISMATCH, in_a_row(problems), measurement=value, topic="resume")
    how = "bit for bit" if largest == 0.0 else f"within {largest:.2g}"
    steps = f"{compared[0]} to {compared[-1]}"
    saved = sum(one.saves for one in apart)
    same = f" and {saved} checkpoint(s) of one content" if saved else ""
    return passed(f"steps {steps} give the same losses{same}, {how}{told}", measurement=value)


class _Apart(NamedTuple):
    """Two launches' common steps: how far the losses are apart, what differs, equal checkpoints."""

    steps: Sequence[int]
    largest: float
    problems: Sequence[str]
    saves: int


def _apart(case: Case, first: str, second: str) -> _Apart:
    """How `second` does the steps of `first`. Raises a finding where it did others."""
    before, after, launch = case.log(first), case.log(second), case.launch(second)
    if other := other_checkpoint(launch, case.env(second)) or _other_end(case, launch):
        return _Apart([launch.after], largest=0.0, problems=[f"{second}: {other}"], saves=0)
    unlike = alike(case, [first, second])
    if launch.launch.stop is not None and unlike.outcome is not Outcome.PASS:
        raise unlike
    both = before.frame.merge(after.frame, on="step", suffixes=("", "_again"))
    begun, done = launch.after, after.frame["step"].tolist()
    last = launch.launch.steps if launch.launch.stop is None else begun + len(done)
    wanted = list(range(begun + 1, last + 1))
    common = [step for step in wanted if step <= int(before.frame["step"].iloc[-1])]
    if done != wanted or both["step"].tolist() != common or not common:
        reason = f"{second} trained other steps than {begun + 1} to {last} of {first}"
        raise invalid(Reason.MISMATCH, reason, evidence=(before.path, after.path))
    apart = (both["loss_again"] / both["loss"] - 1.0).abs()
    allowed = RESUMED_TOLERANCE if case.profile.has_gpu else 0.0
    at = f"{second} goes on from step {begun}, and"
    problems = [f"{at} {text}" for text in _other_data(case.launch(first), launch)]
    if (apart > allowed).any():
        step = int(both["step"][apart > allowed].iloc[0])
        far = f"it differs by up to {apart.max():.3g} of it, allowed {allowed:g}"
        problems.append(f"{at} from step {step} its loss is not {first}'s: {far}")
    for column in ("lr",) if case.profile.has_gpu else ("lr", "grad_norm"):
        changed = both[column] != both[f"{column}_again"]
        if changed.any():
            row = both[changed].iloc[0]
            told = f"{row[f'{column}_again']:.7g}, in {first} {row[column]:.7g}"
            problems.append(f"{at} its {column} at step {int(row['step'])} is {told}")
    one, again = _saved(case.launch(first)), _saved(launch)
    known = [step for step in one if one[step] and again.get(step) and not case.profile.has_gpu]
    # A checkpoint has its step's validation loss; a launch that is told to end leaves it out.
    owed = _evaluated(case.launch(first)) ^ _evaluated(launch)
    known = [step for step in known if step not in owed]
    differ = [step for step in known if one[step] != again[step]]
    if differ and not problems:
        problems.append(
            f"{at} its checkpoints of steps {', '.join(map(str, differ))} hold something else than "
            f"those of {first} (weights, optimizer, random states, scaler or places in the data)"
        )
    saves = len(known) - len(differ)
    return _Apart(common, largest=float(apart.max()), problems=problems, saves=saves)


def _other_end(case: Case, launch: LaunchEvidence) -> str:
    """A launch that goes on from where another one was stopped begins there."""
    if launch.launch.after or not launch.launch.resumes:
        return ""
    ended = int(case.log(launch.launch.resumes).frame["step"].iloc[-1])
    if launch.after == ended:
        return ""
    before = launch.launch.resumes
    return f"it goes on from step {launch.after}, and {before} was stopped after step {ended}"


def _other_data(first: LaunchEvidence, second: LaunchEvidence) -> Iterator[str]:
    """The first step of each rank in which it read something else than in the other launch."""
    there = {rank.rank: rank.steps for rank in first.ranks}
    for rank in second.ranks:
        wanted = there.get(rank.rank)
        if wanted is None or rank.steps is None:
            continue
        both = wanted[["step", "data"]].merge(rank.steps[["step", "data"]], on="step")
        other = both["step"][both["data_x"] != both["data_y"]]
        if len(other):
            step, name = int(other.iloc[0]), first.launch.name
            yield f"at step {step} rank {rank.rank} reads other data than in {name}"


def _saved(launch: LaunchEvidence) -> dict[int, object]:
    """The digests of the checkpoints that rank 0 says were written, by step."""
    told = launch.ranks[0].checkpoints if launch.ranks else ()
    steps = [checkpoint_step(PurePath(str(one.get("path"))).name) for one in told]
    digests = [one.get("sha256") for one in told]
    return {step: sha for step, sha in zip(steps, digests, strict=True) if step is not None}


def _evaluated(launch: LaunchEvidence) -> set[int]:
    """The steps that rank 0 says it evaluated after."""
    told = launch.ranks[0].evaluations if launch.ranks else ()
    return {int(one["step"]) for one in told if one.get("step") is not None}


def stopped(case: Case, names: Sequence[str]) -> Finding:
    """PASS if each of these launches ended at once when it was told to, and saved where it was."""
    problems, paths, last = [], [], None
    for name in names:
        launch = case.launch(name)
        end = ending(launch)
        if found := _not_at_once(launch, lag=int(case.profile.has_gpu)):
            problems.append(f"{name}: {found}")
        elif end.outcome is not Outcome.PASS:
            return end
        elif launch.result.stopped is None:
            reason = f"{name} ended by itself before it could be told to"
            return inconclusive(Reason.TOO_FEW_SAMPLES, reason, evidence=end.evidence)
        paths += [rank.path for rank in launch.ranks]
        last = launch
    if problems:
        return failed(Reason.MISMATCH, in_a_row(problems), evidence=paths, topic="stopping")
    if last is None or not last.ranks:
        raise missing(f"no heartbeats of {', '.join(names)}")
    value = rank_value(last.ranks[0], "stopped", float(last.ranks[0].last_step or 0), "")
    text = "; ".join(
        f"{name}: {stop.by} after step {case.launch(name).ranks[0].last_step}, exit code "
        f"{stop.code}, with a checkpoint"
        for name in names
        if (stop := case.launch(name).launch.stop)
    )
    return passed(text, measurement=value, evidence=paths)


def _not_at_once(launch: LaunchEvidence, *, lag: int) -> str:
    """How a launch that was told to stop did otherwise. `lag`: steps that a GPU is behind."""
    stop, told = launch.launch.stop, launch.result.stopped
    if stop is None or told is None:
        return ""
    steps = max((rank.last_step or 0 for rank in launch.ranks), default=0)
    at = f"{stop.by} came at step {told.step}"
    exits = launch.result.ranks
    others = [f"rank {one.rank} with {one.code}" for one in exits if one.code != stop.code]
    if others or len(exits) != launch.launch.nproc:
        ends = ", ".join(others) or "a rank without a word"
        return f"{at}, and it ended after step {steps}, {ends}; {stop.code} was due"
    # The one under way may have looked already; the next one has to see it.
    most = 2 + lag
    for rank in launch.ranks:
        if told.mono is None or rank.steps is None:
            continue
        ended = int((rank.steps["mono"] > told.mono).sum())
        if ended > most:
            return f"{at}, and rank {rank.rank} ended {ended} more steps; at most {most} may"
    saved = list(_saved(launch))
    if steps not in saved:
        newest = f"the newest is of step {saved[-1]}" if saved else "it wrote none"
        return f"{at} and left no checkpoint of step {steps}, its last; {newest}"
    return ""


def _slowest(rank: RankLog) -> float:
    return max(float(one.get("seconds") or 0.0) for one in rank.checkpoints)


def _save_every(case: Case, name: str) -> int:
    """Steps between two checkpoints of production, as its config has them."""
    if case.profile.plan is None:
        raise incomplete(Reason.NOT_RUN, "no plan says how often one is written")
    for other in case.profile.plan.phases:
        settings = case.profile.phases[other]
        if settings.stage is not None and settings.stage.needs_go:
            return max(1, settings.steps // settings.stage.legs)
    return int(((case.env(name).get("config") or {}).get("train") or {}).get("save_every") or 0)
