"""Faults of a run directory, each planted into the healthy one, and the remarks that it makes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.factory.files import HEADER, write_beats, write_rows
from tests.tools.inspect.folders import beats, row

# What rows without heartbeats, or with those of another trainer, always get.
ALONE = {"no_second_source"}


def edit(path: Path, change: Callable[[str], str]) -> None:
    """Write the file anew with its text changed."""
    path.write_text(change(path.read_text()))


def second_run(folder: Path) -> None:
    edit(folder / "training.csv", lambda text: text + text.partition("\n")[2])


def second_header(folder: Path) -> None:
    edit(folder / "training.csv", lambda text: text + HEADER + "\n")


def two_writers(folder: Path) -> None:
    lines = [row(step) for step in range(1, 121)]
    write_rows(folder, [HEADER, *lines[:60], lines[57], *lines[60:]])


def slow_start(folder: Path) -> None:
    lines = [row(step, dt_s=0.2 if step <= 25 else 0.05) for step in range(1, 61)]
    write_rows(folder, [HEADER, *lines])
    for rank in range(2):
        write_beats(folder, rank, beats(rank, 60))


def low_loss(folder: Path) -> None:
    lines = [row(step, loss=5.6 - 0.01 * step) for step in range(1, 121)]
    write_rows(folder, [HEADER, *lines])


def nan_loss(folder: Path) -> None:
    edit(folder / "training.csv", lambda text: re.sub(r"\n100,[^,]*,", "\n100,nan,", text))


def edited_rate(folder: Path) -> None:
    lines = (folder / "training.csv").read_text().splitlines()
    fields = lines[90].split(",")
    fields[3] = "20000"
    lines[90] = ",".join(fields)
    write_rows(folder, lines)


def torn_row(folder: Path) -> None:
    edit(folder / "training.csv", lambda text: text + "121,5.6,0.0")


def torn_beat(folder: Path) -> None:
    edit(folder / "heartbeat_rank0.jsonl", lambda text: text + '{"event":"pro')


def two_tokens(folder: Path) -> None:
    more = [{**line, "token": "ffff"} for line in beats(1, 120)[-1:]]
    write_beats(folder, 1, [*beats(1, 120), *more])


def token_of_another_run(folder: Path) -> None:
    write_beats(folder, 1, beats(1, 120, token="ffff"))


def launch_of_another_run(folder: Path) -> None:
    (folder / "launch.json").write_text('{"run_token": "ffff"}')


def lines_of_another_rank(folder: Path) -> None:
    write_beats(folder, 1, [{**line, "rank": 0} for line in beats(1, 120)])


def silent_rank(folder: Path) -> None:
    lines = [line for line in beats(1, 120) if line["step"] <= 117 and line["event"] != "exit"]  # type: ignore[operator]
    write_beats(folder, 1, lines)


def early_rank(folder: Path) -> None:
    lines = [{**line, "ts": float(str(line["ts"])) - 90} for line in beats(1, 120)]
    write_beats(folder, 1, lines)


def empty_beats(folder: Path) -> None:
    (folder / "heartbeat_rank1.jsonl").write_text("")


def no_beats(folder: Path) -> None:
    (folder / "heartbeat_rank1.jsonl").unlink()


def wall_clock_back(folder: Path) -> None:
    lines = beats(0, 120)
    lines[60]["ts"] = 1000
    write_beats(folder, 0, lines)


def monotonic_clock_back(folder: Path) -> None:
    lines = beats(0, 120)
    lines[60]["mono"] = 1.0
    write_beats(folder, 0, lines)


def steps_back(folder: Path) -> None:
    lines = beats(0, 120)
    lines[60]["step"] = 3
    write_beats(folder, 0, lines)


def bad_exit(folder: Path) -> None:
    lines = beats(0, 120)
    lines[-1]["code"] = 11
    write_beats(folder, 0, lines)


def fewer_rows_than_beats(folder: Path) -> None:
    edit(folder / "training.csv", lambda text: "\n".join(text.split("\n")[:100]) + "\n")


def halted(folder: Path) -> None:
    (folder / ".HALT").write_text("")


def bad_env(folder: Path) -> None:
    (folder / "env.json").write_text("{")


def no_header_words(folder: Path) -> None:
    edit(folder / "training.csv", lambda text: "iteration" + text)


def missing_steps(folder: Path) -> None:
    """Steps 51 to 70, not at the end, where the heartbeats' last step would tell."""
    write_rows(folder, [HEADER, *(row(step) for step in range(1, 121) if not 50 < step <= 70)])


def other_tokens(folder: Path) -> None:
    rows = [row(step, tokens=512 if step < 60 else 1024) for step in range(1, 121)]
    write_rows(folder, [HEADER, *rows])


def constant_loss(folder: Path) -> None:
    write_rows(folder, [HEADER, *(row(step, loss=5.6) for step in range(1, 121))])


def odd_fields(folder: Path) -> None:
    odd = {"embedded": "x", "data": 5, "moved": "far", "oracle": [1], "missing": 3}
    lines = [line | {k: v for k, v in odd.items() if k in line} for line in beats(0, 120)]
    write_beats(folder, 0, lines)


# Each fault, and the remarks that it alone makes of a healthy run.
FAULTS: list[tuple[Callable[[Path], None], set[str]]] = [
    (second_run, {"mixed_runs"}),
    (second_header, {"mixed_runs"}),
    (two_writers, {"steps_not_increasing", "missing_steps"}),
    (slow_start, {"warmup_in_window", "unbalanced"}),
    (low_loss, {"below_floor", "unbalanced"}),
    (nan_loss, {"non_finite", "unbalanced"}),
    (edited_rate, {"rate_does_not_follow", "unbalanced"}),
    (torn_row, {"torn_rows"}),
    (torn_beat, {"torn_rows"}),
    (two_tokens, {"other_run"}),
    (token_of_another_run, {"other_run"}),
    (launch_of_another_run, {"other_run"}),
    (lines_of_another_rank, {"other_run"}),
    (silent_rank, {"silent_rank", "rows_and_heartbeats", *ALONE}),
    (early_rank, {"silent_rank"}),
    (empty_beats, {"silent_rank", *ALONE}),
    (no_beats, {"missing_rank", *ALONE}),
    (wall_clock_back, {"clock_back"}),
    (monotonic_clock_back, {"clock_back"}),
    (steps_back, {"steps_not_increasing", "unbalanced"}),
    (bad_exit, {"failed_exit", *ALONE}),
    (fewer_rows_than_beats, {"rows_and_heartbeats", "unbalanced"}),
    (halted, {"halted"}),
    (bad_env, {"unreadable", "unbalanced"}),
    (no_header_words, {"unreadable", "window_too_short"}),
    (missing_steps, {"missing_steps", "unbalanced"}),
    (other_tokens, {"tokens_change", "unbalanced"}),
    (constant_loss, {"constant_column", "unbalanced"}),
    (odd_fields, {"unreadable", "unbalanced"}),
]
