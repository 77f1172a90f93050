"""An inspection as text for a reader."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from runbook.errors import UsageError
from runbook.read.documents import read_json_object
from runbook.records.measurement import plain_number
from runbook.tools.inspect.heartbeats import inspect_heartbeats, rank_remarks
from runbook.tools.inspect.training import inspect_training
from runbook.tools.inspect.types import (
    Inspection,
    RankFacts,
    Remark,
    RemarkCode,
    RowsFacts,
    RunDirectory,
    Statistic,
)

_HEARTBEAT = re.compile(r"^heartbeat_rank(\d+)\.jsonl$")
_DEEPEST = 6
_BYTES = 256


def inspect_path(path: Path, *, loss_floor: float | None = None) -> Inspection:
    """Judge a directory, or one CSV file, without changing anything in it.

    Directories below it that hold rows or heartbeats count too; links are not followed.
    `loss_floor` in nats overrides the one from env.json; minus infinity means none. Without
    either, a file in the older form is held against ln(256), the floor of uniform bytes.
    Raises UsageError if there is no such path.
    """
    if not path.exists():
        raise UsageError(f"no such directory: {path}", hint="name a run's directory")
    if path.is_file():
        found = [_inspect_one(path.parent, root=path.parent, csv=path, floor=loss_floor)]
    else:
        found = [
            _inspect_one(folder, root=path, csv=None, floor=loss_floor)
            for folder in _run_directories(path)
        ]
    remarks = [remark for one in found for remark in one.remarks]
    if not found:
        text = "no training.csv and no heartbeat_rank*.jsonl here or below"
        remarks.append(Remark(code=RemarkCode.NOTHING_FOUND, message=text, path="."))
    return Inspection(path=str(path), directories=tuple(found), remarks=tuple(remarks))


def _run_directories(root: Path, depth: int = 0) -> Iterator[Path]:
    names = sorted(root.iterdir())
    if any(entry.name == "training.csv" or _HEARTBEAT.match(entry.name) for entry in names):
        yield root
    for entry in names:
        if depth < _DEEPEST and entry.is_dir() and not entry.is_symlink():
            yield from _run_directories(entry, depth + 1)


def _inspect_one(
    folder: Path, *, root: Path, csv: Path | None, floor: float | None
) -> RunDirectory:
    problems: list[str] = []
    env, _ = read_json_object(folder / "env.json", problems)
    launch, _ = read_json_object(folder / "launch.json", problems)
    place = folder.relative_to(root).as_posix()
    remarks = [Remark(code=RemarkCode.UNREADABLE, message=text, path=place) for text in problems]
    if csv is None and (folder / ".HALT").exists():
        text = "a .HALT file: the run was stopped, or a stale one is left"
        remarks.append(Remark(code=RemarkCode.HALTED, message=text, path=f"{place}/.HALT"))
    world_size = _whole((env or {}).get("world_size"))
    ranks, found = _ranks(folder, root, skip=csv is not None)
    remarks += found
    named = {_text((document or {}).get("run_token")) for document in (env, launch)}
    tokens = frozenset(token for token in named if token)
    remarks += rank_remarks(ranks, world_size=world_size, tokens=tokens)
    training, limit, source, found = _training(folder, root, csv=csv, env=env, floor=floor)
    remarks += found
    remarks += _agreement(training, ranks)
    return RunDirectory(
        path=place,
        training=training,
        ranks=ranks,
        world_size=world_size,
        loss_floor=limit,
        loss_floor_source=source,
        remarks=tuple(remarks),
    )


def _ranks(folder: Path, root: Path, *, skip: bool) -> tuple[tuple[RankFacts, ...], list[Remark]]:
    if skip:
        return (), []
    facts, remarks = [], []
    for entry in sorted(folder.iterdir()):
        if (match := _HEARTBEAT.match(entry.name)) and entry.is_file():
            one, found = inspect_heartbeats(entry, rank=int(match.group(1)), relative_to=root)
            facts.append(one)
            remarks += found
    return tuple(sorted(facts, key=lambda one: one.rank)), remarks


def _training(
    folder: Path,
    root: Path,
    *,
    csv: Path | None,
    env: Mapping[str, Any] | None,
    floor: float | None,
) -> tuple[RowsFacts | None, float | None, str, list[Remark]]:
    limit, source = _floor(env, floor)
    path = csv or folder / "training.csv"
    if not path.is_file():
        name = path.relative_to(root).as_posix()
        text = "heartbeats, but no training.csv: nothing can be measured"
        return (
            None,
            limit,
            source,
            [Remark(code=RemarkCode.WINDOW_TOO_SHORT, message=text, path=name)],
        )
    facts, remarks = inspect_training(path, relative_to=root, floor=limit, floor_source=source)
    return facts, limit, source, remarks


def _floor(env: Mapping[str, Any] | None, given: float | None) -> tuple[float | None, str]:
    if given is not None:
        return (given, "--loss-floor") if math.isfinite(given) else (None, "--loss-floor none")
    if env is None:
        source = "ln 256, the floor of uniform bytes; no env.json says what the data was"
        return math.log(_BYTES), source
    effective = env.get("effective")
    if not isinstance(effective, dict) or not isinstance(effective.get("loss_floor"), int | float):
        return None, "env.json names no floor"
    return float(effective["loss_floor"]), str(effective.get("loss_floor_source") or "env.json")


def _agreement(training: RowsFacts | None, ranks: tuple[RankFacts, ...]) -> list[Remark]:
    """Rows and heartbeats of one run end at the same step, give or take one logging interval."""
    if training is None or not training.segments:
        return []
    last = training.segments[-1]
    remarks = []
    for facts in ranks:
        if facts.last_step is not None and abs(facts.last_step - last.last_step) > last.every:
            text = (
                f"the rows end at step {last.last_step}, "
                f"the heartbeats of rank {facts.rank} at step {facts.last_step}"
            )
            remark = Remark(code=RemarkCode.ROWS_AND_HEARTBEATS, message=text, path=facts.path)
            remarks.append(remark)
    return remarks


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def inspection_text(inspection: Inspection) -> str:
    """What was found, what it measures, and what is suspicious about it."""
    lines: list[str] = []
    for one in inspection.directories:
        lines += [*_directory(inspection.path, one), ""]
    suspicious = [remark for remark in inspection.remarks if remark.suspicious]
    undecided = [remark for remark in inspection.remarks if not remark.suspicious]
    for title, remarks in (("suspicious", suspicious), ("too little to say", undecided)):
        if remarks:
            width = max(len(remark.code) for remark in remarks)
            lines.append(title)
            lines += [f"  {one.code:<{width}}  {one.path}: {one.message}" for one in remarks]
    lines.append(_conclusion(len(suspicious), len(undecided)))
    return "\n".join(lines)


def _conclusion(suspicious: int, undecided: int) -> str:
    if suspicious:
        things = "thing" if suspicious == 1 else "things"
        return f"{suspicious} suspicious {things}: do not quote a number of this without it"
    if undecided:
        return "nothing suspicious, but too little evidence for the runbook's statistic"
    return "nothing suspicious"


def _directory(root: str, one: RunDirectory) -> list[str]:
    lines = [root if one.path == "." else f"{root.rstrip('/')}/{one.path}"]
    if one.training:
        lines += _rows(one.training)
    lines += [f"  {_rank(facts)}" for facts in one.ranks]
    return lines


def _rows(facts: RowsFacts) -> list[str]:
    form = "no header, step,loss,lr,toks_per_s" if facts.legacy else "with header"
    name = facts.path.rpartition("/")[2]
    runs = f"{len(facts.segments)} run{'' if len(facts.segments) == 1 else 's'}"
    dropped = f", {facts.dropped_rows} dropped" if facts.dropped_rows else ""
    lines = [f"  {name}  {form}; {facts.rows} rows{dropped}, {runs}; sha256 {facts.sha256[:12]}"]
    for one in facts.segments[:12]:
        every = f", one per {one.every} steps" if one.every > 1 else ""
        arms = f", arms {', '.join(one.arms)}" if one.arms else ""
        lines.append(
            f"    run {one.index}  steps {one.first_step}-{one.last_step}  {one.rows} rows{every}"
            f", {one.warmup_rows} of them warm-up{arms}"
        )
    if len(facts.segments) > 12:
        lines.append(f"    and {len(facts.segments) - 12} more")
    lines += [f"    {_statistic(one)}" for one in facts.statistics]
    lines.append(
        f"    usable rows in the last 50 steps of the last run: {facts.window_steps_available}"
    )
    return lines


def _statistic(one: Statistic) -> str:
    spread = f" +- {plain_number(one.stdev)}" if one.stdev is not None else ""
    runs = f" of {one.runs} runs" if one.runs > 1 else ""
    note = f"; {one.note}" if one.note else ""
    return (
        f"{one.name}  {plain_number(one.value)}{spread} {one.unit} "
        f"(n={one.n}, steps {one.first_step}-{one.last_step}{runs}{note})"
    )


def _rank(facts: RankFacts) -> str:
    steps = f"steps {facts.first_step}-{facts.last_step}" if facts.last_step is not None else ""
    silence = (
        f"longest silence {facts.longest_silence_s:.3g} s"
        if facts.longest_silence_s is not None
        else ""
    )
    code = f"exit code {facts.exit_code}" if facts.exit_code is not None else ""
    ended = f"last line {facts.last_event!r}" if facts.last_event else ""
    name = facts.path.rpartition("/")[2]
    parts = [f"{facts.lines} lines", steps, silence, ended, code]
    return f"{name}  {', '.join(part for part in parts if part)}"
