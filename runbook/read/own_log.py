"""The log of a trainer of one's own as rows, and as evidence: what it says, and when that came.

The times are those at which this program saw the log grow. What the trainer says of its own pace is
kept beside them, to be held against them, and is never used.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runbook.read.documents import ARRIVALS_CSV, CONSOLE_LOG, OWN_FOLDER, name_below
from runbook.read.heartbeats import whole_number
from runbook.read.rows import RowSpec, read_rows
from runbook.records.evidence import RankLog, TrainingLog
from runbook.records.own_trainer import COLUMNS, CONSOLE, OUT, LogMap, OwnTrainer

if TYPE_CHECKING:
    import pandas as pd

ARRIVALS = RowSpec(columns=("rows", "mono", "ts"), key="rows", whole=frozenset({"rows"}))
PROCESSES = RowSpec(
    columns=("mono", "step", "pid", "rank", "rss_mib"),
    key="mono",
    whole=frozenset({"step", "pid", "rank"}),
)
# A progress bar is drawn over with carriage returns, and a row may stand behind one.
_LINE = re.compile(rb"[\r\n]")
_DOCUMENT = re.compile(r"\{[^{}]*\}")
_NO_NUMBER = re.compile(r"(-?\b(?:nan|inf)\b)(?=\s*[,}])")
_LARGEST_LINE = 1 << 16
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

    def take(self, line: bytes) -> Row | None:
        """The row of this line by our names, its step included; None if it is none."""
        if len(line) > _LARGEST_LINE:
            return None
        found = self._fields(line.decode("utf-8", "replace").strip("\ufeff"))
        row = {name: value for name in COLUMNS if (value := _number(found.get(name))) is not None}
        if "loss" not in row or (self._tells_step and "step" not in row):
            return None
        self._count += 1
        return row if self._tells_step else {**row, "step": float(self._count * self._log.every)}

    def _fields(self, line: str) -> Mapping[str, Any]:
        if self._pattern is not None:
            match = self._pattern.search(line)
            return match.groupdict() if match else {}
        found = self._cells(line) if self._is_table else _document(line)
        return {ours: found.get(theirs) for ours, theirs in self._log.columns.items()}

    def _cells(self, line: str) -> Mapping[str, Any]:
        cells = next(csv.reader([line]), [])
        if not self._header:
            self._header = tuple(cell.strip() for cell in cells)
            return {}
        return dict(zip(self._header, cells, strict=True)) if self._fits(cells) else {}

    def _fits(self, cells: Sequence[str]) -> bool:
        return len(cells) == len(self._header)


def named_fields(line: bytes) -> Mapping[str, Any]:
    """The document that stands in a line; empty if there is none."""
    return _document(line.decode("utf-8", "replace"))


def _document(line: str) -> Mapping[str, Any]:
    """The JSON object, or the dict as Python prints it, that stands in a line."""
    for text in _DOCUMENT.findall(line):
        for read in (json.loads, _literal):
            try:
                found = read(text)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
            if isinstance(found, dict):
                return found
    return {}


def _literal(text: str) -> object:
    """As Python prints it, where `nan` and `inf` are names and no literals."""
    return ast.literal_eval(_NO_NUMBER.sub(r"'\1'", text))


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


def rows_of(log: LogMap, lines: Iterable[bytes]) -> Iterator[Row]:
    """All rows of a whole log."""
    reader = RowReader(log)
    return (row for line in lines if (row := reader.take(line)) is not None)


def read_own_log(
    folder: Path, trainer: OwnTrainer, *, ranks: int, relative_to: Path
) -> tuple[TrainingLog | None, tuple[RankLog, ...]]:
    """The trainer's log, and as one rank's log the times at which it grew.

    A row of the log's frame stands for all `steps` between two arrivals: their mean loss, tokens
    as the profile declares them, `dt_s` by this program's clock, and `told_s`, the same time as
    the trainer tells it, where its map names that. None if there is no row, or no arrival.
    """
    path, times = log_path(folder, trainer.log), folder / ARRIVALS_CSV
    if path is None or not path.is_file() or not times.is_file():
        return None, ()
    data = path.read_bytes()
    lines, _ = lines_of(data)
    rows = list(rows_of(trainer.log, lines))
    arrived = read_rows(times, ARRIVALS)
    if not rows or len(arrived.frame) < 2:
        return None, ()
    frame = _frame(rows, arrived.frame, trainer.tokens(ranks))
    problems = [f"{times.name}: {text}" for text in arrived.problems]
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
        damaged=bool(back) or arrived.damaged,
    )
    return told, (_clock(frame, name_below(times, relative_to), arrived.sha256),)


def _frame(rows: Sequence[Row], arrivals: pd.DataFrame, tokens: int) -> pd.DataFrame:
    import numpy as np
    import pandas as pd

    steps = np.array([row["step"] for row in rows])
    usual = float(np.median(np.diff(steps))) if len(steps) > 1 else 1.0
    before = np.concatenate([[steps[0] - usual], steps[:-1]])
    told = np.array([_told_s(row, tokens) for row in rows]) * (steps - before)
    counts, clock = arrivals["rows"].to_numpy(), arrivals["mono"].to_numpy(dtype=float)
    found: dict[str, list[float]] = {}
    for place in range(1, len(counts)):
        begin, end = counts[place - 1], min(counts[place], len(rows))
        if end <= begin:
            continue
        part = rows[begin:end]
        many = steps[end - 1] - before[begin]
        said = {
            "step": steps[end - 1],
            "steps": many,
            "tokens": many * tokens,
            "dt_s": clock[place] - clock[place - 1],
            "told_s": float(told[begin:end].sum()),
            "mono": clock[place],
            "ts": float(arrivals["ts"].iloc[place]),
            **{
                name: float(np.mean([row.get(name, np.nan) for row in part]))
                for name in ("loss", "lr", "grad_norm")
            },
        }
        for name, value in said.items():
            found.setdefault(name, []).append(value)
    frame = pd.DataFrame(found).astype({"step": "int64", "steps": "int64"})
    return frame.assign(toks_per_s=frame["tokens"] / frame["dt_s"])


def _told_s(row: Row, tokens: int) -> float:
    """Seconds of one step as the trainer tells them; NaN if it does not."""
    if "dt_ms" in row:
        return row["dt_ms"] / 1000
    rate = row.get("toks_per_s", 0.0)
    return row.get("dt_s", tokens / rate if rate > 0 else float("nan"))


def _clock(frame: pd.DataFrame, path: str, sha256: str) -> RankLog:
    """The arrivals as a rank's steps: what samples of the devices are taken between."""
    steps = frame[["step", "mono", "ts"]].assign(alone=True, mem_mib=float("nan"))
    return RankLog(
        rank=0,
        path=path,
        sha256=sha256,
        events=len(frame),
        tokens=frozenset(),
        first_step=int(frame["step"].iloc[0]),
        last_step=int(frame["step"].iloc[-1]),
        exit_code=None,
        exit_reason="",
        param_hash=None,
        counts={},
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
            steps = (heartbeat_step(line, trainer) for line in lines_of(path.read_bytes())[0])
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
    found = _document(line.decode("utf-8", "replace"))
    return whole_number(found.get(trainer.heartbeats.step)) if trainer.heartbeats else None
