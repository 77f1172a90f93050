"""Lines of public trainers as people posted them: whose they are, and what they say."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import yaml

from runbook.errors import UsageError
from runbook.folder.launch.own_log import RowReader
from runbook.records.own_trainer import LogMap
from runbook.tools.own_rows import KNOWN, guess
from tests.factory.tables import table

LINES = yaml.safe_load(Path(__file__).with_name("known_logs.yaml").read_text("utf-8"))
PATTERNS = {known.trainer: known.pattern for known in KNOWN}


def row_of(trainer: str, line: str) -> dict[str, float] | None:
    row = RowReader(LogMap(pattern=PATTERNS[trainer])).take(line.encode())
    return None if row is None else dict(row)


def test_every_trainer_that_is_known_has_a_line_here() -> None:
    assert PATTERNS.keys() == LINES.keys()


@pytest.mark.parametrize("trainer", LINES)
def test_a_line_says_what_its_writer_meant_and_is_nobody_elses(trainer: str) -> None:
    line, said = LINES[trainer]["line"], LINES[trainer]["said"]
    assert row_of(trainer, line) == row_of(trainer, f"[default0]:{line}\r") == said
    assert [other for other in PATTERNS if row_of(other, line)] == [trainer]


@pytest.mark.parametrize("trainer", LINES)
def test_a_loss_that_is_no_number_is_a_row_and_another_line_is_none(trainer: str) -> None:
    for part, instead in LINES[trainer]["without"].items():
        assert part in LINES[trainer]["line"]
        row = row_of(trainer, LINES[trainer]["line"].replace(part, str(instead)))
        assert row is not None and math.isnan(row["loss"])
    for line in LINES[trainer].get("no_row", ()):
        assert row_of(trainer, line) is None


def test_colors_are_no_part_of_a_line() -> None:
    colored = (
        LINES["torchtitan"]["line"]
        .replace("step:", "\x1b[31mstep:")
        .replace("  loss:", "  \x1b[32mloss:")
    )
    colored = colored.replace("  grad", "  \x1b[38;2;180;60;0mgrad").replace("mfu:", "\x1b[39mmfu:")
    assert row_of("torchtitan", colored) == LINES["torchtitan"]["said"]


@pytest.mark.parametrize("trainer", LINES)
def test_whose_log_it_is_is_told(trainer: str, tmp_path: Path) -> None:
    line, step = LINES[trainer]["line"], str(LINES[trainer]["said"]["step"])
    (tmp_path / "own").mkdir()
    rows = [line.replace(f" {step}", f" {int(step) + number}", 1) for number in range(4)]
    (tmp_path / "console.log").write_text("\n".join(["some words", *rows, ""]))
    log, told = guess(tmp_path, steps=4)
    assert (log.pattern, told) == (PATTERNS[trainer], f"console: 4 rows, as {trainer} writes them")


@pytest.mark.parametrize(
    ("name", "whose"), [("metrics.csv", ", as Lightning writes them"), ("other.csv", "")]
)
def test_a_table_of_lightning(name: str, whose: str, tmp_path: Path) -> None:
    folder = tmp_path / "own" / "lightning_logs" / "version_0"
    folder.mkdir(parents=True)
    (folder / name).write_text("epoch,step,train_loss\n0,0,4.1\n0,1,4.0\n0,2,3.9\n")
    log, told = guess(tmp_path, steps=3)
    assert log.columns == {"loss": "train_loss", "step": "step"}
    assert told == f"{{out}}/**/{name}: 3 rows{whose}"


def found(folder: Path, line: str, *, every: int = 1, steps: int = 30) -> tuple[LogMap, str]:
    """What is guessed of a console on which such a line stands after every few steps."""
    (folder / "own").mkdir()
    rows = [
        line.format(step=step, steps=steps, loss=f"{4.6 - 0.03 * step:.4f}", samples=64 * step)
        for step in range(every, steps + 1, every)
    ]
    (folder / "console.log").write_text("\n".join(["some words", *rows, ""]))
    return guess(folder, steps=steps)


@table(__file__, "lines_of_nobody")
@pytest.mark.parametrize("every", [1, 5])
def test_a_line_of_nobody_is_read_by_its_step(tmp_path: Path, line: str, every: int) -> None:
    log, said = found(tmp_path, line, every=every)
    assert (said, log.every) == (f"console: {30 // every} rows", 1)
    rows = RowReader(log).take_all((tmp_path / "console.log").read_bytes().splitlines())
    told = [(row["step"], row["loss"]) for row in rows]
    assert told == [(s, round(4.6 - 0.03 * s, 4)) for s in range(every, 31, every)]


@table(__file__, "lines_that_begin_anew")
def test_rows_that_begin_anew_are_counted_one_for_each_step_or_refused(
    tmp_path: Path, line: str, said: str
) -> None:
    """Their steps would fall back in a run that is longer than an epoch."""
    (tmp_path / "each").mkdir()
    log, _ = found(tmp_path / "each", line)
    assert (log.names, log.every) == (("loss",), 1)
    with pytest.raises(UsageError, match="console: 6 rows, but ") as told:
        found(tmp_path, line, every=5)
    assert said in str(told.value)


@pytest.mark.parametrize(
    "line",
    [
        " 33%|##  | {step}/{steps} [00:05<00:10, 19.9it/s, loss={loss}]",
        "step {step} val loss {loss}",
        "{step}\t{loss}",
    ],
)
def test_a_progress_bar_and_a_validation_are_no_rows(tmp_path: Path, line: str) -> None:
    with pytest.raises(UsageError, match=r"\(console: 0 rows\)"):
        found(tmp_path, line)


def test_a_line_that_is_not_read_is_shown_with_what_would_be(tmp_path: Path) -> None:
    line = "\x1b[31mat {step}: the LOSS stood at {loss} (https://me:hunter22@store)"
    with pytest.raises(UsageError) as told:
        found(tmp_path, line)
    hint = str(told.value.hint)
    assert "it printed: at 1: the LOSS stood at 4.5700 (https://[redacted]@store); " in hint
    assert "every step" not in hint and "NeMo" not in hint
    (read,) = re.findall("such as `(step .*?)` is read", hint)
    (pattern,) = re.findall("such as '(.*)'", hint)
    (tmp_path / "other").mkdir()
    assert found(tmp_path / "other", read.replace("12/300 loss 4.66", "{step}/30 loss {loss}"))
    (tmp_path / "console.log").write_text("".join(f"at {s}: cost {9 - s}\n" for s in range(4)))
    log, said = guess(tmp_path, steps=4, pattern=pattern)
    assert (log.names, said) == (("step", "loss"), "console: 4 rows")


def test_too_few_rows_say_what_to_ask_for(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "console.log").write_text(LINES["Megatron-LM"]["line"] + "\n")
    with pytest.raises(UsageError, match="console: 1 rows, as Megatron-LM writes them") as told:
        guess(tmp_path, steps=30)
    assert "Megatron-LM: --log-interval 1" in str(told.value.hint)
