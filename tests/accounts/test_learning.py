"""What a launch proves about its gradients and its model, and what its types explain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runbook.accounts import gradients, model
from tests.accounts.launches import WORK, ending_of, honest, proof, proof_of


def test_the_model_of_the_last_step_is_held_against_the_oracle_in_fp32() -> None:
    _, ranks = honest()
    exact = {**proof(0)["oracle"], "attention": 1e-6}
    ranks = proof_of(ranks, 0, oracle=exact)[:1]
    spots = {**exact, "layer": 0.3}
    changed_since = ending_of(ranks, 0, proof={**proof(0), "oracle": spots})
    half = replace(WORK, dtype="bf16")
    assert "last batch" not in "; ".join(model.oracle_account(changed_since, half))
    (text,) = model.oracle_account(changed_since, replace(WORK, dtype="fp32"))
    assert "rank 0: layer is off by 0.3 of itself in the last batch" in text


def test_too_short_for_two_compressed_blocks_their_keys_may_stay_idle() -> None:
    _, ranks = honest()
    idle = proof_of(ranks, 0, own_gradient={"attention.k_cmp": 0.0})
    assert gradients.gradient_account(idle[:1], replace(WORK, seq_len=31)) == []
    assert "k_cmp" in gradients.gradient_account(idle[:1], replace(WORK, seq_len=32))[0]


@pytest.mark.parametrize(
    ("dtype", "device", "least", "most"),
    [
        ("bf16", "cuda", 0.02, 0.05),
        ("fp16", "cuda", 0.002, 0.005),
        ("fp32", "cuda", 0.002, 0.005),
        ("fp32", "cpu", 1e-5, 2e-4),
    ],
)
def test_what_a_type_explains(dtype: str, device: str, least: float, most: float) -> None:
    assert least < model.oracle_tolerance(replace(WORK, dtype=dtype, device=device)) < most
