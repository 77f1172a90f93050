"""How long a checkpoint holds training up, against one that training waits for.

    python -m benchmarks.checkpoint_cost [--rounds N] [--config FILE]

The model, its optimizer and the writer are the trainer's own; the steps are stood in for by a
sleep, which takes no processor from the thread that writes. Rounds alternate which kind goes
first. Ratios are within a round. Processor seconds are those of the thread that trains for a save
that goes on beside it, and of the whole process for one that is waited for; they hardly depend on
what else the machine does.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time, sleep, thread_time

import torch

from nsa.launch.plan import plan_launch
from nsa.launch.ranks import choose_device, start_ranks
from nsa.step.engine import Engine
from nsa.train.checkpoint.retention import Retention
from nsa.train.checkpoint.write import Checkpoints

CONFIG = "configs/m7c_125m_2xa100_production.yaml"


def main() -> None:
    """Print one line for each round and the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--config", default=CONFIG)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary one)")
    args = parser.parse_args()
    # As torchrun does. A copy by several threads waits, tensor by tensor, for the one whose core
    # other work has taken.
    torch.set_num_threads(1)
    words = ["--config", args.config, "--ddp", "0", "--set", "runtime.device=auto"]
    plan = plan_launch(words, {"NSA_PREFILL_BATCHED": "1"})
    engine = Engine(plan, start_ranks(plan, choose_device(plan)))
    for parameter in engine.model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    engine.optimizer.step()
    engine.optimizer.zero_grad(set_to_none=True)
    root = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=args.folder))
    try:
        measure(engine, root, args.rounds)
    finally:
        shutil.rmtree(root)


def measure(engine: Engine, root: Path, rounds: int) -> None:
    """The first save allocates the copy's buffers, so it is shown apart."""
    store = Checkpoints(root, engine, Retention(last=1))
    print(f"{engine.model.n_parameters():,} parameters on {engine.device}")
    steps = itertools.count()
    first = _save(store, next(steps), wait=False)
    print(f"first save: training held up for {first.wall_s:.3f} s")
    beside, waited = [], []
    for number in range(1, rounds + 1):
        order = (True, False) if number % 2 else (False, True)
        took = {wait: _save(store, next(steps), wait=wait) for wait in order}
        beside.append(took[False])
        waited.append(took[True])
        print(f"round {number}: {_line(beside[-1:], waited[-1:])}")
    print(f"medians: {_line(beside, waited)}")


@dataclass(frozen=True)
class Cost:
    """Seconds for which training stands still, by the clock and of a processor; bytes written."""

    wall_s: float
    cpu_s: float
    size: int


def _line(beside: list[Cost], waited: list[Cost]) -> str:
    pairs = list(zip(beside, waited, strict=True))
    wall = _share([a.wall_s / b.wall_s for a, b in pairs])
    cpu = _share([a.cpu_s / b.cpu_s for a, b in pairs])
    held, full = (statistics.median(one.wall_s for one in all_) for all_ in (beside, waited))
    return (
        f"held up {held:.3f} s, waited for {full:.3f} s: {wall} by the clock, {cpu} of the "
        f"processor ({waited[-1].size / 2**30:.2f} GiB)"
    )


def _share(ratios: list[float]) -> str:
    """`6.1 %`, of several with the range."""
    middle = f"{100 * statistics.median(ratios):.1f} %"
    if len(ratios) == 1:
        return middle
    return f"{middle} ({100 * min(ratios):.1f} to {100 * max(ratios):.1f})"


def _save(store: Checkpoints, step: int, *, wait: bool) -> Cost:
    clock = process_time if wait else thread_time
    begin, cpu = perf_counter(), clock()
    store.begin(step=step, position={"step": step}, val_loss=None)
    if wait:
        path = store.finish().path
    wall_s, cpu_s = perf_counter() - begin, clock() - cpu
    if not wait:
        while not store.done:
            sleep(0.05)
        path = store.finish().path
    return Cost(wall_s, cpu_s, sum(file.stat().st_size for file in path.iterdir()))


if __name__ == "__main__":
    main()
