"""What documents cost a step: the trainer's loop on local ones and on synthetic tokens, in turns.

    python -m benchmarks.data_cost [--rounds N] [--steps N] [--parquet]
    python -m benchmarks.data_cost --tokenizer gpt2 --tokenizer-file r50k_base.tiktoken

Blocks of steps alternate within one process, on one model; only the source changes. Ratios are
within a round, and which source goes first alternates. Processor time is that of the whole process
with the thread that reads ahead. Exit code 0 where the median step on documents takes at most 1.03
times the synthetic one, by the clock and by the processor.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from benchmarks.trainer_loop import made_loop, made_source
from nsa.launch.plan import LaunchPlan, plan_launch

LIMIT = 1.03
PAGES = Path(__file__).resolve().parents[1] / "docs"
_DOCUMENTS = 4000
_DOCUMENT_CHARACTERS = 3000
# Between two blocks: what is read ahead belongs to the block that took it.
_REFILL_S = 0.05


def main() -> int:
    """Print each round and the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="configs/cpu_smoke.yaml")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=40, help="steps per block")
    parser.add_argument("--tokenizer", choices=("byte", "gpt2"), default="byte")
    parser.add_argument("--tokenizer-file", default="")
    parser.add_argument("--parquet", action="store_true", help="one parquet file, not JSONL")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="documents-") as folder:
        path = documents(Path(folder), parquet=args.parquet)
        words = ["--config", args.config, "--dataset", "local", "--local-path", str(path)]
        words += ["--steps", str(2 * (args.rounds + 1) * args.steps), "--ddp", "0"]
        words += ["--set", f"data.tokenizer={args.tokenizer}"]
        words += ["--set", f"data.tokenizer_file={args.tokenizer_file}"]
        environ = {name: v for name, v in os.environ.items() if not name.startswith("NSA_")}
        plan = plan_launch(words, environ | {"NSA_PREFILL_BATCHED": "1"})
        return report(measure(plan, Path(folder), rounds=args.rounds, steps=args.steps))


def documents(folder: Path, *, parquet: bool) -> Path:
    """Pages of this project cut into documents, some thousand of them, no two alike."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.md")))
    size = _DOCUMENT_CHARACTERS
    cuts = [text[begin : begin + size] for begin in range(0, len(text) - size, size)]
    texts = [f"{number}\n{cuts[number % len(cuts)]}" for number in range(_DOCUMENTS)]
    if not parquet:
        path = folder / "documents.jsonl"
        path.write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
        return path
    import pyarrow
    import pyarrow.parquet

    path = folder / "documents.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    return path


Cost = tuple[float, float]


def measure(plan: LaunchPlan, folder: Path, *, rounds: int, steps: int) -> list[tuple[Cost, Cost]]:
    """Seconds of a step, by the clock and of processors: on documents, and synthetic."""
    import torch

    from nsa.launch.ranks import choose_device, start_ranks

    torch.set_num_threads(1)  # as torchrun does; more would spin against the thread that reads
    ranks = start_ranks(plan, choose_device(plan))
    sources = {name: made_source(plan, ranks, name) for name in ("local", "synthetic")}
    loop = made_loop(plan, ranks, sources["local"], folder)
    block = plan.blocks[0]
    loop.enter(block)
    loop.begin(block)

    def run(name: str) -> Callable[[], Cost]:
        def timed() -> Cost:
            loop.source = sources[name]
            time.sleep(_REFILL_S)
            loop.clock.restart()
            begin = time.perf_counter(), time.process_time()
            for _ in range(steps):
                loop.one_step(block, False)
            loop.settler.drain()
            wall, cpu = time.perf_counter() - begin[0], time.process_time() - begin[1]
            return wall / steps, cpu / steps

        return timed

    local, synthetic = run("local"), run("synthetic")
    local(), synthetic()  # the first batch, the evidence
    pairs = []
    for number in range(rounds):
        order = (local, synthetic) if number % 2 else (synthetic, local)
        took = {one: one() for one in order}
        pairs.append((took[local], took[synthetic]))
    told = sources["local"].statistics() or {}
    print(f"batches read ahead: {json.dumps(dict(islice(told.items(), 8)))}")
    for source in sources.values():
        source.close()
    ranks.end()
    return pairs


def report(pairs: list[tuple[Cost, Cost]]) -> int:
    """The ratios of the rounds; 1 where a median is over the limit."""
    medians = []
    for place, what in enumerate(("clock", "processor")):
        ratios = sorted(one[place] / other[place] for one, other in pairs)
        medians.append(statistics.median(ratios))
        step = statistics.median(other[place] for _, other in pairs) * 1000
        quarter = len(ratios) // 4
        print(
            f"{what:<9} synthetic {step:.2f} ms a step; on documents x {medians[-1]:.3f} (middle "
            f"half {ratios[quarter]:.3f} .. {ratios[-1 - quarter]:.3f}, n={len(ratios)} rounds)"
        )
    return 0 if max(medians) <= LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main())
