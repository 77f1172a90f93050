"""Lines of public trainers as people posted them: whose they are, and what they say."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from phases.training.own import diverged
from runbook.errors import UsageError
from runbook.folder.launch.own_log import RowReader
from runbook.records import Check, Outcome, Reason
from runbook.records.evidence import LaunchEvidence
from runbook.records.own_trainer import LogMap
from runbook.tools.own_profile import KNOWN, guess
from tests.factory.tables import table
from tests.own.runs import document, judged, launched, profile_of

LINES = yaml.safe_load(Path(__file__).with_name("known_logs.yaml").read_text("utf-8"))


def row_of(trainer: str, line: str) -> dict[str, float] | None:
    row = RowReader(LogMap(pattern=KNOWN[trainer])).take(line.encode())
    return None if row is None else dict(row)


def test_every_trainer_that_is_known_has_a_line_here() -> None:
    assert KNOWN.keys() == LINES.keys()


@pytest.mark.parametrize("trainer", LINES)
def test_a_line_says_what_its_writer_meant_and_is_nobody_elses(trainer: str) -> None:
    line, said = LINES[trainer]["line"], LINES[trainer]["said"]
    assert row_of(trainer, line) == row_of(trainer, f"[default0]:{line}\r") == said
    assert [other for other in KNOWN if row_of(other, line)] == [trainer]


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
    assert (log.pattern, told) == (KNOWN[trainer], f"console: 4 rows, as {trainer} writes them")


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


def test_where_no_line_is_read_what_would_be_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as told:
        found(tmp_path, "\x1b[31mat {step}: the LOSS stood at {loss} (https://me:hunter22@store)")
    hint = str(told.value.hint)
    (read,) = re.findall("such as `(step .*?)` is read", hint)
    (pattern,) = re.findall("such as '(.*)'", hint)
    (tmp_path / "other").mkdir()
    assert found(tmp_path / "other", read.replace("12/300 loss 4.66", "{step}/30 loss {loss}"))
    (tmp_path / "console.log").write_text("".join(f"at {s}: cost {9 - s}\n" for s in range(4)))
    log, said = guess(tmp_path, steps=4, pattern=pattern)
    assert (log.names, said) == (("step", "loss"), "console: 4 rows")


def test_too_few_rows_are_told_with_whose_they_are(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "console.log").write_text(LINES["Megatron-LM"]["line"] + "\n")
    with pytest.raises(UsageError, match="console: 1 rows, as Megatron-LM writes them"):
        guess(tmp_path, steps=30)


Curve = Callable[[np.random.Generator, np.ndarray], np.ndarray]


def falling(random: np.random.Generator, t: np.ndarray) -> np.ndarray:
    """Towards a floor, with noise that grows with the loss."""
    level = random.uniform(0.01, 3.0)
    curve = level + random.uniform(0.1, 30.0) * np.exp(-t * random.uniform(0.5, 30.0))
    return curve * np.exp(random.normal(0, random.uniform(0.01, 0.5), t.size))


def plateau(random: np.random.Generator, t: np.ndarray) -> np.ndarray:
    """It learns nothing, at any level."""
    return 10 ** random.uniform(-3, 9) * np.exp(random.normal(0, 0.5, t.size))


def bump(random: np.random.Generator, t: np.ndarray) -> np.ndarray:
    """Up to twenty times its first value while the learning rate warms up, and down again."""
    height, at = random.uniform(1, 20), random.uniform(0.02, 0.4)
    rise = height * np.exp(-(((t - at) / 0.1) ** 2))
    return (4.0 - 2.0 * t + rise) * np.exp(random.normal(0, 0.1, t.size))


def averaged(random: np.random.Generator, t: np.ndarray) -> np.ndarray:
    """A running mean that began at 0."""
    begun = 1 - np.exp(-t * random.uniform(20, 200) - 0.01)
    return begun * (4.0 - 2.0 * t) * np.exp(random.normal(0, 0.02, t.size))


@pytest.mark.parametrize("curve", [falling, plateau, bump, averaged])
def test_no_healthy_loss_diverged(curve: Curve) -> None:
    """A thousand draws of each, of 40 to 600 readings."""
    random = np.random.default_rng(5)
    for _ in range(1000):
        losses = curve(random, np.linspace(0, 1, int(random.integers(40, 600))))
        assert not diverged(losses), losses.tolist()


def risen(random: np.random.Generator, t: np.ndarray) -> np.ndarray:
    """It falls to 2, and from somewhere on it is at a thousand, give or take."""
    broke = random.uniform(0.3, 0.7)
    wild = 1000 * np.exp(random.normal(0, 0.7, t.size))
    return np.where(t < broke, 4.6 - 2.6 * np.minimum(1, 4 * t), wild)


def wild(random: np.random.Generator, t: np.ndarray) -> np.ndarray:
    """As measured with a learning rate of 30: from the first row on beyond everything."""
    return 10 ** (9.6 + random.normal(0, 0.75, t.size))


@pytest.mark.parametrize(
    ("curve", "words", "least"), [(risen, "rose from", 1000), (wild, "swings between", 900)]
)
def test_a_loss_that_diverged_is_known(curve: Curve, words: str, least: int) -> None:
    random = np.random.default_rng(6)
    found = [diverged(curve(random, np.linspace(0, 1, 125))) for _ in range(1000)]
    assert sum(words in one for one in found) >= least


def test_a_loss_at_0_or_below_and_a_short_one_have_no_scale() -> None:
    curve = risen(np.random.default_rng(1), np.linspace(0, 1, 125))
    assert diverged(curve) and not diverged(curve - 2.1) and not diverged(curve[:24])


def with_loss(evidence: LaunchEvidence, loss: Callable[[np.ndarray], np.ndarray]) -> LaunchEvidence:
    """As if each of its 120 steps had come by itself."""
    log = evidence.training
    assert log is not None
    steps, rows = np.arange(1, 121), log.frame.iloc[[0] * 120].reset_index(drop=True)
    frame = rows.assign(step=steps, dt_s=0.01, told_s=0.01, loss=loss(steps / 120))
    return replace(evidence, training=replace(log, frame=frame))


def test_each_end_of_a_loss_is_told_as_what_it_is(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, document())
    evidence = launched(profile, tmp_path / "run", "long_run")

    def learns(loss: Callable[[np.ndarray], np.ndarray]) -> Check:
        return judged(profile, with_loss(evidence, loss), "long_run")["learns"]

    random = np.random.default_rng(7)
    up = learns(lambda t: risen(random, t))
    assert (up.outcome, up.code) == (Outcome.FAIL, Reason.NOT_LEARNING)
    assert up.title.startswith("Training diverged: the loss rose from 2")
    assert "a tenth of its learning rate" in up.remedy
    far = learns(lambda t: 4e5 * np.exp(random.normal(0, 0.4, t.size)))
    assert far.outcome is Outcome.INCONCLUSIVE and "it diverged before the first row" in far.reason
    assert "a tenth of its learning rate" in far.remedy
    memory = learns(lambda t: 5 * np.exp(-40 * t + random.normal(0, 0.3, t.size)) + 1e-5)
    assert memory.outcome is Outcome.PASS and "fell by" in memory.reason
    flat = learns(lambda t: 4.6 + random.normal(0, 0.1, t.size))
    assert flat.outcome is Outcome.INCONCLUSIVE and "it is not known to learn" in flat.reason
    assert "diverged" not in flat.reason and "fell" not in flat.reason
    # One that is no number is one cause.
    spoiled = with_loss(evidence, lambda t: np.where(t < 0.755, 3.0 - t, math.nan))
    checks = judged(profile, spoiled, "long_run")
    assert checks["loss_finite"].outcome is Outcome.FAIL
    assert "in bf16 or fp16, which nothing here tells" in checks["loss_finite"].remedy
    for name in ("plausible", "learns"):
        assert checks[name].follows == "long_run.loss_finite", checks[name].reason
        assert "30 of 120 rows, the first at step 91" in checks[name].reason
