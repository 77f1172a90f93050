"""Two sources for each fact: an honest launch balances, and each dishonest one does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from runbook.accounts import data, model
from runbook.accounts.gradients import gradient_account
from runbook.accounts.workload import Workload
from tests.accounts.launches import (
    DATA,
    RANKS,
    STEPS,
    TEXT,
    WORK,
    Ranks,
    all_accounts,
    changed,
    ending_of,
    honest,
    oracle_of,
    proof,
    proof_of,
    shadow_of,
    steps_of,
    table_accounts,
)


def test_an_honest_launch_balances() -> None:
    assert all_accounts(*honest()) == []


def test_each_rank_has_a_rate_of_its_own() -> None:
    table, ranks = honest()
    steps = ranks[1].steps
    assert steps is not None
    assert all_accounts(table, steps_of(ranks, 1, toks_per_s=steps["toks_per_s"] * 1.1)) == []


CSV: dict[str, tuple[Callable[[pd.DataFrame], pd.DataFrame], str]] = {
    "dt halved": (lambda t: t.assign(dt_s=t["dt_s"] / 2), "dt_s sums to 0.500"),
    "the optimizer outside the step": (lambda t: t.assign(dt_s=t["dt_s"] * 0.85), "0.850"),
    "3 % less": (lambda t: t.assign(dt_s=t["dt_s"] * 0.97), "0.970"),
    "invented, with jitter": (
        lambda t: t.assign(dt_s=0.004 + 0.0005 * (t["step"] * 0.618 % 1)),
        "dt_s sums to 0.4",
    ),
    "loss of the step before": (
        lambda t: t.assign(loss=t["loss"].shift(fill_value=5.6)),
        "59 steps differ",
    ),
    "constant loss": (lambda t: t.assign(loss=2.0), "loss of step 1"),
    "norm of 1": (lambda t: t.assign(grad_norm=1.0), "grad_norm of step 1 is 1 in the CSV"),
    "rate alone": (lambda t: t.assign(toks_per_s=t["toks_per_s"] * 1.2), "toks_per_s of step 1"),
    "tokens doubled": (lambda t: t.assign(tokens=t["tokens"] * 2), "column tokens"),
    "a row missing": (lambda t: t[t["step"] != 30], "59 steps, rank 0 ended 60"),
}


@pytest.mark.parametrize("name", CSV)
def test_a_csv_that_the_heartbeats_contradict(name: str) -> None:
    change, text = CSV[name]
    table, ranks = honest()
    assert text in "; ".join(all_accounts(change(table), ranks))


HEARTBEATS: dict[str, tuple[Callable[[Ranks], Ranks], str]] = {
    "one process writes for two": (lambda r: changed(r, 1, pids=(40,)), "ranks 0 and 1 are one"),
    "no pid": (lambda r: changed(r, 1, pids=()), "rank 1 names no process"),
    "no steps": (lambda r: changed(r, 1, steps=None), "rank 1: no step_end"),
    "clock longer than the launch": (lambda r: changed(r, 0, clock_s=99.0), "counts 99.0 s in a"),
    "half of each sequence": (lambda r: steps_of(r, 1, embedded=64), "rank 1 embedded 64 tokens"),
    "loss on half": (lambda r: proof_of(r, 1, positions=64), "rank 1 takes the loss at 64"),
    "other tokens embedded": (lambda r: ending_of(r, 1, embedded_sum=8), "embeds other tokens"),
    "sums absent": (lambda r: ending_of(r, 1, fetched_sum=None), "embeds other tokens"),
    "rank 1 reads rank 0's data": (
        lambda r: steps_of(r, 1, data=r[0].steps["data"]),  # type: ignore[index]
        "ranks 0 and 1 read the same data in 60 steps, first in step 1",
    ),
    "the same batch again": (
        lambda r: steps_of(r, 0, data=["1"] * STEPS),
        "rank 0 reads in step 2 what it read before",
    ),
    "no digest": (lambda r: steps_of(r, 0, data=None), "rank 0 does not say which data"),
    "no progress": (lambda r: steps_of(r, 1, loss=np.nan), "rank 1 reports no progress"),
    "no proof": (lambda r: changed(r, 1, proof=None), "rank 1 proves nothing"),
    "a rank's gradient is lost": (lambda r: proof_of(r, 0, mean_low=0.333), "came out as 0.333"),
    "fp32 on the wire": (lambda r: proof_of(r, 0, wire="fp32"), "travel as fp32, not as bf16"),
    "no gradient": (lambda r: proof_of(r, 0, missing=["norm.weight"]), "no gradient for norm"),
    "an idle group": (
        lambda r: proof_of(r, 1, own_gradient={"a": 1.0, "b": 0.0}),
        "no gradient reaches b",
    ),
    "lr 0": (
        lambda r: ending_of(r, 0, moved={"a": 0.0, "b": 0.0}, largest_lr=0.0),
        "2 of 2 groups of parameters did not move",
    ),
    "one group frozen": (lambda r: ending_of(r, 0, moved={"a": 1.0, "b": 0.0}), "1 of 2 groups"),
    "further than the rate can": (
        lambda r: ending_of(r, 0, moved={"a": 0.3, "b": 0.01}),
        "a moved further than 60 steps",
    ),
    "another target": (lambda r: proof_of(r, 1, loss_again=5.2), "computed again 5.2"),
    "no second loss": (lambda r: proof_of(r, 1, loss_again=None), "computed again None"),
    "the step before of the other rank": (
        lambda r: steps_of(r, 1, data=r[0].steps["data"].shift(fill_value="ff")),  # type: ignore[index]
        "rank 1 reads in step 2 what rank 0 reads in another (59 steps)",
    ),
    "computed in fp32": (lambda r: oracle_of(r, attention=1e-6), "not computed in bf16"),
    "ranks drifted apart": (
        lambda r: ending_of(r, 1, moved={"embedding": 0.01, "norm": 0.03}),
        "rank 1's parameters moved otherwise than rank 0's: norm",
    ),
    "a layer fewer": (lambda r: oracle_of(r, layers=11.0), "11.0 layers ran, the config has 12"),
    "halved between layers": (lambda r: oracle_of(r, seams=11.0), "11.0 modules get what"),
    "nothing clipped": (lambda r: proof_of(r, 1, norm_after=4.0), "clips a norm of 4 to 4, not"),
    "another norm told": (lambda r: proof_of(r, 1, norm_told=1.0), "tells a norm of 1 for 4"),
    "no norm": (lambda r: proof_of(r, 1, norm_told=None), "does not show that gradients are"),
    "8 bits on the wire": (lambda r: proof_of(r, 0, wire="8 bits or fewer"), "travel as 8 bits"),
    "updates skipped": (lambda r: ending_of(r, 1, updates=[30, 30]), "counts [30, 30] updates"),
    "no count of updates": (lambda r: ending_of(r, 1, updates=None), "how many updates"),
    "a tenth of the rate": (
        lambda r: ending_of(r, 0, first_update={"moved": 3e-5, "lr": 3e-4}),
        "but by 0.1 of it",
    ),
    "another learning rate": (lambda r: shadow_of(r, rate=2e-6), "learning rate: off by 2e-06"),
    "nothing held against AdamW": (lambda r: ending_of(r, 1, shadow=None), "against nothing"),
    "no first update": (lambda r: ending_of(r, 0, first_update=None), "but by nan of it"),
    "reading below what is in use": (lambda r: steps_of(r, 1, cuda_mib=900.0), "memory of step"),
    "a peak above what was reserved": (
        lambda r: steps_of(r, 1, reserved_mib=200.0),
        "of 200.0 MiB reserved at most",
    ),
    "nothing about memory": (
        lambda r: changed(r, 1, steps=r[1].steps.drop(columns="rss_mib")),  # type: ignore[union-attr]
        "how much memory",
    ),
    "nothing about movement": (lambda r: ending_of(r, 0, moved=None), "how far its parameters"),
    "attention off": (lambda r: oracle_of(r, attention=0.3), "attention is off by 0.3"),
    "attention NaN": (lambda r: oracle_of(r, attention=float("nan")), "attention is off by nan"),
    "logits off": (lambda r: oracle_of(r, logits=0.3), "logits is off by 0.3"),
    "forbidden blocks": (lambda r: oracle_of(r, blocks_illegal=3.0), "3.0 choices of blocks"),
    "worse blocks": (lambda r: oracle_of(r, blocks_shortfall=0.5), "blocks_shortfall is off"),
    "a branch that stops counting": (
        lambda r: ending_of(r, 1, proof={**proof(1), "own_gradient": {"a": 1.0, "b": 0.0}}),
        "rank 1 at the end: no gradient reaches b",
    ),
    "no last proof": (lambda r: ending_of(r, 1, proof=None), "rank 1 at the end proves nothing"),
    "no loss again": (
        lambda r: ending_of(r, 1, recomputed=None),
        "rank 1 computed no step's loss a second time",
    ),
    "no oracle": (lambda r: proof_of(r, 0, oracle=None), "rank 0 did not hold"),
}


@pytest.mark.parametrize("name", HEARTBEATS)
def test_heartbeats_that_do_not_balance(name: str) -> None:
    change, text = HEARTBEATS[name]
    table, ranks = honest()
    assert text in "; ".join(all_accounts(table, change(ranks)))


def test_a_loss_that_is_smoothed_in_both_files_is_seen() -> None:
    table, ranks = honest()
    smooth = table.assign(loss=table["loss"].ewm(alpha=0.1).mean())
    told = [steps_of(ranks, n, loss=smooth["loss"])[n] for n in range(RANKS)]
    (one, other) = table_accounts(smooth, told, WORK, None)
    assert "rank 0 computed it again" in one and "5 of 6 steps differ" in one
    assert "rank 1" in other


@pytest.mark.parametrize(("apart", "found"), [(1.9e-4, 0), (2.1e-4, 2)])
def test_the_same_loss_in_another_order_of_sums(apart: float, found: int) -> None:
    table, ranks = honest()
    step = ranks[0].ending["recomputed"]["steps"][1]
    table.loc[step - 1, "loss"] += apart
    assert len(model.loss_account(table, ranks)) == found


def test_a_document_may_be_read_again_but_not_at_once() -> None:
    table, ranks = honest()
    digests = [f"{step % 20:016x}" for step in table["step"]]
    again = steps_of(ranks, 0, data=digests)
    assert all_accounts(table, again, replace(WORK, data=None)) == []
    stuck = steps_of(ranks, 0, data=["1", *["1"], *digests[2:]])
    assert "what it read before" in "; ".join(all_accounts(table, stuck, replace(WORK, data=None)))


def test_the_ranks_together_read_what_one_reads() -> None:
    _, ranks = honest()
    steps = ranks[0].steps
    assert steps is not None
    whole = replace(DATA, nproc=1, rows=RANKS)
    both = [whole.of_step(0, step) for step in steps["step"]]
    alone = steps_of(ranks, 0, data=both)[:1]
    together, single = data.union_of_data(ranks), data.union_of_data(alone)
    assert together is not None
    assert single is not None
    assert together.tolist() == single.tolist()


ENV: dict[str, Any] = {
    "world_size": 2,
    "effective": {"per_rank_batch": 1, "seq_len": 8, "accumulation": 1, "dtype": "fp32"},
    "toggles": [{"name": "NSA_DDP_COMPRESS", "value": "bf16"}],
}


def test_arms_that_differ_in_compression_have_no_single_wire() -> None:
    env = ENV
    assert Workload.of(env).wire == "bf16"
    assert Workload.of(env | {"arms": {"set": {"NSA_DDP_COMPRESS": "off"}}}).wire is None
    assert Workload.of(env | {"toggles": []}).wire == "fp32"
    assert Workload.of(env | {"world_size": 1, "toggles": []}).wire == "fp32"


@pytest.mark.parametrize("told", ["bf16", "fp32"])
def test_one_rank_narrows_its_gradients_in_ddp_and_not_without(told: str) -> None:
    # As torchrun --nproc_per_node=1 with NSA_DDP_COMPRESS=bf16 leaves it, and python without DDP.
    work = Workload.of(ENV | {"world_size": 1})
    low = 0.998046875 if told == "bf16" else 1.0
    _, ranks = honest()
    alone = proof_of(ranks, 0, wire=told, mean_low=low)[:1]
    alone = ending_of(alone, 0, proof=alone[0].proof)
    assert gradient_account(alone, work) == []
    wrong = proof_of(alone, 0, mean_low=0.97)
    assert "came out as 0.97" in gradient_account(wrong, work)[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "rank 1 does not turn the tokens of its first documents back"),
        ({**TEXT, "decoded": None}, "rank 1 does not turn"),
        ({**TEXT, "bytes": 0}, "rank 1 does not turn"),
        (
            {**TEXT, "decoded": "5f", "apart": 17},
            "rank 1 trains on another text than its documents have: tokens turned back differ from "
            "byte 17 of 129 (2 documents)",
        ),
    ],
)
def test_the_text_of_documents_is_what_their_tokens_tell(text: Any, says: str) -> None:
    _, ranks = honest()
    read = proof_of(ranks, 1, text=text)
    (problem,) = data.data_account(read, replace(WORK, data=None))
    assert problem.startswith(says)
    assert data.data_account(read, WORK) == []
    resumed = changed(read, 1, first_step=9)
    assert data.data_account(resumed, replace(WORK, data=None)) == []
