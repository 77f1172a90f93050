"""First weights as a healthy launch tells of them: a sample of its distribution, in the middle."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Mapping
from typing import Any

_NORMAL = statistics.NormalDist()
_STD = 0.02


def first_weights(env: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What a rank tells of its parameters before the first step, of env.json's config."""
    model, nsa = env["config"]["model"], env["config"]["nsa"]
    dim, layers, heads, groups = (
        model[name] for name in ("dim", "n_layers", "n_heads", "n_kv_groups")
    )
    hidden = round(model["mlp_ratio"] * dim)
    deep = _STD / math.sqrt(2 * layers)
    sizes = {
        "q": heads * model["d_k"],
        **{f"k_{branch}": groups * model["d_k"] for branch in ("cmp", "sel", "win")},
        **{f"v_{branch}": groups * model["d_v"] for branch in ("cmp", "sel", "win")},
        "gates": 3 * heads,
    }
    drawn = {f"attention.{part}": (layers, rows * dim, _STD) for part, rows in sizes.items()}
    drawn |= {
        "embedding": (1, env["effective"]["vocab_size"] * dim, _STD),
        "attention.out_proj": (layers, heads * model["d_v"] * dim, deep),
        "mlp.gate_up": (layers, 2 * hidden * dim, _STD),
        "mlp.down": (layers, hidden * dim, deep),
    }
    if not model["tie_embeddings"]:
        drawn["head"] = drawn["embedding"]
    for kind in "kv" if nsa["phi"] == "mlp" else "":
        width, name = model[f"d_{kind}"], f"attention.compress_{kind}"
        drawn[f"{name}.position"] = (layers, nsa["l"] * width, _STD)
        drawn[f"{name}.net.0"] = (layers, 2 * nsa["l"] * width**2, _STD)
        drawn[f"{name}.net.2"] = (layers, 2 * width**2, _STD)
    told = {name: _told(name, *how) for name, how in drawn.items()}
    norms = {"attention_norm": layers, "mlp_norm": layers, "norm": 1}
    told |= {name: _told(name, count, dim, 0.0, middle=1.0) for name, count in norms.items()}
    biases = {"attention.gate_bias": 3 * heads}
    if nsa["phi"] == "mlp":
        biases |= {f"attention.compress_{kind}.net.0.bias": 2 * model[f"d_{kind}"] for kind in "kv"}
    return told | {name: _told(name, layers, size, 0.0) for name, size in biases.items()}


def _told(name: str, pieces: int, size: int, std: float, middle: float = 0.0) -> dict[str, Any]:
    # Of so many elements about one lies beyond on each side.
    furthest = std * _NORMAL.inv_cdf(1 - 1 / (size + 1))
    each = {
        "n": size,
        "mean": middle,
        "rms": std or middle,
        "least": middle - furthest,
        "most": middle + furthest,
    }
    names = (f"{name} {number}" for number in range(pieces))
    return {
        **{key: [value] * pieces for key, value in each.items()},
        "signs": [hashlib.blake2b(n.encode(), digest_size=8).hexdigest() for n in names],
    }
