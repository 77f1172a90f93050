"""Faults of a run directory, each planted into the healthy one, and the remarks that it makes."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.factory.files import HEADER, write_beats, write_rows
from tests.tools.inspect.folders import beats, row

# What rows without heartbeats, or with those of another trainer, always get.
ALONE = {"no_second_source"}
Fault = Callable[[Path], object]


def edit(path: Path, change: Callable[[str], str]) -> None:
    """Write the file anew with its text changed."""
    path.write_text(change(path.read_text()))


def rows(change: Callable[[str], str]) -> Fault:
    """training.csv with its text changed."""
    return lambda folder: edit(folder / "training.csv", change)


def steps(of: Callable[[int], str], *numbers: int) -> Fault:
    """training.csv with these rows for its steps, 1 to 120 if none are named."""
    lines = [HEADER, *map(of, numbers or range(1, 121))]
    return lambda folder: write_rows(folder, lines)


def line(rank: int, number: int, **fields: object) -> Fault:
    """One line of a rank's heartbeats with these fields changed."""
    told = beats(rank, 120)
    told[number] |= fields
    return lambda folder: write_beats(folder, rank, told)


def every_line(rank: int, change: Callable[[dict[str, object]], dict[str, object]]) -> Fault:
    """Each line of a rank's heartbeats with these fields of it changed."""
    told = [one | change(one) for one in beats(rank, 120)]
    return lambda folder: write_beats(folder, rank, told)


def file(name: str, text: str) -> Fault:
    """A file of the directory with this text."""
    return lambda folder: (folder / name).write_text(text)


second_run = rows(lambda text: text + text.partition("\n")[2])
halted = file(".HALT", "")
low_loss = steps(lambda step: row(step, loss=5.6 - 0.01 * step))


def edited_rate(text: str) -> str:
    lines = text.splitlines()
    lines[90] = re.sub(r"^((?:[^,]*,){3})[^,]*", r"\g<1>20000", lines[90])
    return "".join(f"{line}\n" for line in lines)


def slow_start(folder: Path) -> None:
    steps(lambda step: row(step, dt_s=0.2 if step <= 25 else 0.05), *range(1, 61))(folder)
    for rank in range(2):
        write_beats(folder, rank, beats(rank, 60))


def silent_rank(folder: Path) -> None:
    told = [one for one in beats(1, 120) if int(str(one["step"])) <= 117]
    write_beats(folder, 1, [one for one in told if one["event"] != "exit"])


ODD = {"embedded": "x", "data": 5, "moved": "far", "oracle": [1], "missing": 3}

# Each fault, and the remarks that it alone makes of a healthy run.
FAULTS: dict[str, tuple[Fault, set[str]]] = {
    "second run": (second_run, {"mixed_runs"}),
    "two writers": (
        steps(row, *range(1, 61), 58, *range(61, 121)),
        {"steps_not_increasing", "missing_steps"},
    ),
    "slow start": (slow_start, {"warmup_in_window", "unbalanced"}),
    "low loss": (low_loss, {"below_floor", "unbalanced"}),
    "nan loss": (
        rows(partial(re.sub, r"\n100,[^,]*,", "\n100,nan,")),
        {"non_finite", "unbalanced"},
    ),
    "edited rate": (rows(edited_rate), {"rate_does_not_follow", "unbalanced"}),
    "torn row": (rows(lambda text: text + "121,5.6,0.0"), {"torn_rows"}),
    "fewer rows than heartbeats": (
        rows(lambda text: "\n".join(text.split("\n")[:100]) + "\n"),
        {"rows_and_heartbeats", "unbalanced"},
    ),
    "no header": (rows(lambda text: "iteration" + text), {"unreadable", "window_too_short"}),
    # Not at the end, where the heartbeats' last step would tell.
    "missing steps": (steps(row, *range(1, 51), *range(71, 121)), {"missing_steps", "unbalanced"}),
    "other tokens": (
        steps(lambda step: row(step, tokens=512 if step < 60 else 1024)),
        {"tokens_change", "unbalanced"},
    ),
    "constant loss": (
        steps(lambda step: row(step, loss=5.6)),
        {"constant_column", "unbalanced"},
    ),
    "token of another run": (
        lambda folder: write_beats(folder, 1, beats(1, 120, token="ffff")),
        {"other_run"},
    ),
    "lines of another rank": (every_line(1, lambda _: {"rank": 0}), {"other_run"}),
    "silent rank": (silent_rank, {"silent_rank", "rows_and_heartbeats", *ALONE}),
    "no heartbeats": (
        lambda folder: (folder / "heartbeat_rank1.jsonl").unlink(),
        {"missing_rank", *ALONE},
    ),
    "wall clock back": (line(0, 62, ts=1000), {"clock_back"}),
    "bad exit": (line(0, -1, code=11), {"failed_exit", *ALONE}),
    "odd fields": (
        every_line(0, lambda one: {name: ODD[name] for name in ODD.keys() & one.keys()}),
        {"unreadable", "unbalanced"},
    ),
    "halted": (halted, {"halted"}),
}
