"""The trainer's loop in this process: clocks, rates, what ranks tell each other, why it ends."""

from __future__ import annotations

import math
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
from nsa.step.clock import StepClock
from nsa.step.dispatch import is_out_of_memory
from nsa.step.engine import Engine
from nsa.step.sync import Agreed
from nsa.train.loop import Loop
from nsa.train.settle import Tables, what_is_not_finite
from nsa.witness.witness import Witness
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


def test_what_is_computed_beside_a_step_leaves_the_gates_of_the_step_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads them before the step's own pass has to be seen, in drawn steps too."""
    loop = made_loop(tmp_path, "markov")
    before, looked, changed = Witness.before, [], []

    def watched(witness: Witness, step: int, batches: Any) -> bool:
        kept = [(one.last_gates, one.last_blocks) for one in loop.engine.model.attentions()]
        took_time = before(witness, step, batches)
        looked.append(took_time)
        for one, (gates, blocks) in zip(loop.engine.model.attentions(), kept, strict=True):
            if one.last_gates is not gates or one.last_blocks is not blocks:
                changed.append(step)
        return took_time

    monkeypatch.setattr(Witness, "before", watched)
    assert loop.run().code == 0
    assert sum(looked) > 1 and changed == []


@pytest.mark.parametrize(
    ("loss", "norm", "said"),
    [
        (5.545177936553955, float("nan"), "gradient norm nan, while the loss is 5.545"),
        (float("inf"), 0.25, "loss inf on rank 1, while the gradient norm is 0.25"),
        (float("nan"), float("nan"), "loss nan on rank 1, gradient norm nan"),
    ],
)
def test_what_is_not_finite_comes_first(loss: float, norm: float, said: str) -> None:
    where = "" if math.isfinite(loss) else "rank 1"
    flags = dict.fromkeys(("halt", "terminate", "saved"), False)
    agreed = Agreed(loss=loss, grad_norm=norm, where=where, nonfinite=True, **flags)
    assert what_is_not_finite(agreed) == said


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


def clock_that_reads(monkeypatch: pytest.MonkeyPatch, *readings: float) -> StepClock:
    """The clock of a step on a CPU, whose host reads these seconds, one after the other."""
    monkeypatch.setattr("nsa.step.clock.perf_counter", iter(readings).__next__)
    return StepClock(torch.device("cpu"))


def test_the_clock_tells_a_step_and_what_of_it_waited_for_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = clock_that_reads(monkeypatch, 100.0, 100.25, 100.75, 102.0, 105.0)
    with clock.fetching():
        pass
    mark = clock.tick()
    assert (mark.seconds(), mark.fetch_s) == (2.0, 0.5)
    following = clock.tick()  # begins where the one before ended, and fetches nothing
    assert (following.seconds(), following.fetch_s) == (3.0, 0.0)


def test_restart_leaves_out_what_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = clock_that_reads(monkeypatch, 100.0, 101.0, 104.0, 110.0, 110.5)
    with clock.fetching():
        pass
    clock.restart()
    mark = clock.tick()
    assert (mark.seconds(), mark.fetch_s) == (0.5, 0.0)
