"""What a launch proves about its gradients and its model, and what its types explain."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from runbook.accounts import gradients, model, optimizer
from tests.accounts.launches import (
    STEPS,
    WORK,
    Ranks,
    changed,
    ending_of,
    honest,
    oracle_of,
    proof,
    proof_of,
)


@pytest.mark.parametrize(
    ("field", "fine", "wrong", "says"),
    [
        *(("layers", 1e-6, off, f"a layer is off by {off} of itself") for off in (0.3, None, -1.0)),
        ("seams", 0.0, 1.0, "1.0 modules get what the one before did not give"),
        ("seams", 0.0, None, "None modules get what the one before did not give"),
    ],
)
def test_a_layer_that_goes_otherwise_in_the_middle_of_a_launch_is_seen(
    field: str, fine: float, wrong: float | None, says: str
) -> None:
    """And what changes between modules, in half types, too."""
    ranks, work = honest()[1][:1], WORK
    if field == "layers":
        exact = {**proof(0)["oracle"], "attention": 1e-6}
        ranks = ending_of(proof_of(ranks, 0, oracle=exact), 0, proof={**proof(0), "oracle": exact})
        work = replace(WORK, dtype="fp32")
    twice = dict(ranks[0].ending["recomputed"])
    steps, step = dict.fromkeys(map(str, twice["steps"]), fine), twice["steps"][-1]
    told = ending_of(ranks, 0, recomputed={**twice, field: steps})
    assert model.oracle_account(told, work) == []
    told = ending_of(ranks, 0, recomputed={**twice, field: {**steps, str(step): wrong}})
    (text,) = model.oracle_account(told, work)
    assert says in text and f" in step {step}" in text
    assert f"(1 of {len(steps)} steps looked at)" in text


def test_micro_batches_add_up_in_all_digits() -> None:
    _, ranks = honest()
    assert gradients.gradient_account(proof_of(ranks, 0, kept=1e-7)[:1], WORK) == []
    (text,) = gradients.gradient_account(proof_of(ranks, 0, kept=2e-3)[:1], WORK)
    assert "a micro-batch's gradient is off by 0.002 of itself" in text


def test_too_short_for_two_compressed_blocks_their_keys_may_stay_idle() -> None:
    _, ranks = honest()
    for name, idle in (
        ("attention.k_cmp", True),
        ("compress.up", True),
        ("attention.k_sel", False),
    ):
        told = proof_of(ranks, 0, own_gradient={name: 0.0})[:1]
        assert (gradients.gradient_account(told, replace(WORK, seq_len=31)) == []) is idle
        assert name in gradients.gradient_account(told, replace(WORK, seq_len=32))[0]
    negative = proof_of(ranks, 0, own_gradient={"attention.k_cmp": -1.0})
    assert gradients.gradient_account(negative[:1], replace(WORK, seq_len=31))


FP32 = replace(WORK, dtype="fp32", wire="fp32", device="cpu")


def proves(**told: Any) -> Ranks:
    """Rank 1 alone, with this proof before its first step and after its last one."""
    _, ranks = honest()
    said = {**proof(1), **told}
    return changed(ending_of(ranks, 1, proof=said), 1, proof=said)[1:]


@pytest.mark.parametrize(
    ("wire", "off"), [("fp32", 1e-5), ("fp16", 2e-3), ("bf16", 1e-2), ("int8", 0.0)]
)
@pytest.mark.parametrize("side", ["mean_low", "mean_high"])
@pytest.mark.parametrize(("share", "found"), [(0.99, 0), (-0.99, 0), (1.01, 2), (-1.01, 2)])
def test_a_mean_of_known_numbers_after_its_travel(
    wire: str, off: float, side: str, share: float, found: int
) -> None:
    told: dict[str, Any] = {"mean_low": 1.0, "mean_high": 1.0, "wire": wire}
    ranks = proves(**told | {side: 1 + share * (off or 1e-9 * (abs(share) > 1))})
    for asked in (wire, None) if off else (None,):  # None: the arms differ in it
        assert len(gradients.gradient_account(ranks, replace(WORK, wire=asked))) == found


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"missing": None}, "does not say which parameters got no gradient"),
        ({"missing": ["a", "b"]}, ": no gradient for a, b"),
        ({"own_gradient": {}}, ": no gradient reaches anything"),
        ({"own_gradient": {"a": math.nan, "b": 1.0, "c": -1.0}}, ": no gradient reaches a, c"),
    ],
)
def test_a_gradient_that_does_not_arrive(told: dict[str, Any], says: str) -> None:
    first, last = gradients.gradient_account(proves(**told), WORK)
    assert first.startswith("rank 1") and first.endswith(says)
    assert last.startswith("rank 1 at the end") and last.endswith(says)


def test_only_fp16_scales_its_gradients_up_to_infinity() -> None:
    ranks = proves(own_gradient={"a": math.inf}, wire="bf16")
    assert gradients.gradient_account(ranks, replace(WORK, dtype="fp16")) == []
    assert len(gradients.gradient_account(ranks, replace(WORK, dtype="fp32"))) == 2


# Movement, at a learning rate of 1.


@pytest.mark.parametrize(
    ("moved", "says"),
    [
        (0.1001, ""),
        (0.1, "2 of 2 groups of parameters did not move: a, b (largest learning rate 1)"),
        (math.nan, "2 of 2 groups"),
        (1.5 * STEPS, ""),
        (1.5001 * STEPS, "a, b moved further than 60 steps of the learning rate 1 can"),
    ],
)
def test_parameters_move_by_the_rate(moved: float, says: str) -> None:
    _, ranks = honest()
    (alone,) = ending_of(ranks, 1, moved={"a": moved, "b": moved}, largest_lr=1.0)[1:]
    problems = optimizer.movement_account([alone])
    assert len(problems) == bool(says)
    assert all(text.startswith("rank 1") and says in text for text in problems)


@pytest.mark.parametrize("missing", [{"moved": None}, {"largest_lr": None}])
def test_a_rank_that_is_silent_about_movement_hides_no_other(missing: dict[str, Any]) -> None:
    _, ranks = honest()
    still = ending_of(ending_of(ranks, 0, **missing), 1, moved={"embedding": 0.0})
    *_, silent, other = optimizer.movement_account(still)
    assert silent == "rank 0 does not say how far its parameters moved"
    assert "rank 1: 1 of 1 groups of parameters did not move" in other
    (text,) = optimizer.movement_account(changed(ranks, 1, steps=None)[1:])
    assert "embedding, norm moved further than 0 steps" in text


def test_ranks_have_to_move_alike() -> None:
    _, ranks = honest()
    other = ending_of(ranks, 1, moved={"embedding": 0.011, "norm": 0.021})
    assert optimizer.movement_account(other) == [
        "rank 1's parameters moved otherwise than rank 0's: embedding, norm"
    ]


# The oracle


def spots(ranks: Ranks, **values: Any) -> Ranks:
    """Rank 0 alone, which found this in its first batch and the same in its last one."""
    ranks = oracle_of(ranks, **values)
    return ending_of(ranks, 0, proof=ranks[0].proof)[:1]


@pytest.mark.parametrize(
    ("dtype", "device", "most"),
    [
        ("bf16", "cuda", 8 / 2**8),
        ("fp16", "cuda", 8 / 2**11),
        ("fp32", "cuda", 8 / 2**11),
        ("fp32", "cpu", 2e-5),
        ("fp8", "cuda", 2e-5),  # of a type that is not known nothing is explained
    ],
)
@pytest.mark.parametrize(
    ("what", "times"),
    [*((name, 1) for name in ("attention", "gates", "layer", "logits")), ("slope", 8),
     ("blocks_shortfall", 1)],
)  # fmt: skip
def test_a_type_explains_eight_roundoffs_and_no_more(
    dtype: str, device: str, most: float, what: str, times: int
) -> None:
    _, ranks = honest()
    work = replace(WORK, dtype=dtype, device=device)
    batches = ["first", "last"] if dtype == "fp32" else ["first"]
    base = {"attention": most}
    most *= times
    assert model.oracle_account(spots(ranks, **base | {what: most}), work) == []
    for wrong in (most * 1.001, -1e-9, math.nan, None):
        found = model.oracle_account(spots(ranks, **base | {what: wrong}), work)
        for batch in batches:
            part = "a layer's gradient" if what == "slope" else what
            says = f"{part} is off by {wrong} of itself in the {batch} batch, allowed {most:.2g}"
            assert f"rank 0: {says}" in found


def test_a_model_of_another_shape_than_the_config_is_seen() -> None:
    """The oracle takes the shape that the model has, so it agrees with any."""
    work = replace(WORK, shape={"n_layers": 2, "w": 64})
    _, ranks = honest()
    assert model.oracle_account(spots(ranks, shape=work.shape), work) == []
    found = model.oracle_account(spots(ranks, shape={"n_layers": 2}), work)
    assert "rank 0: the model has w=None, the config w=64 (first batch)" in found


def test_an_embedding_is_copied_exactly() -> None:
    _, ranks = honest()
    (text,) = model.oracle_account(spots(ranks, embedding=1e-12), WORK)
    assert text == "rank 0: embedding is off by 1e-12 of itself in the first batch, allowed 0"


@pytest.mark.parametrize(("dtype", "roundoff"), [("bf16", 2**-8), ("fp16", 2**-11)])
def test_what_is_exact_to_an_eighth_of_a_roundoff_was_computed_in_a_wider_type(
    dtype: str, roundoff: float
) -> None:
    _, ranks = honest()
    work = replace(WORK, dtype=dtype)
    assert model.oracle_account(spots(ranks, attention=roundoff / 8), work) == []
    (text,) = model.oracle_account(spots(ranks, attention=roundoff / 8.01), work)
    assert text.endswith(f"not computed in {dtype}")
    assert model.oracle_account(spots(ranks, attention=0.0), FP32) == []


@pytest.mark.parametrize("name", ["layers", "seams", "blocks_illegal"])
@pytest.mark.parametrize("off", [1.0, -1.0])
def test_what_is_counted_has_to_be_exact(name: str, off: float) -> None:
    _, ranks = honest()
    right = 12.0 if name == "layers" else 0.0
    (text,) = model.oracle_account(spots(ranks, **{name: right + off}), WORK)
    assert text.startswith(f"rank 0: {right + off} ")
    unknown = replace(WORK, layers=None)
    count = 0 if name == "layers" else 1
    assert len(model.oracle_account(spots(ranks, **{name: right + off}), unknown)) == count


@pytest.mark.parametrize("number", [0, 1])
def test_every_rank_is_held_against_the_oracle(number: int) -> None:
    _, ranks = honest()
    who = f"rank {number}"
    assert model.oracle_account([], WORK) == ["no rank held a batch against the oracle"]
    off = proof_of(ranks, number, oracle={**proof(number)["oracle"], "attention": 0.3})
    (text,) = model.oracle_account(off, WORK)
    assert text.startswith(f"{who}: ")
    exact = ranks
    for other in range(2):
        spots_of = {**proof(other)["oracle"], "attention": 1e-6}
        exact = proof_of(exact, other, oracle=spots_of)
        exact = ending_of(exact, other, proof={**proof(other), "oracle": spots_of})
    assert model.oracle_account(exact, FP32) == []
    assert model.oracle_account(proof_of(exact, number, oracle=None), FP32) == [
        f"{who} did not hold its first batch against the oracle"
    ]
    assert model.oracle_account(ending_of(exact, number, proof=None), FP32) == [
        f"{who} did not hold its last batch against the oracle"
    ]


@pytest.mark.parametrize("number", [0, 1])
def test_the_gradient_of_the_logits_is_that_of_the_cross_entropy(number: int) -> None:
    _, ranks = honest()
    most = model.oracle_tolerance(WORK)
    assert gradients.logit_account(proof_of(ranks, number, logit_gradient=most), WORK) == []
    for wrong in (most * 1.01, None, "x"):
        (text,) = gradients.logit_account(proof_of(ranks, number, logit_gradient=wrong), WORK)
        assert f"rank {number}: the gradient of its logits is off by {wrong}" in text
    half = replace(WORK, dtype="fp16")
    lost = proof_of(ranks, number, logit_gradient=None)
    assert gradients.logit_account(lost, half) == []
    assert gradients.logit_account(ending_of(ranks, number, proof=None), WORK) == []  # another's
