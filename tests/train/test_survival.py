"""A run that is killed and pre-empted ends with the numbers of one that was left alone.

Bit for bit, on the CPU. Both runs evaluate and save as they go; what was ended goes on by
`--resume OUT/latest`.
"""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from tests.train.launching import Launch, start

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STEPS = 40
ENDS = [(signal.SIGKILL, 19), (signal.SIGKILL, 21), (signal.SIGTERM, 27)]
# What each step has to have had, in the newest run that did it: all but times and memory.
ALIKE = {"training.csv": ["loss", "lr", "grad_norm", "tokens"], "val.csv": ["loss"]}


def begun(out: Path, *, resume: bool = False) -> Launch:
    """A launch by hand that saves and evaluates every second step."""
    settings = ("train.save_every=2", "train.eval_every=2", "train.keep_last=3")
    words = ["--dataset", "markov", "--ddp", "0", "--save", "--seq-len", "32", "--log-every", "500"]
    words += ["--steps", str(STEPS), "--out-dir", str(out)]
    words += [word for setting in settings for word in ("--set", setting)]
    words += ["--resume", str(out / "latest")] if resume else []
    return start(out, words, harness=False)


def runs(out: Path) -> list[Path]:
    """The folders of all runs, oldest first."""
    return sorted(out.glob("2*/"))


def tables(out: Path) -> dict[str, pd.DataFrame]:
    found = {}
    for name, columns in ALIKE.items():
        rows = pd.concat([pd.read_csv(path) for path in sorted(out.glob(f"2*/{name}"))])
        last = rows.drop_duplicates("step", keep="last").set_index("step").sort_index()
        found[name] = last[columns].astype(float)
    return found


def test_two_kills_and_a_sigterm_change_no_bit(tmp_path: Path) -> None:
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    straight = begun(whole)
    codes, consoles = [], ""
    for number, (kind, step) in enumerate(ENDS):
        launch = begun(pieces, resume=number > 0)

        def has_come(it: Launch, number: int = number, step: int = step) -> bool:
            """The one before may have done this step too."""
            newest = [replace(it, run_dir=folder) for folder in runs(pieces)[number:]]
            return any(b["step"] >= step for one in newest for b in one.beats(0, "step_end"))

        launch.until(has_come).process.send_signal(kind)
        codes.append(launch.wait().process.returncode)
        consoles += launch.text()
    last = begun(pieces, resume=True).wait()
    consoles += last.text()
    assert [*codes, last.process.returncode] == [-9, -9, 13, 0], consoles
    assert straight.wait().process.returncode == 0, straight.text()
    one, two = tables(whole), tables(pieces)
    for name, wanted in one.items():
        pd.testing.assert_frame_equal(two[name], wanted, check_exact=True)
    assert list(one["training.csv"].index) == list(range(1, STEPS + 1))
    ends = [replace(last, run_dir=folder).exit() for folder in (*runs(whole), *runs(pieces)[2:])]
    assert ends[0]["param_hash"] == ends[2]["param_hash"]
    assert "SIGTERM" in ends[1]["reason"]
    went_on = re.findall(r"\[resume\] .*\(step (\d+)\)", consoles)
    assert len(went_on) == 3 and went_on[2] == str(ends[1]["step"]), "saved where it was stopped"
    kept = sorted(path.name for path in (whole / "latest/checkpoints").iterdir())
    assert kept == ["step_36", "step_38", "step_40"]
