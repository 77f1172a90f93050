"""The real trainer with one planted fault: `faulty.py KIND RANK STEP -- trainer arguments`.

The fault happens inside the real step of the real process; nothing of the trainer is replaced.
"""

from __future__ import annotations

import os
import sys
import time

import torch

from nsa.train.__main__ import main
from nsa.train.engine import Engine

KIND, RANK, STEP = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
_calls = 0
_loss = Engine.loss


def _drift(engine: Engine) -> None:
    with torch.no_grad():
        next(engine.model.parameters()).add_(1.0)


def _faulty_loss(self: Engine, tokens: torch.Tensor, *, wrapped: bool = True) -> torch.Tensor:
    global _calls
    _calls += 1
    now = _calls == STEP and int(os.environ.get("RANK", "0")) == RANK
    if now and KIND == "drift":
        _drift(self)
    loss = _loss(self, tokens, wrapped=wrapped)
    if not now:
        return loss
    if KIND == "nan":
        return loss * float("nan")
    if KIND == "stuck":
        time.sleep(3600)
    if KIND == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if KIND == "crash":
        raise ZeroDivisionError("planted")
    return loss


Engine.loss = _faulty_loss  # type: ignore[method-assign]

if __name__ == "__main__":
    code = main(sys.argv[sys.argv.index("--") + 1 :], os.environ)
    sys.stderr.flush()
    os._exit(code)
