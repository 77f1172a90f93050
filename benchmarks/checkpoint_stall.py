"""How long a checkpoint holds training up, against one that training waits for.

    python -m benchmarks.checkpoint_stall [--rounds N] [--config FILE]

The model, its optimizer and the writer are the trainer's own; the steps are stood in for by a
sleep, which takes no processor from the thread that writes. Rounds alternate which kind goes
first. Ratios are within a round.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
import tempfile
from pathlib import Path
from time import perf_counter, sleep

import torch

from nsa.train.checkpoint import Checkpoints
from nsa.train.engine import Engine
from nsa.train.launch import plan_launch
from nsa.train.ranks import choose_device, start_ranks
from nsa.train.retention import Retention

CONFIG = "configs/m7c_125m_2xa100_production.yaml"


def main() -> None:
    """Print one line for each round and the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--config", default=CONFIG)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary one)")
    args = parser.parse_args()
    words = ["--config", args.config, "--ddp", "0", "--set", "runtime.device=auto"]
    plan = plan_launch(words, {"NSA_PREFILL_BATCHED": "1"})
    engine = Engine(plan, start_ranks(plan, choose_device(plan)))
    for parameter in engine.model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    engine.optimizer.step()
    engine.optimizer.zero_grad(set_to_none=True)
    root = Path(tempfile.mkdtemp(prefix="stall-", dir=args.folder))
    try:
        measure(engine, root, args.rounds)
    finally:
        shutil.rmtree(root)


def measure(engine: Engine, root: Path, rounds: int) -> None:
    """The first save allocates the copy's buffers, so it is shown apart."""
    store = Checkpoints(root, engine, Retention(last=1))
    print(f"{engine.model.n_parameters():,} parameters on {engine.device}")
    steps = itertools.count()
    first = _save(store, next(steps), wait=False)[0]
    print(f"first save: training held up for {first:.3f} s")
    ratios, stalls, waits = [], [], []
    for number in range(1, rounds + 1):
        order = (True, False) if number % 2 else (False, True)
        took = {wait: _save(store, next(steps), wait=wait) for wait in order}
        waits.append(took[True][0])
        stalls.append(took[False][0])
        ratios.append(stalls[-1] / waits[-1])
        gib = took[True][1] / 2**30
        print(
            f"round {number}: held up {stalls[-1]:.3f} s, waited for {waits[-1]:.3f} s, "
            f"{100 * ratios[-1]:.1f} % ({gib:.2f} GiB)"
        )
    print(
        f"medians: held up {statistics.median(stalls):.3f} s, waited for "
        f"{statistics.median(waits):.3f} s, {100 * statistics.median(ratios):.1f} % "
        f"({100 * min(ratios):.1f} to {100 * max(ratios):.1f})"
    )


def _save(store: Checkpoints, step: int, *, wait: bool) -> tuple[float, int]:
    """Seconds for which training stands still, and the bytes written."""
    begin = perf_counter()
    store.begin(step=step, position={"step": step}, val_loss=None)
    if wait:
        path = store.finish().path
    held = perf_counter() - begin
    if not wait:
        while not store.done:
            sleep(0.05)
        path = store.finish().path
    return held, sum(file.stat().st_size for file in path.iterdir())


if __name__ == "__main__":
    main()
