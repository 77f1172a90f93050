"""Rates and warm-up against the plan, readings of gates and memory against a second source."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from runbook.accounts.gradients import clip_account, norm_account
from runbook.accounts.optimizer import rate_account, update_account
from runbook.accounts.tables import memory_account
from tests.accounts.launches import WORK, ending_of, honest, proof_of, steps_of

PEAK, RAMP, TOTAL, STEPS = 3e-3, 10, 200, 60


def env(shape: str = "cosine", **values: Any) -> dict[str, Any]:
    train = {"lr": PEAK, "warmup_steps": RAMP, "lr_schedule": shape, **values}
    return {"config": {"train": train}, "effective": {"schedule_steps": TOTAL}}


def planned(shape: str = "cosine") -> pd.DataFrame:
    """A ramp, then half a cosine from the peak to a tenth of it, written down independently."""
    step = np.arange(1, STEPS + 1)
    angle = math.pi * (step - RAMP) / (TOTAL - RAMP)
    after = PEAK * (0.55 + 0.45 * np.cos(angle)) if shape == "cosine" else PEAK + 0 * step
    rate = np.where(step <= RAMP, PEAK * step / RAMP, after)
    return pd.DataFrame({"step": step, "lr": rate, "block": 0, "arm": "", "warmup": False})


@pytest.mark.parametrize("shape", ["cosine", "constant"])
def test_the_planned_rates_balance(shape: str) -> None:
    assert rate_account(planned(shape), env(shape)) == []


def test_rates_that_were_not_planned() -> None:
    flat = planned().assign(lr=PEAK)
    assert "lr of step 1 is 0.003, planned is 0.0003" in rate_account(flat, env())[0]
    assert "lr of step 11" in rate_account(planned("constant"), env())[0]
    assert "does not say" in rate_account(planned(), {"config": {}})[0]
    assert "does not say" in rate_account(planned(), env(lr=None))[0]


def test_a_trace_that_is_written_beside_a_step_may_take_memory() -> None:
    _, ranks = honest()
    cpu = replace(WORK, device="cpu")
    same = steps_of(steps_of(ranks, 0, rss_mib=301.0), 1, rss_mib=301.0)
    peak = np.where(np.arange(1, STEPS + 1) == 9, 520.0, 301.0)
    assert len(memory_account(steps_of(same, 0, rss_mib=peak), cpu)) == 1
    beside = steps_of(same, 0, rss_mib=peak, alone=peak == 301.0)
    assert memory_account(beside, cpu) == []


def test_what_a_gradient_scaler_and_a_resumed_launch_cannot_show() -> None:
    _, ranks = honest()
    half = replace(WORK, dtype="fp16")
    silent = proof_of(proof_of(ranks, 0, norm_told=None), 1, norm_told=None)
    assert clip_account(silent, half) == []
    assert len(clip_account(silent, WORK)) == 2
    skipped = ending_of(ranks, 0, updates=[58, 58], first_update={"moved": 0.0, "lr": 3e-4})
    assert update_account(skipped, half) == []
    assert len(update_account(skipped, WORK)) == 2
    resumed = tuple(
        replace(log, first_step=21, ending={**log.ending, "first_update": None}) for log in ranks
    )
    assert update_account(resumed, WORK) == []


def test_a_step_without_any_gradient_is_told() -> None:
    _, ranks = honest()
    steps = ranks[1].steps
    norms = steps["grad_norm"].where(~steps["step"].isin([7, 9]), 0.0)
    (text,) = norm_account(steps_of(ranks, 1, grad_norm=norms))
    assert text == "rank 1: the gradient norm is 0 in 2 steps, first 7"
    assert norm_account(ranks) == norm_account((replace(ranks[0], steps=None),)) == []
    assert norm_account(steps_of(ranks, 0, grad_norm=math.nan)) == []  # another row's to say


def test_without_a_limit_nothing_is_clipped() -> None:
    _, ranks = honest()
    free = replace(WORK, grad_clip=0.0)
    assert len(clip_account(ranks, free)) == 2
    assert clip_account(proof_of(proof_of(ranks, 0, norm_after=4.0), 1, norm_after=4.0), free) == []
