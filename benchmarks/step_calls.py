"""What one micro-batch of the production model costs a host that feeds a CUDA device.

    python -m benchmarks.step_calls [--lengths 2048] [--layers 12] [--operators N]
    python -m benchmarks.step_calls --kernels

Counts the operator calls that are not views (each is at least one launch), forward and backward, of
the path that a CUDA device takes, in bf16 autocast, and the most bytes that are alive at a time,
weights and gradients included. The same for the model with dense causal attention. No GPU is
needed: shapes, types and devices are real, the numbers are not (`tests/attention/fake_cuda.py`).
Memory is what tensors hold, without what an allocator loses between them.

`in compiled parts`: calls that NSA_COMPILE=dense takes over, each found inside one of the functions
of `nsa/dense.py` or in the backward pass of what they recorded. `compiled calls`: how often one of
these functions runs instead, forward and backward. How many kernels such a call starts is not known
without a device: --kernels compiles each function once with torch's backend for the CPU and prints
how many loops and products that made of it, as a hint.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, get_args
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from nsa import dense as dense_parts
from nsa.config import ModelConfig, NSAConfig, Way, Window
from nsa.dense import rotations
from nsa.kernels.compiled import compile_dense
from nsa.model import NSALanguageModel
from tests.attention import fake_cuda as fake_cuda_module
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
    """Calls by operator, bytes at the peak, and seconds of the host (of the tracing one, here)."""

    calls: dict[str, int]
    peak_bytes: int
    host_s: float

    inside: int = 0
    compiled: int = 0

    @property
    def total(self) -> int:
        """All calls."""
        return sum(self.calls.values())


class Parts:
    """Notes which calls are those of the dense parts: forward by where they are made, backward by
    the numbers that autograd gave to the nodes of their graph."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._spans: list[range] = []
        self.inside, self.forward_calls = 0, 0

    def reset(self) -> None:
        """A new micro-batch."""
        self._spans, self.inside, self.forward_calls = [], 0, 0

    def functions(self) -> dense_parts.Dense:
        """The dense parts, each call noted."""
        return dense_parts.Dense(
            enter_together=self._noted(dense_parts.enter_together),
            enter_apart=self._noted(dense_parts.enter_apart),
            leave=self._noted(dense_parts.leave),
            loss=self._noted(dense_parts.mean_loss),
        )

    def _noted(self, function: Any) -> Any:
        def call(*args: Any) -> Any:
            begin = torch._C._autograd._get_sequence_nr()
            with self._counting():
                found = function(*args)
            self._spans.append(range(begin, torch._C._autograd._get_sequence_nr()))
            self.forward_calls += 1
            return found

        return call

    @contextmanager
    def _counting(self) -> Iterator[None]:
        before = self._watched.total
        yield
        self.inside += self._watched.total - before

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around `walk_back`: what runs for a node of a dense part is counted too."""
        apply, add = fake_cuda_module._apply, fake_cuda_module._Arrived.add

        def noted_apply(node: Any, into: Any) -> Any:
            with self._counting() if self._owns(node) else nullcontext():
                return apply(node, into)

        def noted_add(arrived: Any, node: Any, place: int, grad: Tensor) -> None:
            with self._counting() if self._owns(node) else nullcontext():
                add(arrived, node, place, grad)

        with (
            patch.object(fake_cuda_module, "_apply", noted_apply),
            patch.object(fake_cuda_module._Arrived, "add", noted_add),
        ):
            yield

    def _owns(self, node: Any) -> bool:
        number = int(node._sequence_nr())
        return any(number in span for span in self._spans)


def build(
    cfg: ModelConfig, *, dense: bool, device: str, window: Window = "masked"
) -> NSALanguageModel:
    """The model, or the same with dense attention, its weights on the device."""
    with torch.device(device):
        model = NSALanguageModel(cfg)
        for layer in model.layers:
            layer.attention.way = Way(window=window)
            if dense:
                layer.attention = DenseAttention(cfg.attention)
    return model


def micro_batch(model: nn.Module, tokens: Tensor, parts: Parts | None = None) -> None:
    """Forward and backward, as the trainer's engine runs them in bf16."""
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(tokens[:, :-1])
    loss = dense_parts.mean_loss if parts is None else parts.functions().loss
    with nullcontext() if parts is None else parts.backward():
        loss(logits, tokens[:, 1:]).backward()


def kernels(cfg: ModelConfig, seq_len: int) -> None:
    """Compile each function for the CPU and print the loops and products of its two passes."""
    torch._inductor.config.force_disable_caches = True
    functions = compile_dense("dense")
    model = NSALanguageModel(replace(cfg, n_layers=1))
    x = torch.randn(1, seq_len, cfg.attention.dim, requires_grad=True)
    (layer,), half = model.layers, torch.bfloat16
    turns = torch.view_as_real(layer.attention.turns(seq_len, x))
    own = layer.attention
    calls = {
        "enter": lambda: functions.enter_together(
            x, layer.attention_norm, own.in_proj, own.gate_bias, turns, own.cfg
        ),
        "leave": lambda: (functions.leave(x, x.to(half), layer.mlp_norm, layer.mlp),),
        "loss": lambda: (functions.loss(x[..., : cfg.vocab_size].to(half), made),),
    }
    made = torch.zeros(1, seq_len, dtype=torch.int64)
    for name, call in calls.items():
        torch._inductor.metrics.reset()
        torch._dynamo.utils.counters.clear()
        with torch.autocast("cpu", dtype=half, enabled=name != "loss"):
            found = call()
        sum(part.float().sum() for part in found).backward()
        loops = torch._inductor.metrics.generated_kernel_count
        products = torch._dynamo.utils.counters["inductor"]["extern_calls"]
        print(f"{name}: {loops} loops and {products} products, forward and backward")


def measure(
    cfg: ModelConfig,
    seq_len: int,
    *,
    dense: bool = False,
    batch: int = 1,
    window: Window = "masked",
    compiled: bool = False,
) -> Cost:
    """One micro-batch on a CUDA device that is not there; a first one makes what is kept.

    compiled: note which calls NSA_COMPILE=dense takes over.
    """
    with fake_cuda(), Watched() as watched:
        parts = None
        model = build(cfg, dense=dense, device="cuda", window=window)
        if not dense:
            parts = Parts(watched) if compiled else None
            model.use(parts.functions() if parts else None)
        tokens = torch.zeros(batch, seq_len + 1, dtype=torch.int64, device="cuda")
        micro_batch(model, tokens, parts)
        model.zero_grad()
        if parts is not None:
            parts.reset()
        watched.calls.clear()
        watched.peak = watched.live
        start = time.perf_counter()
        micro_batch(model, tokens, parts)
        seconds = time.perf_counter() - start
    return Cost(
        calls=dict(watched.calls),
        peak_bytes=watched.peak,
        host_s=seconds,
        inside=parts.inside if parts else 0,
        compiled=2 * parts.forward_calls if parts else 0,
    )


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    whole = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--lengths", type=whole, default=[2048])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--operators", type=int, default=0, metavar="N")
    parser.add_argument(
        "--kernels", action="store_true", help="compile the dense parts for the CPU"
    )
    args = parser.parse_args()
    cfg = replace(ModelConfig(vocab_size=256, n_layers=args.layers), gradient_checkpointing=False)
    if args.kernels:
        kernels(cfg, 256)
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
        taken = measure(cfg, seq_len, batch=args.batch, compiled=True)
        print(
            f"S={seq_len}, NSA_COMPILE=dense: of {taken.total} calls {taken.inside} in compiled "
            f"parts, {taken.total - taken.inside} remain; {taken.compiled} compiled calls instead"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
