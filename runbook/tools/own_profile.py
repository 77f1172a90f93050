"""A profile for a trainer of one's own: its command, where its rows are, and its document.

Lines of public trainers are in `configs/trainers/known_logs.yaml`: a new one is one entry there.
What a probe of seconds shows is held against its log before anybody is asked to believe it.
"""

from __future__ import annotations

import csv
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from runbook.config import Profile, registry
from runbook.config.extends import merged
from runbook.config.load import load_profile, load_profile_document
from runbook.errors import UsageError, how_many, in_one_line, listed, without_colors
from runbook.files import LARGEST_TABLE_BYTES, page, read_bytes, shipped_data
from runbook.folder import CONSOLE_LOG, OWN_FOLDER
from runbook.folder.launch.documents import read_console
from runbook.folder.launch.evidence import read_launch
from runbook.folder.launch.own_log import Row, RowReader, document_in, lines_of
from runbook.launch import run_launch
from runbook.launch.end import last_words
from runbook.launch.observer import Observer, StopRequest
from runbook.launch.supervision import LaunchOptions
from runbook.records import Launch, LaunchResult, LaunchStatus
from runbook.records.evidence import Frame, LaunchEvidence
from runbook.records.launch import with_option
from runbook.records.own_trainer import (
    CONSOLE,
    OUT,
    OWN_PACE_TOLERANCE,
    PACE,
    RANKS,
    STEPS,
    LogMap,
    OwnTrainer,
    for_own,
)

_FLAGS = {
    STEPS: r"(?:max|num|train|total)?[-_]?(?:train[-_])?(?:steps|iters|iterations|updates)",
    RANKS: r"nproc[-_]per[-_]node|num[-_]processes|ranks|world[-_]size|devices|gpus",
    OUT: r"(?:output|out|save|log|run|results?)(?:[-_]?(?:dir|path|folder))?|logdir",
}


def templated(command: str) -> str:
    """The command with marks in the place of its steps, its ranks and its folder.

    Raises UsageError where nothing says how many steps it trains.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--trainer: {error}") from error
    for mark, flag in _FLAGS.items():
        if mark not in command:
            words = _marked(words, flag, mark)
    if not any(STEPS in word for word in words):
        raise UsageError(
            f"--trainer: nothing in it says how many steps it trains; put {STEPS} there, such as "
            f"'train.py --max_steps {STEPS}'"
        )
    return shlex.join(words).replace(f"'{STEPS}'", STEPS).replace(f"'{OUT}'", OUT)


def _marked(words: Sequence[str], flag: str, mark: str) -> list[str]:
    for place, word in enumerate(words):
        found = re.fullmatch(rf"((?:--?)?(?:\w+\.)?(?:{flag}))(=.*)?", word)
        if found and (found[2] or (word.startswith("-") and place + 1 < len(words))):
            return with_option(words, found[1], mark)
    return list(words)


_DATA = shipped_data("trainers/known_logs")
# What columns are called elsewhere; the first that is there is taken.
NAMES: Mapping[str, Sequence[str]] = _DATA["columns"]
# What a row on the console of a public trainer looks like, by its name.
KNOWN: Mapping[str, str] = _DATA["trainers"]
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf"
_STEP = r"(?i)\b(?:step|iter(?:ation)?|update)\b\W{0,8}(?P<step>\d+)"
# The step as `[5/30]` or `5/30`; not of a date, nor of a progress bar, which is drawn over.
_OF = r"(?i)^(?!.*\d:\d\d<).*?{}(?P<step>\d+) */ *\d+\b(?![/.:])"
_NO_TRAINING = r"(?<!val.)(?<!test.)(?<!validation.)"
_NAME = rf"{_NO_TRAINING}\b(?:(?:train(?:ing)?|lm|avg|mean|total)_)?loss\b"
_LOSS = rf".*?{_NAME}[\s:=]*(?P<loss>{_NUMBER})"
_MS = rf".*?(?P<dt_ms>{_NUMBER}) ?ms\b"
# Of a trainer that nobody knows: a step, a loss, and with luck how long the step took.
_STEPS = (_STEP, _OF.format(r"\[ *"), _OF.format(r"(?<![\w./:-])"))
_UNKNOWN = tuple(step + _LOSS + pace for step in _STEPS for pace in (_MS, ""))
# Without a step that can be taken: one row for each step, and the rows are counted.
_COUNTED = rf"(?i)^(?!.*\d:\d\d<){_LOSS}"
# What stands behind a step, and what says that it is one of the whole run.
_TOTAL = re.compile(r" */ *(\d+)")
_NAMES_STEP, _NAMES_EPOCH = re.compile(r"(?i)\b(?:step|iter|update)"), re.compile(r"(?i)\bepoch")


def _by_columns(path: str, fields: Sequence[str]) -> LogMap | None:
    """The map of a table, or of documents in lines; None where no column is a loss."""
    columns: dict[str, str] = {}
    for ours, theirs in NAMES.items():
        named = next((name for name in theirs if name in fields), None)
        if named and not (ours in PACE and set(PACE) & columns.keys()):
            columns[ours] = named
    return LogMap(path=path, columns=columns) if "loss" in columns else None


# Columns of a table that has no loss, as many as a message shows.
_SHOWN_FIELDS = 8
_FEWEST = 3
# What a log needs, for who has to write one or to describe the own one.
_NEEDS = (
    f"a line such as `step 12/300 loss 4.66` is read, and so is a .csv or .jsonl below {OUT} with "
    r"step and loss, for each step or every few; any other line by --pattern (log.pattern of a "
    r"profile), such as 'at (?P<step>\d+): cost (?P<loss>\S+)'; see "
)


def guess(run_dir: Path, *, steps: int, pattern: str = "") -> tuple[LogMap, str]:
    """The map of the log that a finished launch of so many steps left, and what to say of it.

    A `pattern` that a person gave is the only one that is tried. Raises UsageError that says where
    it looked, and what a log needs.
    """
    looked: dict[str, str] = {}
    given = [(LogMap(pattern=pattern), run_dir / CONSOLE_LOG, "")] if pattern else None
    for log, path, whose in given or _candidates(run_dir, looked):
        lines = lines_of(read_bytes(path, LARGEST_TABLE_BYTES))[0]
        rows = tuple(RowReader(log).take_all(lines))
        none = f"{log.path}: 0 rows"
        said = f"{log.path}: {len(rows)} rows" + (f", as {whose} writes them" if whose else "")
        odd = _why_not(log, rows, lines, steps)
        if (rows or not whose) and looked.get(whose or log.path, none) == none:
            looked[whose or log.path] = f"{said}, but {odd}" if odd and rows else said
        if len(rows) >= _FEWEST and not odd:
            every = 1 if "step" in log.names else max(1, round(steps / len(rows)))
            return log.model_copy(update={"every": every}), said
    found = "; ".join(looked.values()) or "nothing was written"
    raise UsageError(
        f"no log with a loss was found in {run_dir} ({found})",
        hint=_NEEDS + page("your-trainer"),
    )


def _why_not(log: LogMap, rows: Sequence[Row], lines: Sequence[bytes], steps: int) -> str:
    """Why rows of a log are not those of the steps that were asked for; empty if they are.

    Of `N/M`, N is a step of the whole run where M is the number that was asked for: others count
    the batches of an epoch, or samples, and begin anew.
    """
    if log.pattern == _COUNTED:
        no = "no step that goes on is told in them, and they are not one for each of the"
        return "" if len(rows) == steps else f"{no} {steps} steps"
    if any(b["step"] <= a["step"] for a, b in pairwise(rows)):
        return "its steps do not rise (does every rank write them, or each epoch begin anew?)"
    if log.pattern in _UNKNOWN and (total := _total(log.pattern, lines)) not in (None, steps):
        return f"its steps are counted to {total}, and {steps} were asked for (of an epoch?)"
    return ""


def _total(pattern: str, lines: Sequence[bytes]) -> int | None:
    """The M of lines that tell `N/M`; None where there is none, or a step of a longer run."""
    for line in lines:
        text = without_colors(line.decode("utf-8", "replace"))
        found = re.search(pattern, text)
        if found and (total := _TOTAL.match(text, found.end("step"))):
            names_step = _NAMES_STEP.search(text, 0, found.start("step"))
            return None if names_step and not _NAMES_EPOCH.search(text) else int(total[1])
    return None


def _candidates(run_dir: Path, looked: dict[str, str]) -> Iterator[tuple[LogMap, Path, str]]:
    """Maps that may fit, with whose logs they are: tables, JSON lines, what the console shows.

    Why a table that is there is not taken, is added to `looked`.
    """
    own = run_dir / OWN_FOLDER
    for suffix, read in (("csv", _header), ("jsonl", _fields)):
        for path in sorted(own.rglob(f"*.{suffix}")):
            fields, below = read(path), path.relative_to(own)
            # Only the name is sure to be the same in the next launch.
            name = f"{OUT}/{below}" if len(below.parts) == 1 else f"{OUT}/**/{below.name}"
            if log := _by_columns(name, fields):
                yield log, path, _whose_columns(name, fields)
            else:
                shown = in_one_line(listed(fields, _SHOWN_FIELDS)) or "none"
                looked[name] = f"{below}: no loss among its columns ({shown})"
    console = run_dir / CONSOLE_LOG
    for trainer, pattern in KNOWN.items():
        yield LogMap(pattern=pattern), console, trainer
    if log := _by_columns(CONSOLE, _fields(console)):
        yield log, console, ""
    for pattern in (*_UNKNOWN, _COUNTED):
        yield LogMap(pattern=pattern), console, ""


def _whose_columns(path: str, fields: Sequence[str]) -> str:
    """Lightning's CSVLogger writes metrics.csv, with the epoch before or after the step."""
    is_lightning = path.endswith("/metrics.csv") and {"epoch", "step"} <= set(fields)
    return "Lightning" if is_lightning else ""


def _header(path: Path) -> list[str]:
    first = path.read_text("utf-8", "replace").partition("\n")[0]
    return [cell.strip() for cell in next(csv.reader([first]), [])]


def _fields(path: Path) -> list[str]:
    """The fields of the documents in a file's lines, those of lines with a loss before others."""
    found: dict[str, None] = {}
    for line in lines_of(read_bytes(path, LARGEST_TABLE_BYTES))[0]:
        fields = document_in(line.decode("utf-8", "replace"))
        if any(name in fields for name in NAMES["loss"]):
            return list(fields)
        found |= dict.fromkeys(fields)
    return list(found)


_LEAST = {"baseline": (60, 8.0), "single_gpu": (60, 8.0), "long_run": (200, 30.0)}


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a probe showed: the trainer with its map, how long a step took, what to say of it."""

    trainer: OwnTrainer
    step_s: float
    startup_s: float
    ranks_seen: tuple[int, ...]
    notes: tuple[str, ...]


def run_probe(
    trainer: OwnTrainer,
    *,
    ranks: int,
    steps: int,
    seconds: float,
    folder: Path,
    variables: Mapping[str, str],
    stop: StopRequest,
) -> Probe:
    """Run the trainer twice for some steps: to find its rows, and to read them as a run would.

    `variables` are those that the launches of a run get: how many threads it has decides its pace.
    Raises UsageError with its last words if it ends badly, or within `seconds` not at all.
    """

    def run(name: str, trainer: OwnTrainer) -> LaunchEvidence:
        launch = Launch(
            name=name,
            phase="init",
            kind="own",
            argv=trainer.argv(ranks=ranks, steps=steps),
            env={**for_own(variables), **trainer.env},
            run_dir=name,
            nproc=ranks,
            steps=steps,
            timeout_s=seconds,
            own=trainer,
        )
        options = LaunchOptions(run_root=folder, observer=Observer(), stop=stop, retry=False)
        result = run_launch(launch, options)
        if result.status is not LaunchStatus.COMPLETED:
            raise UsageError(_bad_end(result, folder / name / CONSOLE_LOG))
        return read_launch(folder, launch, result)

    run("found", trainer)
    log, said = guess(folder / "found", steps=steps, pattern=trainer.log.pattern)
    return _measured(said, run("read", trainer.model_copy(update={"log": log})))


def _bad_end(result: LaunchResult, console: Path) -> str:
    said = f"{result.status.words}: {result.cause or last_words(read_console(console)[0])}"
    return (
        f"the probe {said}; what it printed is in {console}, what helps in {page('your-trainer')}"
    )


def _measured(said: str, evidence: LaunchEvidence) -> Probe:
    trainer, log = evidence.launch.own, evidence.training
    assert trainer is not None  # noqa: S101 - by its launch
    if log is None or log.damaged or len(log.frame) < 2:
        why = "; ".join(evidence.problems) or "they all came together"
        raise UsageError(
            f"{said}, but no pace follows from them: {why}; "
            "the trainer has to write each row at once (flush), or take more steps (--steps)"
        )
    rows = log.frame.iloc[1:]
    seconds, told_s = float(rows["dt_s"].sum()), float(rows["told_s"].sum())
    notes = [f"log: {said}"]
    told, odd = next((name for name in PACE if name in trainer.log.names), ""), ""
    if told and not abs(told_s / seconds - 1.0) <= OWN_PACE_TOLERANCE:
        odd = f"by which the steps took {told_s:.2f} s, not {seconds:.2f} s"
    elif told and is_running_mean(log.frame):
        odd = "a mean since the first step by this program's clock, and not of the steps of a row"
    if odd:
        notes.append(f"left out: its {told}, {odd}")
        trainer = trainer.model_copy(update={"log": _without(trainer.log, told)})
    ranks = set() if evidence.processes is None else set(evidence.processes["rank"].tolist())
    ranks |= {rank for rank, step in evidence.last_steps.items() if step is not None}
    return Probe(
        trainer=trainer,
        step_s=max(seconds / float(rows["steps"].sum()), 1e-4),
        startup_s=max(evidence.result.duration_s - seconds, 1.0),
        ranks_seen=tuple(sorted(rank for rank in ranks if rank >= 0)),
        notes=tuple(notes),
    )


def is_running_mean(frame: Frame) -> bool:
    """Does the pace that a log tells explain this program's clock far better as such a mean?

    At a steady pace both explain it.
    """
    apart = {
        name: float((frame[name] - frame["dt_s"]).iloc[1:].abs().sum())
        for name in ("told_s", "told_as_mean_s")
    }
    return apart["told_as_mean_s"] < apart["told_s"] / 2


def _without(log: LogMap, name: str) -> LogMap:
    if log.pattern:
        return log.model_copy(update={"pattern": log.pattern.replace(f"(?P<{name}>", "(?:")})
    kept = {ours: theirs for ours, theirs in log.columns.items() if ours != name}
    return log.model_copy(update={"columns": kept})


def document_of(probe: Probe, *, base: str, ranks: int) -> dict[str, Any]:
    """The profile's file: what differs from the base. Raises UsageError if it is not sound."""
    trainer, name = probe.trainer, re.sub(r"\W+", "_", probe.trainer.name).lower()
    below = load_profile(base).model_dump(mode="json")
    document: dict[str, Any] = {
        "extends": base,
        "name": name,
        "title": f"{trainer.name} on {how_many(ranks, 'rank')}",
        "ranks": ranks,
        "branch": None,
        "throughput_gated": False,
        "trainer": trainer.model_dump(mode="json", exclude_defaults=True),
        "phases": _phases(probe, below["phases"]),
        "required": ["baseline.completed"],
    }
    profile = _loaded(document, below)
    document["required"] = _required(profile, probe, below["required"], ranks)
    _loaded(document, below)
    return document


def _loaded(document: Mapping[str, Any], below: Mapping[str, Any]) -> Profile:
    own = ("extends", "trainer")
    whole = merged(below, {key: value for key, value in document.items() if key not in own})
    whole |= {"own_trainer": document["trainer"], "trainer": below["trainer"]}
    return load_profile_document(whole, where="the profile that follows from the probe")


def _phases(probe: Probe, below: Mapping[str, Any]) -> dict[str, Any]:
    """Steps enough to be timed at the pace that was seen, and time enough for three times that."""
    phases = {}
    for name, (least, seconds) in _LEAST.items():
        steps = max(least, math.ceil(seconds / probe.step_s))
        typical = probe.startup_s + steps * probe.step_s
        phases[name] = {
            "steps": steps,
            "timeout_s": max(float(below[name]["timeout_s"]), math.ceil(3 * typical)),
            "typical_s": round(typical, 1),
            "source": f"a probe at {probe.step_s:.3g} s a step",
        }
    return phases


def _required(profile: Profile, probe: Probe, below: Sequence[str], ranks: int) -> list[str]:
    """What the base requires and this trainer can answer, by what the probe showed."""
    answered = set(registry.own_checks(profile))
    told = any(name in probe.trainer.log.names for name in PACE)
    unknown = set()
    if not told:
        unknown |= {name for name in answered if name.endswith(".accounts")}
    if ranks > 1 and set(probe.ranks_seen) != set(range(ranks)):
        unknown |= {name for name in answered if name.endswith(".ranks_alive")}
    if RANKS not in probe.trainer.command:
        unknown |= {name for name in answered if name.startswith("single_gpu.")}
    return [name for name in below if name in answered - unknown]
