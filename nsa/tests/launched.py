"""A whole launch in this process, on one rank, of a small model, and what its run directory holds.

The model attends to two blocks.
"""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from nsa.contract import CHECKSUMS_JSON
from nsa.launch.plan import plan_launch
from nsa.launch.process import Termination
from nsa.tests.built import BATCHED, as_typed, write_config
from nsa.train.session import train

# Three: what is right with two shows.
STEPS, MICRO_BATCHES = 6, 3
# The middle one of the checkpoints.
SAVED, MIDDLE, LAST = 3, "checkpoints/step_3", f"checkpoints/step_{STEPS}"
# Attention is proven elsewhere: two selection blocks are enough to train on.
SEQ_LEN = 16
SUCCESS = 0
PATIENCE_S = 60.0


def launch(
    folder: Path,
    *words: str,
    save_every: int = 1,
    precision: str = "fp32",
    variables: Mapping[str, str] = BATCHED,
    code: int = SUCCESS,
    case: str = "avg, tied head",
) -> tuple[Path, dict[str, Any]]:
    """A launch of so many steps, each of so many micro-batches, which ends with `code`.

    Returns its run directory, and what its exit event says.
    """
    folder.mkdir()
    file = write_config(case, folder, steps=STEPS, seq_len=SEQ_LEN, precision=precision)
    settings = (
        f"train.save_every={save_every}",
        "train.eval_every=2",
        "train.eval_batches=1",
        f"train.accumulate_grad_batches={MICRO_BATCHES}",
    )
    flags = ["--ddp", "0", "--dataset", "markov", "--out-dir", str(folder / "runs"), *words]
    plan = plan_launch(["--config", str(file), *flags, *as_typed(settings)], variables)
    ended = train(plan, Termination())
    (run_dir,) = (folder / "runs").glob("[!l]*")
    last = json.loads((run_dir / "heartbeat_rank0.jsonl").read_text().splitlines()[-1])
    assert ended == code, last
    return run_dir, last


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A launch of all steps."""
    return launch(tmp_path_factory.mktemp("whole") / "run")


def rows(folder: Path, name: str, *columns: str) -> list[dict[str, float]]:
    """The rows of a table of the run: these columns, or those of what was trained."""
    wanted = ("step", *(columns or ("loss", "grad_norm", "lr")))
    with (folder / name).open(newline="") as file:
        return [
            {key: float(row[key]) for key in wanted if key in row} for row in csv.DictReader(file)
        ]


def kept(folder: Path) -> list[int]:
    """The steps of the checkpoints that are there."""
    return sorted(
        int(path.name.removeprefix("step_")) for path in folder.glob("checkpoints/step_*")
    )


def facts_of(folder: Path) -> dict[str, Any]:
    """What a checkpoint tells of itself."""
    facts: dict[str, Any] = json.loads((folder / CHECKSUMS_JSON).read_text())
    return facts


def tell(folder: Path, **facts: Any) -> None:
    """Have a checkpoint tell something else of itself."""
    (folder / CHECKSUMS_JSON).write_text(json.dumps(facts_of(folder) | facts))


def copied(folder: Path, into: Path, *steps: int) -> Path:
    """A run with these of its checkpoints alone."""
    for step in steps:
        shutil.copytree(folder / f"checkpoints/step_{step}", into / f"checkpoints/step_{step}")
    return into


def wait_for_step(folder: Path, step: int) -> None:
    """Until the heartbeats of the run in `folder` tell this step's end. Raises TimeoutError."""
    begin = monotonic()
    while monotonic() < begin + PATIENCE_S:
        for path in folder.glob("runs/2*/heartbeat_rank0.jsonl"):
            told = map(json.loads, path.read_text().splitlines()[:-1])
            if any(one["event"] == "step_end" and one["step"] == step for one in told):
                return
        sleep(0.01)
    raise TimeoutError(f"training did not come to step {step} while a save was under way")
