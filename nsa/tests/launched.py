"""A whole launch in this process, on one rank, of a small model that attends to two blocks."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nsa.launch.plan import plan_launch
from nsa.launch.process import Termination
from nsa.tests.built import BATCHED, write_config
from nsa.train.session import train

STEPS, MICRO_BATCHES = 6, 2
# The middle one of the checkpoints.
SAVED, MIDDLE = 3, "checkpoints/step_3"
# Attention is proven elsewhere: two selection blocks are enough to train on.
SEQ_LEN = 16
SUCCESS = 0


def launch(
    folder: Path,
    *words: str,
    save_every: int = 1,
    precision: str = "fp32",
    variables: Mapping[str, str] = BATCHED,
    code: int = SUCCESS,
) -> tuple[Path, dict[str, Any]]:
    """A launch of so many steps, each of so many micro-batches, which ends with `code`.

    Returns its run directory, and what its exit event says.
    """
    folder.mkdir()
    file = write_config("avg, tied head", folder, steps=STEPS, seq_len=SEQ_LEN, precision=precision)
    settings = (
        f"train.save_every={save_every}",
        "train.eval_every=2",
        "train.eval_batches=1",
        f"train.accumulate_grad_batches={MICRO_BATCHES}",
    )
    chosen = [word for setting in settings for word in ("--set", setting)]
    flags = ["--ddp", "0", "--dataset", "markov", "--out-dir", str(folder / "runs"), *words]
    plan = plan_launch(["--config", str(file), *flags, *chosen], variables)
    ended = train(plan, Termination())
    (run_dir,) = (folder / "runs").glob("[!l]*")
    last = json.loads((run_dir / "heartbeat_rank0.jsonl").read_text().splitlines()[-1])
    assert ended == code, last
    return run_dir, last


def rows(folder: Path, name: str) -> list[dict[str, float]]:
    """The rows of a table of the run."""
    with (folder / name).open(newline="") as file:
        return [
            {key: float(row[key]) for key in ("step", "loss", "grad_norm", "lr") if key in row}
            for row in csv.DictReader(file)
        ]
