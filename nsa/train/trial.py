"""A block's trial step: can its kernels run here at all, and is there memory for them?"""

from __future__ import annotations

import torch

from nsa.contract import OUT_OF_MEMORY
from nsa.data.source import Batch
from nsa.toggles import ToggleSet
from nsa.train.engine import Engine
from nsa.train.kernels import other_kernels
from nsa.train.launch import AUDITED

# What the CPU's allocator says.
_CPU_OOM = ("can't allocate memory", "DefaultCPUAllocator")


def needs_trial(toggles: ToggleSet) -> bool:
    """May torch find only while it runs that it has no kernel for these toggles?"""
    return any(toggles.flag(name) for name in AUDITED) or other_kernels(toggles)


def trial_step(engine: Engine, batch: Batch) -> str | None:
    """Forward and backward without communication or update: why they cannot run, or None."""
    parameters = [p for p in engine.model.parameters() if p.requires_grad]
    try:
        loss = engine.loss(batch.tokens.to(engine.device), wrapped=False)
        torch.autograd.grad(loss, parameters, allow_unused=True)
    except RuntimeError as error:
        text = " ".join(str(error).split())
        if not is_out_of_memory(error):
            return text
        torch.cuda.empty_cache()  # what was taken in vain is not the next arm's
        return OUT_OF_MEMORY + text
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Did memory run out, on the device or on the host?"""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _CPU_OOM)
