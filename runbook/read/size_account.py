"""The account of the model's size: its parameters as env.json counts them, and by its shape.

Like `runbook.read.accounts`: what does not balance, in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runbook.read.first_weights import NO_SHAPE, groups_of

# Of a parameter in a checkpoint: itself and two moments of Adam, in fp32.
_BYTES_OF_A_PARAMETER = 12
# Room beside the checkpoints that are kept: one more is written before any is removed.
DISK_MARGIN = 1.1


def size_account(env: Mapping[str, Any]) -> list[str]:
    """env.json counts the parameters that a model of its config has, a shared one once."""
    told = (env.get("effective") or {}).get("n_params")
    try:
        count = parameters(env)
    except NO_SHAPE:
        return ["env.json does not say which shape the model has"]
    if told == count:
        return []
    return [f"env.json counts {told} parameters, a model of its config has {count}"]


def parameters(env: Mapping[str, Any]) -> int:
    """Parameters of the model that env.json's config describes. Raises as `groups_of` does."""
    return int(sum(group.pieces * group.size for group in groups_of(env).values()))


def checkpoint_gib(count: int) -> float:
    """GiB of the checkpoint of a model of so many parameters."""
    return count * _BYTES_OF_A_PARAMETER / 1024**3
