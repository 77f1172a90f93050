"""Is what lies on the disk what the run held when the save began, and which steps lie there?

Of a few tensors that the run's token draws, some elements are noted as a save begins. When the
launch is over, rank 0 reads these tensors of its newest checkpoint back and compares, bit by bit.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa.contract import checkpoint_name
from nsa.train.checkpoint import shared_state
from nsa.train.engine import Engine
from nsa.train.restore import read
from nsa.train.retention import numbered

# Of the model and of the optimizer each; no larger than is read in a moment.
_TENSORS, _LARGEST = 3, 1 << 22
_ELEMENTS = 64


class ReadBack:
    """Notes what saves have to hold; `told` says whether the newest one does."""

    def __init__(self, engine: Engine, *, token: str) -> None:
        self._engine = engine
        self._random = random.Random(f"read back {token}")  # noqa: S311 - which elements
        self._step: int | None = None
        self._places: dict[str, Tensor] = {}
        self._noted: dict[str, Tensor] = {}

    def note(self, step: int) -> None:
        """A save of this step begins: copy the elements. Waits for nothing."""
        if self._engine.ranks.rank != 0:
            return
        live = shared_state(self._engine)
        self._places = self._places or self._draw(live)
        self._step = step
        self._noted = {
            name: live[name].reshape(-1).index_select(0, places)
            for name, places in self._places.items()
        }

    def told(self, folder: Path) -> dict[str, Any] | None:
        """`step`, `tensors`, `elements` compared, how many of them are `other` ones, and `kept`.

        folder: of the checkpoints, all of which are written; `kept` are the steps that lie there.
        None on other ranks, and where none was saved. Raises CheckpointError where the newest
        cannot be read.
        """
        if self._step is None:
            return None
        saved = read(folder / checkpoint_name(self._step), names=self._places)
        other = 0
        for name, places in self._places.items():
            found = saved[name].reshape(-1).index_select(0, places.cpu())
            other += int((found != self._noted[name].cpu()).sum())
        return {
            "step": self._step,
            "tensors": sorted(self._places),
            "elements": sum(len(places) for places in self._places.values()),
            "other": other,
            "kept": sorted(numbered(folder)),
        }

    def _draw(self, live: dict[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for part in ("model.", "optimizer."):
            names = [
                name
                for name, tensor in live.items()
                if name.startswith(part) and 1 < tensor.numel() <= _LARGEST
            ]
            for name in self._random.sample(names, min(_TENSORS, len(names))):
                count = live[name].numel()
                places = self._random.sample(range(count), min(_ELEMENTS, count))
                found[name] = torch.tensor(sorted(places), device=live[name].device)
        return found
