"""Two sources for each fact: an honest launch balances, and each dishonest one does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from runbook.accounts import gradients, model, tables
from runbook.accounts.registry import ACCOUNTS, Row, Unbalanced, unbalanced
from runbook.records import Reason
from runbook.records.evidence import Effect
from tests.accounts.launches import (
    WORK,
    all_accounts,
    changed,
    ending_of,
    honest,
    proof,
    proof_of,
    sources,
    steps_of,
)


def test_an_honest_launch_balances() -> None:
    assert all_accounts(*honest()) == []


SIZE = 1_848_928


def compressed(sent: int) -> Effect:
    """What a rank tells of the bytes of its gradients in two steps."""
    told = {"bytes_before": sent * SIZE, "bytes_of_gradients": SIZE, "steps": 2}
    return Effect(toggle="NSA_DDP_COMPRESS", value="bf16", took_effect=True, evidence=told)


@pytest.mark.parametrize(("apart", "found"), [(1.9e-4, 0), (2.1e-4, 2)])
def test_the_same_loss_in_another_order_of_sums(apart: float, found: int) -> None:
    table, ranks = honest()
    step = ranks[0].ending["recomputed"]["steps"][1]
    table.loc[step - 1, "loss"] += apart
    assert len(model.loss_account(table, ranks)) == found


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        ([4], "rank 1 exchanges its gradients 2 times in a step"),
        ([1, 4], "rank 1 exchanges its gradients 0.5 times in a step"),
        ([2], ""),
    ],
)
def test_gradients_are_exchanged_once_in_a_step(sent: list[int], says: str) -> None:
    table, ranks = honest()
    found = all_accounts(table, changed(ranks, 1, effects=tuple(map(compressed, sent))))
    assert bool(found) is bool(says) and says in " ".join(found)


def test_ranks_do_not_end_their_steps_at_the_same_times() -> None:
    table, ranks = honest()
    same = steps_of(ranks, 1, mono=ranks[0].steps["mono"])
    told = "ranks 0 and 1 end 5 steps in the same microseconds"
    assert told in "; ".join(all_accounts(table, same))


@pytest.mark.parametrize(
    ("wire", "off"), [("fp32", 1e-5), ("fp16", 2e-3), ("bf16", 1e-2), ("int8", 0.0)]
)
@pytest.mark.parametrize("side", ["mean_low", "mean_high"])
@pytest.mark.parametrize(("share", "found"), [(0.99, 0), (-0.99, 0), (1.01, 1), (-1.01, 1)])
def test_a_mean_of_known_numbers_after_its_travel(
    wire: str, off: float, side: str, share: float, found: int
) -> None:
    told: dict[str, Any] = {"mean_low": 1.0, "mean_high": 1.0, "wire": wire}
    told[side] += share * (off or 1e-9 * (abs(share) > 1))
    for asked in (wire, None) if off else (None,):  # None: the arms differ in it
        ranks = ending_of(honest()[1], 1, proof={**proof(1), **told, side: 1.0})
        alone = proof_of(ranks, 1, **told)[1:]
        assert len(gradients.gradient_account(alone, replace(WORK, wire=asked))) == found


def test_a_step_that_ends_twice_is_counted_and_the_first_is_named() -> None:
    table, ranks = honest()
    twice = table["step"].replace({9: 7, 10: 7, 31: 30})
    ranks = changed(steps_of(ranks, 1, step=twice), 0, steps=None)
    assert tables.step_account(ranks) == ["rank 1 ends 2 steps twice, first 7"]


@pytest.mark.parametrize(("share", "apart"), [(0.9e-6, 0), (1.1e-6, 1)])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_copy_may_be_rounded_only(share: float, apart: int, sign: int) -> None:
    table, ranks = honest()
    for name in ("loss", "grad_norm"):
        off = table[name] * (1 + sign * share * (table["step"] == 30))
        found = tables.copy_account(table.assign(**{name: off}), ranks)
        assert [text.split(" is ")[0] for text in found] == [f"{name} of step 30"] * 2 * apart


@pytest.mark.parametrize(("more", "apart"), [(0.0008, 0), (0.0012, 1)])
def test_a_rate_is_written_with_three_digits(more: float, apart: int) -> None:
    table, ranks = honest()
    said = ranks[0].steps["toks_per_s"]  # type: ignore[index]
    found = tables.copy_account(table.assign(toks_per_s=said * (1 + 1e-6) + more), ranks)
    assert len(found) == apart
    assert all(f"({len(table)} steps differ)" in text for text in found)


def test_a_nan_in_the_csv_is_near_nothing_and_a_silent_rank_hides_no_other() -> None:
    table, ranks = honest()
    odd = table.assign(loss=table["loss"].where(table["step"] != 12))
    found = tables.copy_account(odd, steps_of(ranks, 0, loss=np.nan))
    assert found[0] == "rank 0 reports no progress to hold the CSV against"
    assert "loss of step 12 is nan in the CSV" in found[1]
    assert "in rank 1's heartbeats (1 steps differ)" in found[1]
    assert tables.copy_account(table[:-1], ranks[:1]) == ["the CSV has 59 steps, rank 0 ended 60"]


def test_a_loss_that_was_not_computed_again_hides_no_other() -> None:
    table, ranks = honest()
    table.loc[0, "loss"] = 9.0
    odd = proof_of(proof_of(ranks, 0, loss="5.6"), 1, loss=5.5, loss_again=None)
    again = " computed the loss of step 1 again, 5.60000; the CSV has 9.00000 (1 of 6 steps differ)"
    assert model.loss_account(table, odd) == [
        "rank 0: the loss of the first batch is 5.6, computed again 5.595",
        f"rank 0{again}",
        "rank 1: the loss of the first batch is 5.5, computed again None",
        f"rank 1{again}",
    ]
    assert model.loss_account(table, ()) == []


@pytest.mark.parametrize(
    ("device", "apart", "good"),
    [
        ("cuda", 1.9e-3, True),
        ("cuda", 2.1e-3, False),
        ("cpu", 1.9e-4, True),
        ("cpu", 2.1e-4, False),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_first_step_is_of_the_batch_that_was_proven(
    device: str, apart: float, good: bool, sign: int
) -> None:
    """The mean over two ranks, of which one is off by twice as much."""
    table, ranks = honest()
    loss = (ranks[1].proof or {})["loss"] + 2 * sign * apart
    other = proof_of(ranks, 1, loss=loss, loss_again=loss)
    found = model.first_loss_account(table, other, replace(WORK, device=device))
    told = f"the CSV's loss of step 1 is 5.60000, the ranks' proof of its batch came to {loss:.5f}"
    mean = (loss + (ranks[0].proof or {})["loss"]) / 2
    assert found == ([] if good else [told.replace(f"{loss:.5f}", f"{mean:.5f}")])
    assert model.first_loss_account(table, other[:1], WORK) == [], "not all ranks"


def test_of_several_micro_batches_only_the_first_is_proven() -> None:
    table, ranks = honest()
    other = proof_of(ranks, 1, loss=1.0, loss_again=1.0)
    twice = replace(WORK, step_tokens=2 * WORK.step_tokens)
    assert model.first_loss_account(table, other, twice) == []
    assert len(model.first_loss_account(table, other, WORK)) == 1
    silent = proof_of(ranks, 1, loss=None)
    assert model.first_loss_account(table, silent, WORK) == []
    assert len(model.loss_account(table, silent)) == 1


@pytest.mark.parametrize(
    ("names", "topic"),
    [
        ("settings", "settings"),
        ("settings memory", None),
        # Of one remedy; and not of one.
        ("token data", "trained_on"),
        ("token saved", None),
        ("token held_out", None),  # training reads other data, too
        ("held_out evaluation", "evaluated"),
        ("memory gates", None),  # both without one
        # From one of them the others follow.
        ("first_weights oracle", "first_weights"),
        ("shadow left_over", "left_over"),
    ],
)
def test_accounts_that_do_not_balance_have_one_remedy_or_none(
    names: str, topic: str | None
) -> None:
    known = {one.check.__name__.removesuffix("_account"): one for one in ACCOUNTS}
    found = tuple((known[name], (f"{name} is off",)) for name in names.split())
    alone = Unbalanced(found=found).account
    assert (alone and alone.topic) == topic
    assert Unbalanced(found=found).problems == [f"{name} is off" for name in names.split()]
    assert alone is None or names != "settings" or alone.reason is Reason.MISMATCH


def test_without_a_column_that_heartbeats_tell_nothing_is_held_against_them() -> None:
    table, ranks = honest()
    found = unbalanced(sources(table.drop(columns=["loss", "dt_s"]), ranks), Row.ACCOUNTS).found
    assert found[0][1] == ("the CSV has no column loss, dt_s",)
    assert not any(one.copied for one, _ in found)
