"""NSA for one query at a time, written from the equations with plain tensor indexing.

Shares no code with the package: only these few lines have to be believed. Slow on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Inputs = dict[str, Tensor]
SMALL = {
    "dim": 24,
    "n_heads": 6,
    "n_kv_groups": 2,
    "d_k": 8,
    "d_v": 6,
    "l": 8,
    "d": 4,
    "l_sel": 8,
    "n_sel": 4,
    "w": 10,
    "phi": "avg",
}


# Many tiny parallel regions: threads that wait for a busy core cost minutes, and their waiting
# counts as the CPU time by which the paths are compared.
if not torch.cuda.is_available():
    torch.set_num_threads(1)


def device() -> torch.device:
    """The device under test: the GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random_inputs(
    shape: dict[str, int], batch: int, seq_len: int, *, seed: int, dtype: torch.dtype
) -> Inputs:
    """Leaf tensors for one attention call with phi "avg"."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        values = torch.randn(*size, generator=generator, dtype=torch.float64)
        return values.to(device=device(), dtype=dtype)

    heads, groups = shape["n_heads"], shape["n_kv_groups"]
    inputs = {"q": normal(batch, seq_len, heads, shape["d_k"])}
    for branch in ("cmp", "sel", "win"):
        inputs[f"k_{branch}"] = normal(batch, seq_len, groups, shape["d_k"])
        inputs[f"v_{branch}"] = normal(batch, seq_len, groups, shape["d_v"])
    inputs["gates"] = normal(batch, seq_len, heads, 3).sigmoid()
    return {name: value.requires_grad_() for name, value in inputs.items()}


def _softmax_over(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [h,n] and outputs [h,Dv] of queries [h,Dk] on keys [n,Dk], values [n,Dv]."""
    weights = torch.softmax(q @ k.T / q.shape[-1] ** 0.5, -1)
    return weights, weights @ v


def _chosen(p: Tensor, t: int, s: dict[str, int]) -> list[int]:
    """Blocks for probabilities p [n], summed over the group, at position t (equations 9, 11)."""
    visible = range(t // s["l_sel"] + 1)
    scores = []
    for j in visible:
        score = torch.zeros((), dtype=p.dtype)
        # Those that begin behind the block, or end before it, overlap by nothing.
        begin, end = (j * s["l_sel"] - s["l"]) // s["d"] + 1, -(-(j + 1) * s["l_sel"] // s["d"])
        for i in range(max(0, begin), min(end, p.shape[0])):
            first = max(j * s["l_sel"], i * s["d"])
            last = min((j + 1) * s["l_sel"], i * s["d"] + s["l"])
            score = score + p[i] * (max(0, last - first) // s["d"])
        scores.append(float(score))
    must = {0, visible[-1], max(0, visible[-1] - 1)}
    rest = sorted((j for j in visible if j not in must), key=lambda j: (-scores[j], j))
    return sorted([*must, *rest][: s["n_sel"]])


def attend(
    x: Inputs, s: dict[str, int], positions: Sequence[int] | None = None
) -> tuple[Tensor, list[list[list[list[int]]]]]:
    """Output [B,S,H,Dv] and the blocks of each batch element, position and group.

    Of `positions` only where they are given: output [B,P,H,Dv], and blocks in their order.
    """
    x = {name: value.cpu() for name, value in x.items()}
    batch, seq_len, heads, _ = x["q"].shape
    groups, share = s["n_kv_groups"], heads // s["n_kv_groups"]
    places = range(seq_len) if positions is None else positions
    out, blocks = [], [[[[] for _ in range(groups)] for _ in places] for _ in range(batch)]
    for b in range(batch):
        for place, t in enumerate(places):
            for g in range(groups):
                mine = slice(g * share, (g + 1) * share)
                q, gate = x["q"][b, t, mine], x["gates"][b, t, mine]
                n = max(0, (t + 1 - s["l"]) // s["d"] + 1)
                pooled = [
                    torch.stack(
                        [x[name][b, i * s["d"] : i * s["d"] + s["l"], g].mean(0) for i in range(n)]
                    )
                    if n
                    else x[name][b, :0, g]
                    for name in ("k_cmp", "v_cmp")
                ]
                weights, total = _softmax_over(q, *pooled)
                total = gate[:, 0:1] * total
                picked = _chosen(weights.detach().sum(0), t, s)
                blocks[b][place][g] = picked
                tokens = [
                    i for j in picked for i in range(j * s["l_sel"], (j + 1) * s["l_sel"]) if i <= t
                ]
                near = list(range(max(0, t - s["w"] + 1), t + 1))
                for k, (branch, seen) in enumerate((("sel", tokens), ("win", near)), 1):
                    keys, values = x[f"k_{branch}"][b, seen, g], x[f"v_{branch}"][b, seen, g]
                    total = total + gate[:, k : k + 1] * _softmax_over(q, keys, values)[1]
                out.append(total)
    return torch.stack(out).view(batch, len(places), heads, -1), blocks
