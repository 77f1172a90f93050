"""torch's flash attention for the CPU, which has none: the operators' documented meaning, float64.

`varlen_attn` is torch's own; only the two operators of ATen under it, which have kernels for CUDA
alone, are lent a slow one for the length of a `with`. Written from the documentation: query i of a
sequence of lq queries on lk keys sees key j if i + lk - lq - left <= j <= i + lk - lq + right, a
negative side is open; with fewer key heads than query heads, neighboring query heads share one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.library import Library


@dataclass
class Flash:
    """The stand-in. `shift` moves the left edge of the window: a kernel that is wrong by one."""

    shift: int = 0
    windows: list[tuple[int, int]] = field(default_factory=list)
    shapes: list[tuple[tuple[int, ...], ...]] = field(default_factory=list)

    def _pieces(
        self, q: Tensor, k: Tensor, ends: tuple[list[int], list[int]], given: dict[str, Any]
    ) -> Iterator[tuple[tuple[slice, int], tuple[slice, int], Tensor]]:
        """For each sequence and head: where its queries and keys lie, and the scores [lq,lk]."""
        left, right = given["window_size_left"], given["window_size_right"]
        for (q0, q1), (k0, k1) in zip(*map(pairwise, ends), strict=True):
            rows, keys = torch.arange(q1 - q0)[:, None], torch.arange(k1 - k0)
            middle = rows + (k1 - k0) - (q1 - q0)
            hidden = torch.zeros(q1 - q0, k1 - k0, dtype=torch.bool)
            if left >= 0:
                hidden |= keys < middle - left - self.shift
            if right >= 0 or given["is_causal"]:
                hidden |= keys > middle + max(right, 0)
            for head in range(q.shape[1]):
                mine = slice(q0, q1), head
                theirs = slice(k0, k1), head // (q.shape[1] // k.shape[1])
                logits = q[mine] @ k[theirs].T * given["scale"]
                yield mine, theirs, logits.masked_fill(hidden, -torch.inf)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *how: Any, **given: Any
    ) -> tuple[Tensor, ...]:
        """`aten::_flash_attention_forward` with sequences behind each other."""
        ends_q, ends_k, max_q, max_k, dropout_p, is_causal, _ = how
        assert ends_q.dtype == ends_k.dtype == torch.int32
        assert dropout_p == 0 and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        ends = ends_q.tolist(), ends_k.tolist()
        for most, found in ((max_q, ends[0]), (max_k, ends[1])):
            assert most == max(b - a for a, b in pairwise(found))
        self.windows.append((given["window_size_left"], given["window_size_right"]))
        self.shapes.append((tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        wq, wk, wv = q.double(), k.double(), v.double()
        out, lse = torch.empty_like(wq), wq.new_empty(q.shape[1], q.shape[0])
        for mine, theirs, logits in self._pieces(wq, wk, ends, given | {"is_causal": is_causal}):
            out[mine] = logits.softmax(-1) @ wv[theirs]
            lse[mine[1], mine[0]] = logits.logsumexp(-1)
        nothing = torch.zeros(2, dtype=torch.uint64)
        return out.to(q.dtype), lse.float(), nothing, nothing, q.new_empty(0)

    def backward(self, *tensors: Any, **given: Any) -> tuple[Tensor, ...]:
        """`aten::_flash_attention_backward`: the gradients of softmax(q k^T) v."""
        grad, q, k, v, _, _, ends_q, ends_k, *_, is_causal, _, _ = tensors
        wq, wk, wv, g = q.double(), k.double(), v.double(), grad.double()
        dq, dk, dv = torch.zeros_like(wq), torch.zeros_like(wk), torch.zeros_like(wv)
        ends = ends_q.tolist(), ends_k.tolist()
        for mine, theirs, logits in self._pieces(wq, wk, ends, given | {"is_causal": is_causal}):
            p = logits.softmax(-1)
            dv[theirs] += p.T @ g[mine]
            dp = g[mine] @ wv[theirs].T
            ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * given["scale"]
            dq[mine] += ds @ wk[theirs]
            dk[theirs] += ds.T @ wq[mine]
        return tuple(d.to(q.dtype) for d in (dq, dk, dv))


@contextmanager
def flash_on_cpu(*, shift: int = 0) -> Iterator[Flash]:
    """Lend the CPU a flash kernel; `shift` as in `Flash`."""
    flash, library = Flash(shift=shift), Library("aten", "IMPL")
    try:
        library.impl("_flash_attention_forward", flash.forward, "CPU")
        library.impl("_flash_attention_backward", flash.backward, "CPU")
        yield flash
    finally:
        library._destroy()
