"""One attention layer on a CPU: Native Sparse Attention against dense causal attention.

    python -m benchmarks.attention_cpu [--lengths 512,1024,2048,4096,8192] [--repeats 5]
        [--threads 1]

Layer with projections at the production shape (dim 768, 12 query heads, 2 groups, 64), float32,
batch 1, forward and backward. The dense layer has the same query and output projections, one
key/value pair and torch's fused causal attention. Runs alternate (A B A B ...) in one process and
are timed in CPU time of the process, all threads together; the table shows medians, and ratios
are medians of the rounds' own ratios. Peak memory is measured one layer at a time in a fresh
process each: the highest resident size during two forward and backward passes, less the size
just before them (weights and input are then already there).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import nsa
from benchmarks.program import machine_line, markdown_table
from nsa.attention import choose_path

SHAPE = {"dim": 768, "heads": 12, "groups": 2, "width": 64}


class DenseLayer(nn.Module):
    """Dense causal attention with grouped keys and values."""

    def __init__(self, dim: int, heads: int, groups: int, width: int) -> None:
        super().__init__()
        self.heads, self.groups, self.width = heads, groups, width
        self.q_proj = nn.Linear(dim, heads * width, bias=False)
        self.k_proj = nn.Linear(dim, groups * width, bias=False)
        self.v_proj = nn.Linear(dim, groups * width, bias=False)
        self.out_proj = nn.Linear(heads * width, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B,S,dim] to [B,S,dim]."""
        q = self.q_proj(x).unflatten(-1, (self.heads, self.width)).transpose(1, 2)
        k, v = (
            p(x)
            .unflatten(-1, (self.groups, self.width))
            .transpose(1, 2)
            .repeat_interleave(self.heads // self.groups, 1)
            for p in (self.k_proj, self.v_proj)
        )
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(out.transpose(1, 2).flatten(2))


# Dense first, because the other is measured against it.
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: DenseLayer(**SHAPE),
    "nsa": lambda: nsa.NSAAttention(nsa.NSAConfig()),
}


def once(layer: nn.Module, x: Tensor) -> tuple[float, float]:
    """CPU seconds of one forward and of one backward pass."""
    start = time.process_time()
    y = layer(x)
    middle = time.process_time()
    y.backward(y.detach())
    return middle - start, time.process_time() - middle


def time_layers(seq_len: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Raw CPU seconds of alternated rounds, after one that warms up."""
    x = torch.randn(1, seq_len, SHAPE["dim"], requires_grad=True)
    layers = {name: make() for name, make in LAYERS.items()}
    raw: dict[str, list[tuple[float, float]]] = {name: [] for name in layers}
    for round_ in range(repeats + 1):
        for name, layer in layers.items():
            taken = once(layer, x)
            if round_:
                raw[name].append(taken)
    base = [sum(pair) for pair in raw["dense"]]
    rows = {}
    for name, pairs in raw.items():
        ratios = [sum(pair) / b for pair, b in zip(pairs, base, strict=True)]
        forward = [p[0] / b[0] for p, b in zip(pairs, raw["dense"], strict=True)]
        rows[name] = {
            "forward_s": [p[0] for p in pairs],
            "backward_s": [p[1] for p in pairs],
            "total_ms_median": 1e3 * statistics.median(sum(p) for p in pairs),
            "ratio_forward": statistics.median(forward),
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
        }
    return rows


def status_bytes(field: str) -> int:
    """VmRSS (resident now) or VmHWM (highest since the last reset) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}: peak memory needs Linux")


def peak_bytes(layer: nn.Module, seq_len: int) -> int:
    """Growth of the resident size at its highest, as the kernel counts it."""
    x = torch.randn(1, seq_len, SHAPE["dim"], requires_grad=True)
    # Library set-up and weight gradients belong to no length: a tiny pass gets them over with.
    once(layer, torch.randn(1, 64, SHAPE["dim"]))
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far becomes the size now
    for _ in range(2):
        once(layer, x)
    return status_bytes("VmHWM") - before


def peak_in_fresh_process(name: str, seq_len: int, args: argparse.Namespace) -> int:
    """Peak growth in bytes of one layer, alone in a process."""
    command = [sys.executable, "-m", "benchmarks.attention_cpu", "--peak-of", name]
    command += ["--lengths", str(seq_len), "--threads", str(args.threads)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout)


def describe(results: list[dict[str, Any]]) -> str:
    """The table, in Markdown."""
    header = ("S", "layer", "path", "CPU ms", "ratio fwd", "ratio fwd+bwd", "peak MiB", "ratio")
    cells = []
    for row in results:
        spread = f"{row['ratio']:.2f} ({row['ratio_min']:.2f}-{row['ratio_max']:.2f})"
        times = (f"{row['total_ms_median']:.0f}", f"{row['ratio_forward']:.2f}", spread)
        memory = (f"{row['peak_bytes'] / 2**20:.0f}", f"{row['peak_ratio']:.2f}")
        cells.append((row["seq_len"], row["layer"], row["path"], *times, *memory))
    return markdown_table(header, cells)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every layer at every length."""
    results = []
    for seq_len in args.lengths:
        peaks = {name: peak_in_fresh_process(name, seq_len, args) for name in LAYERS}
        for name, row in time_layers(seq_len, args.repeats).items():
            path = choose_path(nsa.NSAConfig(), seq_len).value if name == "nsa" else "-"
            memory = {"peak_bytes": peaks[name], "peak_ratio": peaks[name] / peaks["dense"]}
            results.append({"seq_len": seq_len, "layer": name, "path": path, **memory, **row})
        print(f"S={seq_len} done", file=sys.stderr)
    return results


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    whole = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--lengths", type=whole, default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if args.peak_of:
        print(peak_bytes(LAYERS[args.peak_of](), args.lengths[0]))
        return 0
    print(describe(measure(args)))
    print(machine_line())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
