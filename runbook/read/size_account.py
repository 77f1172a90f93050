"""The account of the model's size: its parameters as env.json counts them, and by its shape.

Like `runbook.read.accounts`: what does not balance, in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Keys, queries and values of three branches: each has keys and values of its own.
_BRANCHES = 3


def size_account(env: Mapping[str, Any]) -> list[str]:
    """env.json counts the parameters that a model of its config has, a shared one once."""
    told = (env.get("effective") or {}).get("n_params")
    try:
        count = parameters(env)
    except (AttributeError, KeyError, TypeError, OverflowError):
        return ["env.json does not say which shape the model has"]
    if told == count:
        return []
    return [f"env.json counts {told} parameters, a model of its config has {count}"]


def parameters(env: Mapping[str, Any]) -> int:
    """Parameters of the model that env.json's config describes.

    Raises AttributeError, KeyError or TypeError where env.json lacks a part of the shape, and
    OverflowError where that is no shape.
    """
    model, nsa = (_said(env["config"][section]) for section in ("model", "nsa"))
    dim, heads, groups = (model[name] for name in ("dim", "n_heads", "n_kv_groups"))
    widths = (model["d_k"], model["d_v"])
    queries_and_output = dim * heads * sum(widths)
    keys_and_values = _BRANCHES * dim * groups * sum(widths)
    gates = _BRANCHES * heads * (dim + 1)
    learned = sum(_compressing(nsa["l"], width) for width in widths)
    compression = {"avg": 0, "mlp": learned}[nsa["phi"]]
    hidden = max(1, round(model["mlp_ratio"] * dim))
    mlp = 3 * dim * hidden
    attention = queries_and_output + keys_and_values + gates
    layer = attention + mlp + 2 * dim + compression
    tables = 1 if model["tie_embeddings"] else 2
    vocabulary = env["effective"]["vocab_size"]
    return int(model["n_layers"] * layer + dim + tables * vocabulary * dim)


def _said(section: Mapping[str, Any]) -> dict[str, Any]:
    """What a section says; a null says nothing."""
    return {name: value for name, value in section.items() if value is not None}


def _compressing(block: int, width: int) -> int:
    """Parameters that turn a block of keys or values into one: positions and two products."""
    flat, inner = block * width, 2 * width
    return flat + (flat + 1) * inner + inner * width
