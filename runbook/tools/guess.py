"""What a trainer's own files say of it: where its rows are, and what its columns mean.

Used by `runbook init`, which lets a trainer run for a few seconds. A guess is only as good as the
rows that it finds: `guess` holds it against the log before anybody is asked to believe it.
"""

from __future__ import annotations

import csv
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from runbook.errors import UsageError
from runbook.files import LARGEST_TABLE_BYTES, read_bytes
from runbook.folder.launch.own_log import RowReader, document_in, lines_of
from runbook.folder.names import CONSOLE_LOG, OWN_FOLDER
from runbook.records.own_trainer import CONSOLE, OUT, PACE, RANKS, STEPS, LogMap
from runbook.text import in_one_line

# What columns are called elsewhere; the first that is there is taken.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "loss": ("loss", "train_loss", "train/loss", "training_loss", "loss/train", "train_loss_step"),
    "step": ("step", "global_step", "iteration", "iter", "update", "num_updates", "train/step"),
    "lr": ("lr", "learning_rate", "train/lr", "train/learning_rate"),
    "grad_norm": ("grad_norm", "gnorm", "train/grad_norm"),
    "dt_s": ("dt_s", "dt", "step_time", "step_time_s", "sec_per_step"),
    "dt_ms": ("dt_ms", "step_time_ms"),
    "toks_per_s": ("toks_per_s", "tokens_per_second", "tokens_per_sec", "tok_per_s"),
}
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf"
_STEP = r"(?i)\b(?:step|iter(?:ation)?|update)\b\W{0,8}(?P<step>\d+)"
_LOSS = rf".*?\bloss\b[\s:=]*(?P<loss>{_NUMBER})"
_MS = rf".*?(?P<dt_ms>{_NUMBER}) ?ms\b"
_PATTERNS = (_STEP + _LOSS + _MS, _STEP + _LOSS)
# Columns of a table that has no loss, as many as a message shows.
_SHOWN_FIELDS = 8
_FEWEST = 3
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
    changed = list(words)
    for place, word in enumerate(words):
        found = re.fullmatch(rf"((?:--?)?(?:\w+\.)?(?:{flag}))(=.*)?", word)
        if found is None:
            continue
        if found[2]:
            changed[place] = f"{found[1]}={mark}"
            break
        if word.startswith("-") and place + 1 < len(words):
            changed[place + 1] = mark
            break
    return changed


def guess(run_dir: Path, *, steps: int) -> tuple[LogMap, str]:
    """The map of the log that a finished launch of so many steps left, and what to say of it.

    Raises UsageError that says where it looked, and what a log needs.
    """
    looked: list[str] = []
    for log, path in _candidates(run_dir, looked):
        lines = lines_of(read_bytes(path, LARGEST_TABLE_BYTES))[0]
        rows = tuple(RowReader(log).take_all(lines))
        looked.append(f"{log.path}: {len(rows)} rows")
        if len(rows) < _FEWEST:
            continue
        if any(b["step"] <= a["step"] for a, b in pairwise(rows)):
            looked[-1] += ", but its steps do not rise (does every rank write them?)"
            continue
        every = 1 if "step" in log.names else max(1, round(steps / len(rows)))
        return log.model_copy(update={"every": every}), looked[-1]
    raise UsageError(
        f"no log with a loss was found in {run_dir} "
        f"({'; '.join(dict.fromkeys(looked)) or 'nothing was written'})",
        hint=f"let it write a .csv or .jsonl with step and loss below {OUT}, or print such lines; "
        "docs/your-trainer.md has an adapter of 30 lines",
    )


def _candidates(run_dir: Path, looked: list[str]) -> Iterator[tuple[LogMap, Path]]:
    """Maps that may fit, the surest first: tables, JSON lines, what the console shows.

    Why a table that is there is not taken, is added to `looked`.
    """
    own = run_dir / OWN_FOLDER
    for suffix, read in (("csv", _header), ("jsonl", _fields)):
        for path in sorted(own.rglob(f"*.{suffix}")):
            fields, below = read(path), path.relative_to(own)
            # Only the name is sure to be the same in the next launch.
            name = f"{OUT}/{below}" if len(below.parts) == 1 else f"{OUT}/**/{below.name}"
            if log := _mapped(name, fields):
                yield log, path
            else:
                looked.append(f"{below}: no loss among its columns ({_shown(fields)}")
    console = run_dir / CONSOLE_LOG
    if log := _mapped(CONSOLE, _fields(console)):
        yield log, console
    for pattern in _PATTERNS:
        yield LogMap(pattern=pattern), console


def _shown(fields: Sequence[str]) -> str:
    shown = in_one_line(", ".join(fields[:_SHOWN_FIELDS])) or "none"
    other = next((mark for mark in ";\t|" if fields and mark in fields[0]), "")
    return f"{shown})" + (f", separated by {other!r} and not by commas" if other else "")


def _mapped(path: str, fields: Sequence[str]) -> LogMap | None:
    columns: dict[str, str] = {}
    for ours, theirs in _NAMES.items():
        named = next((name for name in theirs if name in fields), None)
        if named and not (ours in PACE and set(PACE) & columns.keys()):
            columns[ours] = named
    return LogMap(path=path, columns=columns) if "loss" in columns else None


def _header(path: Path) -> list[str]:
    first = path.read_text("utf-8", "replace").partition("\n")[0]
    return [cell.strip() for cell in next(csv.reader([first]), [])]


def _fields(path: Path) -> list[str]:
    """The fields of the documents in a file's lines, those of lines with a loss before others."""
    found: dict[str, None] = {}
    for line in lines_of(read_bytes(path, LARGEST_TABLE_BYTES))[0]:
        fields = document_in(line.decode("utf-8", "replace"))
        if any(name in fields for name in _NAMES["loss"]):
            return list(fields)
        found |= dict.fromkeys(fields)
    return list(found)
