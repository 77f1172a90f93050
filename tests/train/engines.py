"""The trainer's engine on one CPU, and what it trains on."""

from __future__ import annotations

import torch

from nsa.data import Batch
from nsa.launch.plan import plan_launch
from nsa.launch.ranks import choose_device, start_ranks
from nsa.step.engine import Engine
from tests.train.launching import SMOKE

S = 128


def planned(*words: str, **toggles: str) -> Engine:
    """The smoke config's, as these words and toggles ask for it, which are not yet in force."""
    asked = ["--config", str(SMOKE), "--ddp", "0", *words]
    plan = plan_launch(asked, {"NSA_PREFILL_BATCHED": "1", **toggles})
    return Engine(plan, start_ranks(plan, choose_device(plan)))


def engine(*words: str, **toggles: str) -> Engine:
    """The same with the toggles in force."""
    made = planned(*words, **toggles)
    made.configure(made.plan.toggles)
    return made


def batch(seed: int = 5, seq_len: int = S) -> Batch:
    """Two rows of bytes, by their seed."""
    generator = torch.Generator().manual_seed(seed)
    return Batch(tokens=torch.randint(0, 256, (2, seq_len + 1), generator=generator))
