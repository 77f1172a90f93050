"""What one micro-batch of the production model costs a host that feeds a CUDA device.

    python -m benchmarks.step_calls [--lengths 2048] [--layers 12] [--operators N]
    python -m benchmarks.step_calls --graphs

Counts the operator calls that are not views (each is at least one launch), forward and backward, of
the path that a CUDA device takes, in bf16 autocast, and the most bytes that are alive at a time,
weights and gradients included. The same for the model with dense causal attention. No GPU is
needed: shapes, types and devices are real, the numbers are not (`tests/attention/fake_cuda.py`).
Memory is what tensors hold, without what an allocator loses between them.

With --graphs a layer of each way goes through torch.compile as NSA_COMPILE=layer does it, on shapes
only, up to the graphs of its two passes. Printed are the graphs, the breaks, and what these two
call: operators that a compiler takes as they are (products, SDPA, ours), and all others that are
not views, which it fuses into loops whose number only a device can tell.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from nsa.config import ModelConfig, NSAConfig, Selected, Way, Window
from nsa.kernels.compiled import compile_layers, count_compiled
from nsa.model import Layer, NSALanguageModel, mean_loss
from nsa.projection import rotations
from tests.attention.fake_cuda import _ALIASES, Watched, _is_view, fake_cuda

# The ways of a CUDA device, and a CPU's own.
WAYS = {
    "masks": Way(force_sdpa=True),
    "varlen": Way(force_sdpa=True, window="varlen"),
    "Triton": Way(force_sdpa=True, window="triton", selected="triton"),
    "plain loops": Way(force_sdpa=True, selection_ranges="v1"),
    "CPU": Way(),
}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
_OPAQUE = ("nsa::", "torch_attn::")


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
    """Calls by operator, bytes at the peak, and seconds of the host (of the tracing one, here)."""

    calls: dict[str, int]
    peak_bytes: int
    host_s: float

    @property
    def total(self) -> int:
        """All calls."""
        return sum(self.calls.values())


def build(
    cfg: ModelConfig,
    *,
    dense: bool,
    device: str,
    window: Window = "masked",
    selected: Selected = "sdpa",
) -> NSALanguageModel:
    """The model, or the same with dense attention, its weights on the device."""
    with torch.device(device):
        model = NSALanguageModel(cfg)
        for layer in model.layers:
            layer.attention.way = Way(window=window, selected=selected)
            if dense:
                layer.attention = DenseAttention(cfg.attention)
    return model


def micro_batch(model: nn.Module, tokens: Tensor) -> None:
    """Forward and backward, as the trainer's engine runs them in bf16."""
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(tokens[:, :-1])
    mean_loss(logits, tokens[:, 1:]).backward()


@dataclass(kw_only=True)
class Made:
    """What the compiler made of a layer: breaks, graphs, and calls of the two passes."""

    graphs: int = 0
    breaks: int = 0
    as_they_are: Counter[str] = field(default_factory=Counter)
    fused: Counter[str] = field(default_factory=Counter)

    def note(self, graph: torch.fx.GraphModule) -> None:
        """Count the calls of a pass."""
        for node in graph.graph.nodes:
            if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
                continue
            name = node.target._schema.name.removeprefix("aten::")
            if _is_view(node.target) or name in _ALIASES:
                continue
            kept = name in _PRODUCTS or name.startswith(_OPAQUE) or "_scaled_dot_product" in name
            (self.as_they_are if kept else self.fused)[name] += 1


def compile_one(cfg: ModelConfig, seq_len: int, way: Way) -> Made:
    """A layer by a way, forward and backward, on tensors without numbers."""
    made, before = Made(), count_compiled()

    def noting(graph: torch.fx.GraphModule, _: object) -> Any:
        made.note(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=noting, partition_fn=min_cut_rematerialization_partition)
    with FakeTensorMode():
        layer = Layer(cfg)
        layer.attention.way = way
        x = torch.randn(1, seq_len, cfg.attention.dim, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = layer(x, by=compile_layers(backend).layer)
        out.sum().backward()
    did = count_compiled()
    made.graphs, made.breaks = did.graphs - before.graphs, did.breaks - before.breaks
    return made


def host_calls(cfg: ModelConfig, seq_len: int) -> dict[str, int]:
    """Calls that the host makes in a micro-batch, by path; the last three follow from the first.

    A recorded layer copies its input and its output's gradient to where they were. Of two
    micro-batches the first one's gradients of the layers are copied, the second one's added.
    """
    default = measure(cfg, seq_len).total
    fewer = measure(replace(cfg, n_layers=cfg.n_layers - 1), seq_len).total
    by_kernels = measure(cfg, seq_len, window="triton", selected="triton").total
    beside = default - cfg.n_layers * (default - fewer)
    with torch.device("meta"):
        parameters = len(list(Layer(cfg).parameters()))
    return {
        "default": default,
        "Triton": by_kernels,
        "NSA_COMPILE=layer, any way": beside + 2 * cfg.n_layers,
        "NSA_CUDA_GRAPHS=1, any way, one micro-batch": beside + 4 * cfg.n_layers,
        "NSA_CUDA_GRAPHS=1, any way, each of two": beside + (4 + parameters) * cfg.n_layers,
    }


def graphs(cfg: ModelConfig, seq_len: int) -> None:
    """Print the table of all ways, and that of the host's calls."""
    print("| way | graphs | breaks | products, SDPA, ours | others, to be fused |")
    print("|---|---:|---:|---:|---:|")
    for name, way in WAYS.items():
        made = compile_one(cfg, seq_len, way)
        kept, fused = made.as_they_are.total(), made.fused.total()
        print(f"| {name} | {made.graphs} | {made.breaks} | {kept} | {fused} |")
    print("\n| path | calls of a micro-batch |\n|---|---:|")
    for name, count in host_calls(cfg, seq_len).items():
        print(f"| {name} | {count} |")


def measure(
    cfg: ModelConfig,
    seq_len: int,
    *,
    dense: bool = False,
    batch: int = 1,
    window: Window = "masked",
    selected: Selected = "sdpa",
) -> Cost:
    """One micro-batch on a CUDA device that is not there; a first one makes what is kept."""
    with fake_cuda(), Watched() as watched:
        model = build(cfg, dense=dense, device="cuda", window=window, selected=selected)
        tokens = torch.zeros(batch, seq_len + 1, dtype=torch.int64, device="cuda")
        micro_batch(model, tokens)
        model.zero_grad()
        watched.calls.clear()
        watched.peak = watched.live
        start = time.perf_counter()
        micro_batch(model, tokens)
        seconds = time.perf_counter() - start
    return Cost(
        calls=dict(watched.calls),
        peak_bytes=watched.peak,
        host_s=seconds,
    )


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    whole = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--lengths", type=whole, default=[2048])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--operators", type=int, default=0, metavar="N")
    parser.add_argument("--graphs", action="store_true", help="what a compiled layer calls")
    args = parser.parse_args()
    cfg = replace(ModelConfig(vocab_size=256, n_layers=args.layers), gradient_checkpointing=False)
    if args.graphs:
        graphs(cfg, args.lengths[0])
        return 0
    print("| S | attention | calls | peak MiB | of dense |\n|---:|---|---:|---:|---:|")
    for seq_len in args.lengths:
        dense = measure(cfg, seq_len, dense=True, batch=args.batch)
        rows = {"dense": dense}
        for window in get_args(Window):
            found = measure(cfg, seq_len, batch=args.batch, window=window)
            rows[f"nsa, window {window}"] = found
        for name, cost in rows.items():
            ratio = cost.peak_bytes / dense.peak_bytes
            mib = cost.peak_bytes / 2**20
            print(f"| {seq_len} | {name} | {cost.total} | {mib:.0f} | {ratio:.2f} |")
        for name, count in sorted(found.calls.items(), key=lambda pair: -pair[1])[: args.operators]:
            print(f"    {count:6} {name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
