"""Lines of training.csv and of heartbeat files, and small whole files of them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nsa.contract import COMMON_FIELDS, HEARTBEATS, TRAINING_COLUMNS, TRAINING_CSV, names

COLUMNS = names(TRAINING_COLUMNS)
HEADER = ",".join(COLUMNS)
Record = dict[str, Any]
# A step of 512 tokens; its rate follows. A column that may be empty is, unless it stands here.
_ROW: Mapping[str, object] = {
    "lr": 0.001, "tokens": 512, "dt_s": 0.125, "grad_norm": 1.25, "mem_mib": 300.5, "arm": "",
    "block": 0, "warmup": 0, "fetch_s": 0.0001,
}  # fmt: skip
_EMPTY = {column.name: "" for column in TRAINING_COLUMNS if not column.filled}
_COMMON: Mapping[str, object] = {
    "rank": 0, "pid": 42, "token": "ab12", "step": 0, "phase": "step", "rss_mib": 300.0,
    "cuda_mib": None,
}  # fmt: skip


def row(step: int, **told: object) -> str:
    """One row as the trainer writes it. Raises KeyError for a column that there is not."""
    values = {**_EMPTY, **_ROW, "loss": f"5.5{step:03d}", **told, "step": step}
    values.setdefault("toks_per_s", values["tokens"] / values["dt_s"])  # type: ignore[operator]
    if unknown := values.keys() - set(COLUMNS):
        raise KeyError(f"no column {unknown}")
    return ",".join(str(values[name]) for name in COLUMNS)


def write_rows(folder: Path, lines: Iterable[str]) -> None:
    """training.csv of these lines; only the older form goes without the header."""
    (folder / TRAINING_CSV).write_text("".join(f"{line}\n" for line in lines))


def training(rows: int) -> str:
    """A healthy training.csv with a slow first step."""
    source = random.Random(1)
    lines = [HEADER, row(1, dt_s=0.5)]
    lines += [row(step, dt_s=0.125 + source.random() / 64) for step in range(2, rows + 1)]
    return "\n".join(lines) + "\n"


def legacy(rows: int) -> str:
    """The older form: no header, one row per 20 steps, beginning with step 1."""
    steps = [1, *range(20, 20 * rows, 20)]
    return "".join(f"{step},5.6,3e-04,{400 + step}\n" for step in steps)


def record(event: str, *, mono: float = 1.0, **fields: object) -> Record:
    """One heartbeat with all that each has; `ts` follows `mono`."""
    made = {"event": event, "ts": 1.7e9 + mono, "mono": mono, **_COMMON}
    assert tuple(made) == COMMON_FIELDS
    return made | fields


def line(told: Mapping[str, object]) -> str:
    """A heartbeat as it is written."""
    return json.dumps(told) + "\n"


def beat(event: str, *, mono: float = 1.0, **fields: object) -> str:
    """One heartbeat line."""
    return line(record(event, mono=mono, **fields))


def write_beats(folder: Path, rank: int, records: Iterable[Mapping[str, object]]) -> None:
    """The heartbeat file of a rank."""
    (folder / HEARTBEATS.name(rank)).write_text("".join(map(line, records)))


def say(folder: Path, rank: int, *records: Mapping[str, object]) -> None:
    """A rank tells more, as one that lives."""
    with (folder / HEARTBEATS.name(rank)).open("a") as stream:
        stream.write("".join(map(line, records)))


def heartbeats(steps: int, *, rank: int = 0, token: str = "ab12") -> str:
    """A healthy rank from boot to exit."""
    own: dict[str, Any] = {"rank": rank, "token": token}
    text = beat("boot", phase="init", **own)
    for step in range(1, steps + 1):
        now = {**own, "step": step, "mono": 1.0 + step}
        text += beat("step_start", **now)
        text += beat("progress", loss=5.5, gate_entropy=0.9, max_gate=0.4, **now)
        text += beat("step_end", rss_mib=300.0 + step, **now)
    end = {**own, "mono": 2.0 + steps, "phase": "exit"}
    return text + beat("exit", code=0, reason="done", steps_done=steps, param_hash="cafe", **end)
