"""The optimizer of a launch: AdamW, plain or fused, and the learning rate of every step."""

from __future__ import annotations

import math

from torch import nn
from torch.optim import AdamW

from nsa.settings import TrainSection

# The cosine ends at this share of the learning rate.
FINAL_LR_SHARE = 0.1


def learning_rate(
    step: int, *, peak: float, warmup_steps: int, total_steps: int, shape: str
) -> float:
    """Rate of optimizer step `step` (from 1): a linear ramp, then cosine down to a tenth."""
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if shape == "constant":
        return peak
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    share = FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))
    return peak * share


def new_optimizer(model: nn.Module, train: TrainSection, *, fused: bool) -> AdamW:
    """AdamW over the model's parameters; what is no matrix does not decay."""
    # fused=None, not False: with False torch would also drop its multi-tensor kernels, and
    # the comparison would be against a loop over parameters.
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": train.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=train.lr, betas=(0.9, 0.95), fused=fused or None)


def switched(optimizer: AdamW, model: nn.Module, train: TrainSection, *, fused: bool) -> AdamW:
    """A new optimizer with the state of this one, fused or not."""
    device = next(model.parameters()).device
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group["fused"] = fused or None
    for entry in state["state"].values():
        # The fused kernel keeps its step count on the device, the others on the host.
        entry["step"] = entry["step"].to(device if fused else "cpu")
    made = new_optimizer(model, train, fused=fused)
    made.load_state_dict(state)
    return made


def is_fused(optimizer: AdamW) -> bool:
    """Does the optimizer itself say that it runs the fused kernel?"""
    return all(bool(group["fused"]) for group in optimizer.param_groups)
