"""The account of checkpoints: the newest one holds what the run held when its save began."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from nsa.contract import checkpoint_step
from runbook.records.evidence import RankLog


def saved_account(ranks: Sequence[RankLog]) -> list[str]:
    """Rank 0 has read some tensors of its newest checkpoint back, where it wrote one at all."""
    if not ranks or not ranks[0].checkpoints:
        return []
    newest = PurePath(str(ranks[0].checkpoints[-1].get("path"))).name
    told: Mapping[str, Any] = ranks[0].ending.get("saved") or {}
    if not told.get("elements"):
        return [f"nothing of the checkpoint {newest} was read back"]
    if told.get("step") != checkpoint_step(newest):
        return [f"step {told.get('step')} was read back, the newest checkpoint is {newest}"]
    if told.get("other") != 0:
        return [
            f"{newest}: {told.get('other')} of {told['elements']} elements read back are not what "
            f"the run held when the save began ({', '.join(map(str, told.get('tensors') or ()))})"
        ]
    return []
