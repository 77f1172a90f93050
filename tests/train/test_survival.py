"""A run that is killed and pre-empted ends with the numbers of one that was left alone."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from nsa.train import restore
from tests.train.launching import Launch, run, start

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STEPS = 40
SETTINGS = ("train.save_every=8", "train.eval_every=8", "train.keep_last=2", "model.n_layers=1")
ARGS = ["--dataset", "markov", "--ddp", "0", "--seq-len", "32", "--steps", str(STEPS), "--save"]
ARGS += [word for setting in SETTINGS for word in ("--set", setting)]


def _lines(out: Path) -> dict[int, list[str]]:
    """Step, loss, rate and norm of every step, of the newest run that did it."""
    found = {}
    for table in sorted(out.glob("*/training.csv")):
        for row in table.read_text().split("\n")[1:-1]:
            cells = row.split(",")
            found[int(cells[0])] = [*cells[:3], cells[6]]
    return found


def test_two_kills_and_a_sigterm_change_no_bit(tmp_path: Path) -> None:
    alone = run(tmp_path / "alone", [*ARGS, "--out-dir", str(tmp_path / "whole")], harness=False)
    assert alone.process.returncode == 0, alone.text()
    out = tmp_path / "pieces"
    words = [*ARGS, "--out-dir", str(out)]
    resume = ["--resume", str(out / "latest")]

    def until(name: str, step: int, number: signal.Signals, more: list[str]) -> Launch:
        launch = start(tmp_path / name, [*words, *more], harness=False)
        table = "latest/training.csv"

        def there(_: Launch) -> bool:
            path = out / table
            return path.exists() and f"\n{step}," in path.read_text()

        launch.until(there)
        launch.process.send_signal(number)
        return launch.wait()

    def newest() -> str:
        # A run that was killed before its own first checkpoint leads on to the one before it.
        return f"({restore.find_step(out / 'latest', 0)[0].name.replace('_', ' ')})"

    first = until("killed", 19, signal.SIGKILL, [])
    assert first.process.returncode == -signal.SIGKILL
    sound = newest()
    second = until("again", 21, signal.SIGKILL, resume)
    assert sound in second.text()
    sound = newest()
    third = until("term", 27, signal.SIGTERM, resume)
    assert third.process.returncode == 13 and sound in third.text()
    end = json.loads((out / "latest" / "heartbeat_rank0.jsonl").read_text().split("\n")[-2])
    assert (end["event"], end["code"]) == ("exit", 13) and "SIGTERM" in end["reason"]
    last = run(tmp_path / "last", [*words, *resume], harness=False)
    assert last.process.returncode == 0, last.text()
    assert f"(step {end['step']})" in last.text()  # saved where it was stopped
    assert _lines(out) == _lines(tmp_path / "whole") and len(_lines(out)) == STEPS
    ends = [
        json.loads((folder / "latest" / "heartbeat_rank0.jsonl").read_text().split("\n")[-2])
        for folder in (out, tmp_path / "whole")
    ]
    assert ends[0]["param_hash"] == ends[1]["param_hash"]
    kept = sorted(p.name for p in (tmp_path / "whole" / "latest" / "checkpoints").iterdir())
    assert kept == ["step_32", "step_40"]
