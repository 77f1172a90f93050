"""Loss on documents that are never trained on."""

from __future__ import annotations

import torch

from nsa.data.batch import Source
from nsa.train.engine import Engine


def validation_loss(engine: Engine, source: Source, batches: int) -> float:
    """Mean next-token loss in nats over `batches` batches of every rank. A collective."""
    total, count = 0.0, 0
    engine.model.eval()
    with torch.no_grad():
        for tokens in source.validation(batches):
            total += float(engine.loss(tokens.to(engine.device), wrapped=False))
            count += 1
    engine.model.train()
    summed, batches_seen = engine.ranks.sum([total, float(count)])
    return summed / batches_seen
