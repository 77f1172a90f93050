"""What one micro-batch of the production model costs a host that feeds a CUDA device.

    python -m benchmarks.step_calls [--lengths 2048] [--layers 12] [--operators N]

Counts the operator calls that are not views (each is at least one launch), forward and backward, of
the path that a CUDA device takes, in bf16 autocast, and the most bytes that are alive at a time,
weights and gradients included. The same for the model with dense causal attention. No GPU is
needed: shapes, types and devices are real, the numbers are not (`tests/attention/fake_cuda.py`).
Memory is what tensors hold, without what an allocator loses between them.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.program import markdown_table, numbers
from nsa.config import Kernels, ModelConfig, NSAConfig, Way
from nsa.layer import rotations
from nsa.model import NSALanguageModel, mean_loss
from tests.attention.fake_cuda import Watched, fake_cuda


class DenseAttention(nn.Module):
    """Dense causal attention with rotary positions and grouped keys: x [B,S,dim] to [B,S,dim]."""

    def __init__(self, cfg: NSAConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.in_proj = nn.Linear(cfg.dim, (cfg.n_heads + 2 * cfg.n_kv_groups) * cfg.d_k, bias=False)
        self.out_proj = nn.Linear(cfg.n_heads * cfg.d_v, cfg.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Turn queries and keys, attend, project."""
        cfg, seq_len = self.cfg, x.shape[1]
        y = self.in_proj(x).unflatten(-1, (-1, cfg.d_k))
        turned, v = y.split([cfg.n_heads + cfg.n_kv_groups, cfg.n_kv_groups], 2)
        turns = rotations(torch.arange(seq_len, device=x.device), cfg.d_k, 1e4, torch.float32)
        pairs = torch.view_as_complex(turned.float().unflatten(-1, (-1, 2))) * turns[:, None]
        turned = torch.view_as_real(pairs).flatten(-2).to(v.dtype)
        q, k = turned.split([cfg.n_heads, cfg.n_kv_groups], 2)
        k, v = (t.repeat_interleave(cfg.heads_per_group, 2).transpose(1, 2) for t in (k, v))
        out = scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True)
        return self.out_proj(out.transpose(1, 2).flatten(2))


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Calls by operator, and bytes at the peak."""

    calls: dict[str, int]
    peak_bytes: int

    @property
    def total(self) -> int:
        """All calls."""
        return sum(self.calls.values())


def build(
    cfg: ModelConfig,
    *,
    dense: bool,
    device: str,
    kernels: Kernels = "masked",
) -> NSALanguageModel:
    """The model, or the same with dense attention, its weights on the device."""
    with torch.device(device):
        model = NSALanguageModel(cfg)
        for layer in model.layers:
            layer.attention.way = Way(kernels=kernels)
            if dense:
                layer.attention = DenseAttention(cfg.attention)
    return model


def micro_batch(model: nn.Module, tokens: Tensor) -> None:
    """Forward and backward, as the trainer's engine runs them in bf16."""
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(tokens[:, :-1])
    mean_loss(logits, tokens[:, 1:]).backward()


def measure(
    cfg: ModelConfig,
    seq_len: int,
    *,
    dense: bool = False,
    kernels: Kernels = "masked",
) -> Cost:
    """One micro-batch on a CUDA device that is not there; a first one makes what is kept."""
    with fake_cuda(), Watched() as watched:
        model = build(cfg, dense=dense, device="cuda", kernels=kernels)
        tokens = torch.zeros(1, seq_len + 1, dtype=torch.int64, device="cuda")
        micro_batch(model, tokens)
        model.zero_grad()
        watched.calls.clear()
        watched.peak = watched.live
        micro_batch(model, tokens)
    return Cost(calls=dict(watched.calls), peak_bytes=watched.peak)


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", type=numbers, default=[2048])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--operators", type=int, default=0, metavar="N")
    args = parser.parse_args()
    cfg = replace(ModelConfig(vocab_size=256, n_layers=args.layers), gradient_checkpointing=False)
    rows: list[tuple[object, ...]] = []
    for seq_len in args.lengths:
        dense = measure(cfg, seq_len, dense=True)
        costs = {f"nsa, {kind}": measure(cfg, seq_len, kernels=kind) for kind in get_args(Kernels)}
        for name, cost in {"dense": dense, **costs}.items():
            ratio = cost.peak_bytes / dense.peak_bytes
            rows.append(
                (seq_len, name, cost.total, f"{cost.peak_bytes / 2**20:.0f}", f"{ratio:.2f}")
            )
    print(markdown_table(("S", "attention", "calls", "peak MiB", "of dense"), rows))
    for name, count in Counter(cost.calls).most_common(args.operators):
        print(f"    {count:6} {name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
