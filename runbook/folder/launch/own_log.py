"""The log of a trainer of one's own as rows, and as evidence: what it says, and when that came.

The times are those at which this program saw the log grow. What the trainer says of its own pace is
kept beside them, to be held against them, and is never used.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runbook.errors import without_colors
from runbook.files import LARGEST_TABLE_BYTES, read_bytes
from runbook.folder import ARRIVALS_CSV, CONSOLE_LOG, OWN_FOLDER
from runbook.folder.launch import whole_number
from runbook.folder.launch.documents import name_below
from runbook.folder.launch.rows import RowSpec, read_rows
from runbook.records.evidence import Frame, RankLog, TrainingLog
from runbook.records.own_trainer import COLUMNS, CONSOLE, OUT, LogMap, OwnTrainer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

ARRIVALS = RowSpec.of("rows mono ts", whole="rows", complete=True)
PROCESSES = RowSpec.of("mono step pid rank rss_mib", whole="step pid rank", complete=True)
# A progress bar is drawn over with carriage returns, and a row may stand behind one.
_LINE = re.compile(rb"[\r\n]")
_LITERAL = re.compile(r"\{[^{}]*\}")
_NO_NUMBER = re.compile(r"(-?\b(?:nan|inf)\b)(?=\s*[,}])")
_LARGEST_LINE = 1 << 16
_LARGEST_STEP = float(2**53)
# So many of the distances between rows are alike where a trainer writes at a fixed cadence; a row
# is missing where one alone is this many times as long.
_REGULAR, _LONGER = 0.7, 1.5
Row = Mapping[str, float]


def log_path(folder: Path, log: LogMap) -> Path | None:
    """The file that holds the rows of a launch; None while there is none.

    Of several that fit the map the first by name is taken: a launch begins with an empty folder.
    """
    if log.path == CONSOLE:
        return folder / CONSOLE_LOG
    below = log.path.removeprefix(f"{OUT}/")
    return next(iter(sorted((folder / OWN_FOLDER).glob(below))), None)


class RowReader:
    """Makes rows of lines, one after the other; `header` is that of a CSV file."""

    def __init__(self, log: LogMap) -> None:
        self._log, self._count = log, 0
        self._pattern = re.compile(log.pattern) if log.pattern else None
        self._is_table, self._tells_step = log.path.endswith(".csv"), "step" in log.names
        self._header: tuple[str, ...] = ()
        self.odd_steps: list[float] = []

    def take(self, line: bytes) -> Row | None:
        """The row of this line by our names, its step included; None if it is none.

        A loss that is a word and no number (`1.#QNAN`) is NaN. An empty one, or null, may be a row
        of another kind. Steps that no trainer takes (NaN, below 0) are kept in `odd_steps`.
        """
        if len(line) > _LARGEST_LINE:
            return None
        text = without_colors(line.decode("utf-8", "replace"))
        found = self._fields(text.strip("\ufeff"))
        row = {name: value for name in COLUMNS if (value := _number(found.get(name))) is not None}
        if self._tells_step and "step" not in row:
            return None
        if "loss" not in row:
            loss = found.get("loss")
            if not (self._tells_step and isinstance(loss, str) and loss.strip()):
                return None
            row["loss"] = math.nan
        if self._tells_step and not 0 <= row["step"] <= _LARGEST_STEP:
            self.odd_steps.append(row["step"])
            return None
        self._count += 1
        return row if self._tells_step else {**row, "step": float(self._count * self._log.every)}

    def take_all(self, lines: Iterable[bytes]) -> list[Row]:
        """The rows of these lines."""
        return [row for line in lines if (row := self.take(line)) is not None]

    def _fields(self, line: str) -> Mapping[str, Any]:
        if self._pattern is not None:
            match = self._pattern.search(line)
            return match.groupdict() if match else {}
        found = self._cells(line) if self._is_table else document_in(line)
        return {ours: found.get(theirs) for ours, theirs in self._log.columns.items()}

    def _cells(self, line: str) -> Mapping[str, Any]:
        cells = next(csv.reader([line]), [])
        if not self._header:
            self._header = tuple(cell.strip() for cell in cells)
            return {}
        fits = len(cells) == len(self._header)
        return dict(zip(self._header, cells, strict=True)) if fits else {}


def document_in(line: str) -> Mapping[str, Any]:
    """The first JSON object that stands in a line, or the first dict as Python prints it."""
    decoder, at = json.JSONDecoder(), line.find("{")
    while at >= 0:
        try:
            return dict(decoder.raw_decode(line, at)[0])
        except (ValueError, RecursionError):
            at = line.find("{", at + 1)
    for text in _LITERAL.findall(line):
        try:
            # As Python prints it, where `nan` and `inf` are names and no literals.
            found = ast.literal_eval(_NO_NUMBER.sub(r"'\1'", text))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(found, dict):
            return found
    return {}


def _number(value: object) -> float | None:
    """A number, or a text that is one; `nan` is one too, and no cell is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def lines_of(data: bytes) -> tuple[list[bytes], bytes]:
    """Whole lines, and what is not a whole one yet."""
    *whole, torn = _LINE.split(data)
    return whole, torn


def read_own_log(
    folder: Path, trainer: OwnTrainer, *, ranks: int, relative_to: Path
) -> tuple[TrainingLog | None, tuple[RankLog, ...]]:
    """The trainer's log, and as one rank's log the times at which it grew.

    A row of the log's frame stands for all `steps` between two arrivals: their mean loss, tokens
    as the profile declares them, `dt_s` by this program's clock, `told_s`, the same time as the
    trainer tells it, where its map names that, `told_as_mean_s`, if that pace is a mean since step
    1 (such a mean times its step is the time since then), and `missing`, the rows that a file with
    a fixed cadence lacks there. `bad_norms` tell a gradient norm that is not finite, and `zeros` a
    loss of exactly 0. None if there is no row, or no arrival.
    """
    path, times = log_path(folder, trainer.log), folder / ARRIVALS_CSV
    if path is None or not path.is_file() or not times.is_file():
        return None, ()
    data = read_bytes(path, LARGEST_TABLE_BYTES)
    lines, _ = lines_of(data)
    reader = RowReader(trainer.log)
    rows = reader.take_all(lines)
    arrived = read_rows(times, ARRIVALS)
    if not rows or len(arrived.frame) < 2:
        return None, ()
    in_file = trainer.log.path != CONSOLE
    frame = _frame(rows, arrived.frame, trainer.tokens(ranks), in_file=in_file)
    if frame.empty:
        return None, ()
    problems = [f"{times.name}: {text}" for text in arrived.problems]
    if reader.odd_steps:
        odd = ", ".join(f"{step:g}" for step in reader.odd_steps[:3])
        problems.append(f"{len(reader.odd_steps)} row(s) tell a step that is none: {odd}")
    back = sum(b["step"] <= a["step"] for a, b in pairwise(rows))
    if back:
        problems.append(
            f"steps do not increase at {back} places: several runs, or every rank writes a row"
        )
    told = TrainingLog(
        frame=frame,
        path=name_below(path, relative_to),
        sha256=hashlib.sha256(data).hexdigest(),
        problems=tuple(problems),
        damaged=bool(back or reader.odd_steps) or arrived.damaged,
    )
    return told, (_clock(frame, name_below(times, relative_to), arrived.sha256),)


def _missing_rows(apart: npt.NDArray[np.float64], usual: float) -> npt.NDArray[np.float64]:
    """Rows that lack before each row, by the distances of a log that has a cadence.

    One distance alone that is longer is a gap; the same one again is another cadence.
    """
    import numpy as np

    around = np.concatenate([[np.nan], apart, [np.nan]])
    alone = (around[:-2] != apart) & (around[2:] != apart)
    if usual <= 0 or np.mean(apart == usual) < _REGULAR:
        return np.zeros(len(apart))
    return np.where(alone & (apart >= _LONGER * usual), np.round(apart / usual) - 1, 0.0)


def _frame(rows: Sequence[Row], arrivals: Frame, tokens: int, *, in_file: bool) -> Frame:
    import numpy as np
    import pandas as pd

    steps = np.array([row["step"] for row in rows])
    usual = float(np.median(np.diff(steps))) if len(steps) > 1 else 1.0
    before = np.concatenate([[steps[0] - usual], steps[:-1]])
    # A console's rows may be drawn over.
    missing = _missing_rows(steps - before, usual) if in_file else np.zeros(len(steps))
    pace = np.array([_told_s(row, tokens) for row in rows])
    summed = {
        "steps": steps - before,
        "told_s": pace * (steps - before),
        "told_as_mean_s": np.diff(pace * steps, prepend=np.nan),
        "missing": missing,
        "bad_norms": [not math.isfinite(row.get("grad_norm", 0.0)) for row in rows],
        "zeros": [row["loss"] == 0 for row in rows],
    }
    means = {name: [row.get(name, np.nan) for row in rows] for name in ("loss", "lr", "grad_norm")}
    ends = np.minimum(arrivals["rows"].to_numpy(), len(rows))
    came = np.flatnonzero(np.diff(ends) > 0) + 1
    parts = [slice(ends[place - 1], ends[place]) for place in came]
    found = {name: [np.sum(of[part]) for part in parts] for name, of in summed.items()}
    found |= {name: [np.mean(of[part]) for part in parts] for name, of in means.items()}
    frame = pd.DataFrame(found).assign(
        step=steps[ends[came] - 1],
        dt_s=arrivals["mono"].diff().iloc[came].to_numpy(),
        **{name: arrivals[name].iloc[came].to_numpy() for name in ("mono", "ts")},
    )
    frame["tokens"] = frame["steps"] * tokens
    whole = ("step", "steps", "missing", "bad_norms", "zeros")
    frame = frame.astype(dict.fromkeys(whole, "int64"))
    return frame.assign(toks_per_s=frame["tokens"] / frame["dt_s"])


def _told_s(row: Row, tokens: int) -> float:
    """Seconds of one step as the trainer tells them; NaN if it does not."""
    if "dt_ms" in row:
        return row["dt_ms"] / 1000
    rate = row.get("toks_per_s", 0.0)
    return row.get("dt_s", tokens / rate if rate > 0 else float("nan"))


def _clock(frame: Frame, path: str, sha256: str) -> RankLog:
    """The arrivals as a rank's steps: what samples of the devices are taken between."""
    steps = frame[["step", "mono", "ts"]].assign(alone=True, mem_mib=float("nan"))
    return RankLog(
        rank=0,
        path=path,
        sha256=sha256,
        events=len(frame),
        first_step=int(frame["step"].iloc[0]),
        last_step=int(frame["step"].iloc[-1]),
        steps=steps,
    )


def last_steps(folder: Path, trainer: OwnTrainer, ranks: int) -> dict[int, int | None]:
    """The last step that each rank told in heartbeats of its own; empty without a map of them."""
    if trainer.heartbeats is None:
        return {}
    found: dict[int, int | None] = {}
    for rank in range(ranks):
        path = heartbeat_path(folder, trainer, rank)
        found[rank] = None
        if path is not None and path.is_file():
            steps = (
                heartbeat_step(line, trainer)
                for line in lines_of(read_bytes(path, LARGEST_TABLE_BYTES))[0]
            )
            found[rank] = max((step for step in steps if step is not None), default=None)
    return found


def heartbeat_path(folder: Path, trainer: OwnTrainer, rank: int) -> Path | None:
    """The file of one rank's own heartbeats; None without a map of them."""
    if trainer.heartbeats is None:
        return None
    below = trainer.heartbeats.path.removeprefix(f"{OUT}/").replace("{rank}", str(rank))
    return folder / OWN_FOLDER / below


def heartbeat_step(line: bytes, trainer: OwnTrainer) -> int | None:
    """The step that a line of a rank's own heartbeats tells."""
    found = document_in(line.decode("utf-8", "replace"))
    return whole_number(found.get(trainer.heartbeats.step)) if trainer.heartbeats else None
