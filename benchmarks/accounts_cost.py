"""What the second sources cost in a step, in CPU time: digest, count and sums of the tokens.

    python -m benchmarks.accounts_cost [--rounds 40]

Alternates a batch that is measured with one that is only embedded (A B A B), at the shapes of the
CPU profile and of the production config, and prints the median difference for one step. The budget
is 60 us of a CPU step and 1 % of the production step.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from nsa.config import ModelConfig, NSAConfig
from nsa.data.source import Batch
from nsa.model import NSALanguageModel
from nsa.witness.accounts import TokenMeter

SHAPES = {"cpu_smoke": (1, 128, 1), "production": (1, 2048, 2)}
CALLS = 50


def _seconds(model: NSALanguageModel, batches: list[Batch], meter: TokenMeter | None) -> float:
    """CPU seconds of one step's embeddings, with the meter's work around them if there is one."""
    begin = time.process_time()
    for _ in range(CALLS):
        if meter is not None:
            meter.begin(batches)
        for batch in batches:
            model.embedding(batch.tokens[:, :-1])
        if meter is not None:
            meter.take()
    return (time.process_time() - begin) / CALLS


def main() -> None:
    """Print the median cost of a step for each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for name, (rows, seq_len, accumulate) in SHAPES.items():
        attention = NSAConfig(dim=128, n_heads=4, n_kv_groups=2, d_k=32, d_v=32)
        cfg = ModelConfig(vocab_size=256, n_layers=1, attention=attention)
        plain, metered = NSALanguageModel(cfg), NSALanguageModel(cfg)
        meter = TokenMeter(metered)
        batches = [
            Batch(tokens=torch.randint(0, 256, (rows, seq_len + 1))) for _ in range(accumulate)
        ]
        extra = [
            _seconds(metered, batches, meter) - _seconds(plain, batches, None)
            for _ in range(rounds)
        ]
        low, _, high = statistics.quantiles(extra, n=4)
        print(
            f"{name}: {accumulate} micro-batch(es) of {rows} x {seq_len}: "
            f"{statistics.median(extra) * 1e6:.0f} us a step "
            f"(middle half {low * 1e6:.0f} to {high * 1e6:.0f})"
        )


if __name__ == "__main__":
    main()
