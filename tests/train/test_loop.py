"""The trainer's loop in this process: clocks, rates, what ranks tell each other, why it ends."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.contract import HEARTBEATS, TRAINING_CSV
from nsa.data.packing import open_source
from nsa.launch.output import Heartbeat
from nsa.launch.plan import plan_launch
from nsa.launch.process import Termination
from nsa.launch.ranks import (
    choose_device,
    start_ranks,
)
from nsa.step.dispatch import is_out_of_memory
from nsa.step.engine import Engine
from nsa.train.loop import Loop
from nsa.train.settle import Tables
from runbook.accounts.clocks import BusySteps, step_clock
from runbook.folder.launch.evidence import read_training_csv
from runbook.folder.launch.rank_log import read_heartbeats
from tests.train.launching import SMOKE

SMALL = ("--ddp", "0", "--seq-len", "32", "--set", "model.n_layers=1", "--steps", "16")


def accounts_of(loop: Loop, run_dir: Path) -> list[str]:
    """What the two clocks of its steps do not agree on."""
    block = loop.plan.blocks[0]
    loop.enter(block)
    loop.begin(block)
    for _ in range(block.total_steps):
        loop.one_step(block, False)
    rank = read_heartbeats(run_dir / HEARTBEATS.name(0), rank=0, relative_to=run_dir)
    frame = read_training_csv(run_dir / TRAINING_CSV, relative_to=run_dir).frame
    return step_clock(frame, rank, BusySteps([rank]))


@pytest.mark.parametrize("late", [False, True])
def test_the_time_of_a_row_is_the_next_steps_by_both_clocks(tmp_path: Path, late: bool) -> None:
    """Rows that take 30 ms now and then, as TensorBoard's may; told late they do not balance."""
    loop = made_loop(tmp_path, "synthetic")
    write, beat = loop.tables.training, loop.heartbeat
    tell, told = beat.write, []

    def slow(row: dict[str, Any]) -> None:
        write(row)
        time.sleep(0.03 * (row["step"] % 2))

    def after_the_row(event: Any, **fields: Any) -> None:
        if event != "step_end":
            tell(event, **fields)
            return
        told.append(fields)

    loop.tables.training = slow  # type: ignore[method-assign]
    if late:
        beat.write = after_the_row  # type: ignore[method-assign]
        add = loop.settler.add

        def settle(item: Any) -> None:
            add(item)
            tell("step_end", **told.pop())  # type: ignore[arg-type]

        loop.settler.add = settle  # type: ignore[method-assign]
    problems = accounts_of(loop, tmp_path)
    assert bool(problems) is late, problems


def made_loop(run_dir: Path, dataset: str) -> Loop:
    """A loop of one rank that writes its records into `run_dir`, without TensorBoard."""
    plan = plan_launch(["--config", str(SMOKE), *SMALL], {"NSA_PREFILL_BATCHED": "1"})
    ranks = start_ranks(plan, choose_device(plan))
    data = plan.config.data.model_copy(update={"dataset": dataset})
    beat = Heartbeat(rank=0, token=secrets.token_hex(8))
    beat.open(run_dir)
    return Loop(
        Engine(plan, ranks),
        source=open_source(data, plan.share),
        tables=Tables(run_dir, rank=0, csv=True, aux=True, board=False),
        heartbeat=beat,
        termination=Termination(),
        run_dir=run_dir,
    )


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (ValueError("out of memory"), False),
    ],
)
def test_a_lack_of_memory_is_told_from_other_errors(error: Exception, memory: bool) -> None:
    assert is_out_of_memory(error) is memory
