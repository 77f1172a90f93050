"""Which checkpoints of a run are kept, and how the others go. Torch-free."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nsa.contract import CHECKSUMS_JSON, checkpoint_step
from nsa.settings import TrainSection


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Keep the `last` newest (0: all), those of every `every` steps, and the `best` one.

    The best one has the lowest validation loss of those that were evaluated at their own step.
    """

    last: int = 0
    every: int = 0
    best: bool = False

    @classmethod
    def of(cls, train: TrainSection) -> Retention:
        """What a config asks for."""
        return cls(last=train.keep_last, every=train.keep_every, best=train.keep_best)

    def expendable(self, losses: Mapping[int, float | None]) -> list[int]:
        """The steps that need not be kept, of checkpoints by step with their validation losses."""
        if not self.last:
            return []
        steps = sorted(losses)
        kept = set(steps[-self.last :])
        if self.every:
            kept |= {step for step in steps if step % self.every == 0}
        known = {step: loss for step, loss in losses.items() if loss is not None}
        finite = {step: loss for step, loss in known.items() if math.isfinite(loss)}
        if self.best and finite:
            kept.add(min(finite, key=lambda step: (finite[step], step)))
        return [step for step in steps if step not in kept]


def numbered(checkpoints: Path) -> dict[int, Path]:
    """The checkpoints in a folder by step; what is being written or removed is none."""
    found = {}
    for folder in checkpoints.iterdir() if checkpoints.is_dir() else ():
        step = checkpoint_step(folder.name)
        if step is not None:
            found[step] = folder
    return found


def prune(checkpoints: Path, keep: Retention) -> None:
    """Remove what need not be kept. A half-removed one no longer has a checkpoint's name."""
    if not keep.last:
        return
    found = numbered(checkpoints)
    for step in keep.expendable({step: _loss(folder) for step, folder in found.items()}):
        leaving = found[step].with_name(f".{found[step].name}.removed")
        found[step].rename(leaving)
        shutil.rmtree(leaving)


def _loss(folder: Path) -> float | None:
    try:
        loss = json.loads((folder / CHECKSUMS_JSON).read_bytes())["val_loss"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # whoever damaged it: it can be the newest, never the best
    return float(loss) if isinstance(loss, int | float) else None
