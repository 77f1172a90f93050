"""What the trainer adds to a step: its own loop against a bare one, in turns, on the same model.

    python -m benchmarks.trainer_overhead --config configs/cpu_smoke.yaml
    torchrun --standalone --nproc_per_node=2 -m benchmarks.trainer_overhead --config ...

The bare loop is forward, backward, clipping and AdamW on a second copy of the model (under DDP
with the same options where there are several ranks), on batches made beforehand: no data source,
no records, no heartbeats, no agreement between the ranks. Blocks of steps alternate within one
process, so that a busy machine hits both alike; ratios are paired per round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from time import perf_counter

from benchmarks.trainer_loop import made_loop, made_source
from nsa.launch.plan import plan_launch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="configs/cpu_smoke.yaml")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10, help="steps per block")
    args = parser.parse_args()
    total = (args.rounds + 1) * args.steps
    environ = dict(os.environ) | {"NSA_PREFILL_BATCHED": "1"}
    plan = plan_launch(["--config", args.config, "--steps", str(total)], environ)
    measure(plan, rounds=args.rounds, steps=args.steps)
    return 0


def measure(plan, *, rounds: int, steps: int) -> None:  # type: ignore[no-untyped-def]
    """Alternate blocks and print the ratios."""
    import torch

    from nsa.launch.ranks import choose_device, start_ranks
    from nsa.train.clock import StepClock
    from nsa.train.engine import Engine

    ranks = start_ranks(plan, choose_device(plan))
    train, device = plan.config.train, ranks.device
    source = made_source(plan, ranks, "synthetic")
    run_dir = Path(ranks.from_rank0(tempfile.mkdtemp()))
    loop = made_loop(plan, ranks, source, run_dir)
    block = plan.blocks[0]
    loop.enter(block)
    loop.begin(block)
    bare = Engine(plan, ranks)
    bare.configure(plan.toggles)
    batches = [source.fetch() for _ in range(train.accumulate_grad_batches)]
    clock = StepClock(device)

    def sync() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def bare_block() -> float:
        begin = perf_counter()
        for number in range(1, steps + 1):
            bare.compute(batches, clock)
            bare.update(number, clock)
        sync()
        return (perf_counter() - begin) / steps

    def trainer_block() -> float:
        begin = perf_counter()
        for _ in range(steps):
            loop.one_step(block, False)
        loop.settler.drain()
        sync()
        return (perf_counter() - begin) / steps

    bare_block(), trainer_block()  # warm-up, DDP's bucket rebuild, the evidence
    pairs = []
    for number in range(rounds):
        order = (bare_block, trainer_block) if number % 2 else (trainer_block, bare_block)
        took = {run.__name__: run() for run in order}
        pairs.append((took["bare_block"], took["trainer_block"]))
    if ranks.rank == 0:
        report(pairs, run_dir, plan.place.world_size)
    ranks.end()


def report(pairs: list[tuple[float, float]], run_dir: Path, world_size: int) -> None:
    """The ratio per round, and the share that the trainer itself counts as its own."""
    ratios = sorted(trainer / bare for bare, trainer in pairs)
    bare, trainer = (statistics.median(column) * 1000 for column in zip(*pairs, strict=True))
    quarter = len(ratios) // 4
    rows = [line.split(",") for line in (run_dir / "training.csv").read_text().splitlines()]
    dt, host = rows[0].index("dt_s"), rows[0].index("host_s")
    shares = [float(row[host]) / float(row[dt]) for row in rows[12:]]
    own_ms = statistics.median(float(row[host]) for row in rows[12:]) * 1000
    print(f"ranks {world_size}, rounds {len(pairs)}")
    print(f"bare step     {bare:8.2f} ms (median)")
    print(f"trainer step  {trainer:8.2f} ms (median)")
    print(
        f"ratio         {statistics.median(ratios):8.3f} (median of paired rounds; middle half "
        f"{ratios[quarter]:.3f} .. {ratios[-1 - quarter]:.3f})"
    )
    print(f"own time      {own_ms:8.2f} ms per step = {statistics.median(shares):.2%} of a step")
    print(f"2 % of a step is reached when a step takes {own_ms / 0.02:.0f} ms")


if __name__ == "__main__":
    raise SystemExit(main())
