"""Every run directory below a path: its rows, the heartbeats of its ranks, and what they show.

What the launcher had planned is no fault: a stop, or a few steps only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nsa.contract import ENV_JSON, GATES_CSV, HALT_FILE, TRAINING_CSV, VAL_CSV
from runbook.errors import UsageError, listed
from runbook.folder import LAUNCH_JSON, OWN_FOLDER, RESULT_JSON
from runbook.folder.launch import heartbeat_files, whole_number
from runbook.folder.launch.documents import launch_result, name_below, read_json_object
from runbook.folder.launch.evidence import GATES, VAL
from runbook.folder.launch.rank_log import RankLines, rank_log
from runbook.folder.launch.rows import RowSpec, read_rows
from runbook.records import Launch, LaunchResult, Stop
from runbook.records.evidence import Frame, RankLog, TrainingLog
from runbook.tools.inspect import (
    Inspection,
    RankFacts,
    Remark,
    RemarkCode,
    RowsFacts,
    RunDirectory,
    remarks_on,
)
from runbook.tools.inspect.training import account_remarks, inspect_training

_DEEPEST = 6
# A rank is silent if it ends this many steps behind the others, or this long before them.
_STEPS_BEHIND = 1
_SECONDS_BEHIND = 60.0


def inspect_path(path: Path) -> Inspection:
    """Judge a directory, or one CSV file, without changing anything in it.

    Directories below it that hold rows or heartbeats count too; links are not followed. The floor
    of the loss is that of env.json; without one nothing is known of it.
    Raises UsageError if there is no such path.
    """
    if not path.exists():
        raise UsageError(f"no such directory: {path}", hint="name a run's directory")
    if path.is_file():
        found = [_inspect_one(path.parent, root=path.parent, csv=path)]
    elif not path.is_dir():
        raise UsageError(
            f"{path} is a pipe or a device", hint="name a run's directory, or save it as a file"
        )
    else:
        found = [_inspect_one(folder, root=path, csv=None) for folder in _run_directories(path)]
    directories = tuple(directory for directory, _ in found)
    remarks = [one for _, said in found for one in said]
    if not found:
        names = sorted(entry.name for entry in path.iterdir())
        text = (
            "no training.csv and no heartbeat_rank*.jsonl here or below (a trainer of your own has "
            f"none: its run's report has its numbers); it holds {listed(names) or 'nothing'}"
        )
        remarks += remarks_on(str(path), [(RemarkCode.NOTHING_FOUND, text)])
    for own in sorted(path.rglob(OWN_FOLDER)) if found else ():
        if (own.parent / LAUNCH_JSON).is_file():
            text = "of a trainer of your own, not read here: its run's report has its numbers"
            name = own.relative_to(path).as_posix()
            remarks += remarks_on(name, [(RemarkCode.NOTHING_FOUND, text)])
    return Inspection(path=str(path), directories=directories, remarks=tuple(remarks))


def _run_directories(root: Path, depth: int = 0) -> Iterator[Path]:
    if (root / TRAINING_CSV).exists() or heartbeat_files(root) or _failed(root):
        yield root
    for entry in sorted(root.iterdir()):
        if depth < _DEEPEST and not entry.is_symlink() and entry.is_dir():
            yield from _run_directories(entry, depth + 1)


def _failed(folder: Path) -> bool:
    """Does the launcher's account tell of a bad end, whatever files there are?"""
    end = launch_result(folder, [])
    return end is not None and not end.ok


def _completed(document: Mapping[str, Any] | None, end: LaunchResult | None) -> Launch | None:
    """The launch of a launcher's document, if it ended as it was planned; else None."""
    try:
        planned = Launch.model_validate((document or {}).get("launch"))
    except ValidationError:
        return None
    as_told = end is not None and (planned.stop is None or end.stopped is not None)
    return planned if end and end.ok and as_told else None


def _as_planned(remarks: Sequence[Remark]) -> Iterator[Remark]:
    """The remarks on a launch that did all that it was to do: it was not meant to have more."""
    for one in remarks:
        short = one.code is RemarkCode.WINDOW_TOO_SHORT
        yield one.model_copy(update={"code": RemarkCode.PLANNED}) if short else one


def _inspect_one(
    folder: Path, *, root: Path, csv: Path | None
) -> tuple[RunDirectory, list[Remark]]:
    problems: list[str] = []
    env, _ = read_json_object(folder / ENV_JSON, problems, shape="env")
    launch, _ = read_json_object(folder / LAUNCH_JSON, problems)
    end = launch_result(folder, problems)
    good = _completed(launch, end)
    stop = good.stop if good else None
    place = folder.relative_to(root).as_posix()
    remarks = remarks_on(place, [(RemarkCode.UNREADABLE, text) for text in problems])
    if end and not end.ok and csv is None:
        bad_end = (RemarkCode.FAILED_EXIT, _end(end))
        remarks += remarks_on((Path(place) / RESULT_JSON).as_posix(), [bad_end])
    if stop:
        text = f"stopped by {stop.by} after {stop.steps} of its steps, exit code {stop.code}"
        remarks += remarks_on(place, [(RemarkCode.PLANNED, text)])
    halt = csv is None and (folder / HALT_FILE).exists()
    if halt and not (stop and stop.by == HALT_FILE):
        text = "a .HALT file: the run was stopped, or a stale one is left"
        remarks += remarks_on(f"{place}/{HALT_FILE}", [(RemarkCode.HALTED, text)])
    world_size = whole_number((env or {}).get("world_size"))
    ranks: tuple[RankFacts, ...] = ()
    logs: list[RankLog] = []
    for rank, file in (heartbeat_files(folder) if csv is None else {}).items():
        facts, log, found = inspect_heartbeats(file, rank=rank, relative_to=root, stop=stop)
        ranks = (*ranks, facts)
        logs.append(log)
        remarks += found
    named = [(document or {}).get("run_token") for document in (env, launch)]
    tokens = frozenset(token for token in named if isinstance(token, str) and token)
    remarks += rank_remarks(ranks, world_size=world_size, tokens=tokens)
    limit, source = _floor(env)
    path = csv or folder / TRAINING_CSV
    training: RowsFacts | None = None
    rows: TrainingLog | None = None
    lost = False
    if path.is_file():
        training, rows, found = inspect_training(
            path, relative_to=root, floor=limit, floor_source=source
        )
        remarks += found
    else:
        there = "heartbeats" if ranks else f"{RESULT_JSON} (how it ended)"
        text = f"{there}, but no training.csv: nothing can be measured"
        lost = good is not None and good.kind == "trainer"
        name = path.relative_to(root).as_posix()
        remarks += remarks_on(name, [(RemarkCode.WINDOW_TOO_SHORT, text)])
    remarks += _agreement(training, ranks)
    gates, val = _table(folder / GATES_CSV, GATES), _table(folder / VAL_CSV, VAL)
    doubts = account_remarks(rows, logs, env, end, gates=gates, val=val, stop=stop)
    remarks += remarks_on(place, doubts)
    directory = RunDirectory(
        path=place,
        training=training,
        ranks=ranks,
        world_size=world_size,
        loss_floor=limit,
        loss_floor_source=source,
    )
    return directory, remarks if good is None or lost else list(_as_planned(remarks))


def _end(result: LaunchResult) -> str:
    """`crashed, rank 1: ZeroDivisionError: injected (exit code 1)`."""
    how = result.status.words
    rank = "" if result.culprit_rank is None else f", rank {result.culprit_rank}"
    code = "" if result.exit_code is None else f" (exit code {result.exit_code})"
    return f"{how}{rank}: {result.cause or 'no cause is known'}{code}"


def _table(path: Path, spec: RowSpec) -> Frame | None:
    return read_rows(path, spec).frame if path.is_file() else None


def _floor(env: Mapping[str, Any] | None) -> tuple[float | None, str]:
    """The lowest loss that the launch's data allow; None where nobody says what the data were."""
    if env is None:
        return None, "no env.json says what the data were"
    effective = env.get("effective")
    if not isinstance(effective, dict) or not isinstance(effective.get("loss_floor"), int | float):
        return None, "env.json names no floor"
    return float(effective["loss_floor"]), str(effective.get("loss_floor_source") or ENV_JSON)


def _agreement(training: RowsFacts | None, ranks: tuple[RankFacts, ...]) -> Iterator[Remark]:
    """Rows and heartbeats of one run end at the same step, give or take one logging interval."""
    if training is None or not training.segments:
        return
    last = training.segments[-1]
    for facts in ranks:
        if facts.last_step is not None and abs(facts.last_step - last.last_step) > last.every:
            text = (
                f"the rows end at step {last.last_step}, "
                f"the heartbeats of rank {facts.rank} at step {facts.last_step}"
            )
            yield Remark(code=RemarkCode.ROWS_AND_HEARTBEATS, message=text, path=facts.path)


def inspect_heartbeats(
    path: Path, *, rank: int, relative_to: Path, stop: Stop | None = None
) -> tuple[RankFacts, RankLog, list[Remark]]:
    """Read one heartbeat file, ours or foreign (`msg` for `event`, no token, no monotonic time).

    Raises OSError if the file cannot be read.
    """
    said = RankLines.read(path, rank=rank)
    torn = said.dropped + bool(said.torn_bytes)
    name = name_below(path, relative_to)
    log = rank_log(said, path=name)
    told = ("rank", "path", "pids", "first_step", "last_step", "last_event", "last_ts")
    facts = RankFacts(
        lines=said.lines,
        torn_lines=torn,
        tokens=tuple(said.tokens),
        exit_code=log.exit_code,
        longest_silence_s=log.silence_s,
        **{name: getattr(log, name) for name in told},
    )
    faults = [(RemarkCode.OTHER_RUN, text) for text in said.strangers()]
    counted = (
        (torn, RemarkCode.TORN_ROWS, "{} torn or unreadable heartbeat lines"),
        (log.steps_back, RemarkCode.STEPS_NOT_INCREASING, "the step goes back at {} places"),
        (log.clocks_back, RemarkCode.CLOCK_BACK, "the clock goes back at {} places"),
    )
    faults += [(code, text.format(number)) for number, code, text in counted if number]
    if log.exit_code and not (stop and log.exit_code == stop.code):
        faults.append((RemarkCode.FAILED_EXIT, f"the rank ended with exit code {log.exit_code}"))
    faults += [(RemarkCode.UNREADABLE, text) for text in (*said.damage, *log.misshapen[:1])]
    return facts, log, remarks_on(name, faults)


def rank_remarks(
    ranks: tuple[RankFacts, ...], *, world_size: int | None, tokens: frozenset[str]
) -> list[Remark]:
    """What only the files together can tell: other runs, missing ranks, ranks that fell silent."""
    found = []
    present = {facts.rank for facts in ranks}
    expected = set(range(world_size)) if world_size else set(range(max(present, default=-1) + 1))
    if ranks and (lost := sorted(expected - present)):
        found.append(
            (RemarkCode.MISSING_RANK, f"no heartbeats of rank {', '.join(map(str, lost))}")
        )
    known = {name for facts in ranks for name in facts.tokens} | tokens
    if len(known) > 1 and all(len(facts.tokens) <= 1 for facts in ranks):
        text = f"files of {len(known)} runs in one directory: {', '.join(sorted(known))}"
        found.append((RemarkCode.OTHER_RUN, text))
    return [*remarks_on(".", found), *_silent(ranks)]


def _silent(ranks: tuple[RankFacts, ...]) -> Iterator[Remark]:
    furthest = max((facts.last_step or 0 for facts in ranks), default=0)
    latest = max((facts.last_ts or 0.0 for facts in ranks), default=0.0)
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
        yield Remark(code=RemarkCode.SILENT_RANK, message=text, path=facts.path)
