"""Heartbeat files of any trainer: who wrote them, how far they go, and where they fall silent."""

from __future__ import annotations

from pathlib import Path

from runbook.read.heartbeats import RankFold, fold_file
from runbook.tools.inspect.types import RankFacts, Remark, RemarkCode

# A rank is silent if it ends this many steps behind the others, or this long before them.
_STEPS_BEHIND = 1
_SECONDS_BEHIND = 60.0


def inspect_heartbeats(
    path: Path, *, rank: int, relative_to: Path
) -> tuple[RankFacts, list[Remark]]:
    """Read one heartbeat file, ours or foreign (`msg` for `event`, no token, no monotonic time).

    Raises OSError if the file cannot be read.
    """
    fold = RankFold(rank=rank)
    _, torn_bytes = fold_file(path, fold)
    torn = fold.dropped + bool(torn_bytes)
    name = path.relative_to(relative_to).as_posix()
    facts = RankFacts(
        rank=rank,
        path=name,
        lines=fold.events + fold.unnamed,
        torn_lines=torn,
        tokens=tuple(fold.tokens),
        pids=tuple(fold.pids),
        first_step=fold.first_step,
        last_step=fold.last_step,
        last_event=fold.event,
        exit_code=fold.exit_code,
        longest_silence_s=fold.silence_s,
        last_ts=fold.ts,
    )
    faults = [(RemarkCode.OTHER_RUN, text) for text in fold.strangers()]
    if torn:
        faults.append((RemarkCode.TORN_ROWS, f"{torn} torn or unreadable heartbeat lines"))
    if fold.steps_back:
        text = f"the step goes back at {fold.steps_back} places"
        faults.append((RemarkCode.STEPS_NOT_INCREASING, text))
    if back := fold.clock_back + fold.wall_clock_back:
        faults.append((RemarkCode.CLOCK_BACK, f"the clock goes back at {back} places"))
    if fold.exit_code:
        faults.append((RemarkCode.FAILED_EXIT, f"the rank ended with exit code {fold.exit_code}"))
    return facts, [Remark(code=code, message=text, path=name) for code, text in faults]


def rank_remarks(
    ranks: tuple[RankFacts, ...], *, world_size: int | None, tokens: frozenset[str]
) -> list[Remark]:
    """What only the files together can tell: other runs, missing ranks, ranks that fell silent."""
    remarks = []
    present = {facts.rank for facts in ranks}
    expected = set(range(world_size)) if world_size else set(range(max(present, default=-1) + 1))
    if ranks and (lost := sorted(expected - present)):
        text = f"no heartbeats of rank {', '.join(map(str, lost))}"
        remarks.append(Remark(code=RemarkCode.MISSING_RANK, message=text, path="."))
    known = {name for facts in ranks for name in facts.tokens} | tokens
    if len(known) > 1 and all(len(facts.tokens) <= 1 for facts in ranks):
        text = f"files of {len(known)} runs in one directory: {', '.join(sorted(known))}"
        remarks.append(Remark(code=RemarkCode.OTHER_RUN, message=text, path="."))
    return [*remarks, *_silent(ranks)]


def _silent(ranks: tuple[RankFacts, ...]) -> list[Remark]:
    furthest = max((facts.last_step or 0 for facts in ranks), default=0)
    latest = max((facts.last_ts or 0.0 for facts in ranks), default=0.0)
    remarks = []
    for facts in ranks:
        behind = furthest - (facts.last_step or 0)
        early = latest - facts.last_ts if facts.last_ts is not None else 0.0
        if not facts.lines:
            text = "the file holds no heartbeat"
        elif behind > _STEPS_BEHIND:
            text = f"rank {facts.rank} ends at step {facts.last_step}, another at {furthest}"
        elif early > _SECONDS_BEHIND:
            text = f"rank {facts.rank} falls silent {early:.0f} s before another"
        else:
            continue
        remarks.append(Remark(code=RemarkCode.SILENT_RANK, message=text, path=facts.path))
    return remarks
