"""Two sources for each fact: an honest launch balances, and each dishonest one does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from runbook.accounts import data, model, tables
from runbook.accounts.gradients import gradient_account
from runbook.accounts.workload import GeneratedData, Workload
from runbook.records.evidence import Effect, RankLog
from tests.accounts.launches import (
    PER_RANK,
    RANKS,
    TEXT,
    WORK,
    Ranks,
    all_accounts,
    changed,
    ending_of,
    honest,
    proof_of,
    steps_of,
    table_accounts,
)


def test_an_honest_launch_balances() -> None:
    assert all_accounts(*honest()) == []


def test_each_rank_has_a_rate_of_its_own() -> None:
    table, ranks = honest()
    steps = ranks[1].steps
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


SIZE = 1_848_928


def compressed(sent: int) -> Effect:
    """What a rank tells of the bytes of its gradients in two steps."""
    told = {"bytes_before": sent, "bytes_of_gradients": SIZE, "steps": 2}
    return Effect(toggle="NSA_DDP_COMPRESS", value="bf16", took_effect=True, evidence=told)


HEARTBEATS: dict[str, tuple[Callable[[Ranks], Ranks], str]] = {
    "one process writes for two": (lambda r: changed(r, 1, pids=(40,)), "ranks 0 and 1 are one"),
    "no steps": (lambda r: changed(r, 1, steps=None), "rank 1: no step_end"),
    "rank 1 reads rank 0's data": (
        lambda r: steps_of(r, 1, data=r[0].steps["data"]),  # type: ignore[index]
        "ranks 0 and 1 read the same data in 60 steps, first in step 1",
    ),
    "no progress": (lambda r: steps_of(r, 1, loss=np.nan), "rank 1 reports no progress"),
    "no proof": (lambda r: changed(r, 1, proof=None), "rank 1 proves nothing"),
    "a rank's gradient is lost": (lambda r: proof_of(r, 0, mean_low=0.333), "came out as 0.333"),
    "fp32 on the wire": (lambda r: proof_of(r, 0, wire="fp32"), "travel as fp32, not as bf16"),
    "another target": (lambda r: proof_of(r, 1, loss_again=5.2), "computed again 5.2"),
    "nothing clipped": (lambda r: proof_of(r, 1, norm_after=4.0), "clips a norm of 4 to 4, not"),
    "exchanged after each micro-batch": (
        lambda r: changed(r, 1, effects=(compressed(sent=4 * SIZE),)),
        "rank 1 exchanges its gradients 2 times in a step",
    ),
    "half is exchanged": (
        lambda r: changed(r, 0, effects=(compressed(sent=SIZE), compressed(sent=4 * SIZE))),
        "rank 0 exchanges its gradients 0.5 times in a step",
    ),
    "no count of updates": (lambda r: ending_of(r, 1, updates=None), "how many updates"),
    "nothing held against AdamW": (lambda r: ending_of(r, 1, shadow=None), "against nothing"),
    "a peak above what was reserved": (
        lambda r: steps_of(r, 1, reserved_mib=200.0),
        "of 200.0 MiB reserved at most",
    ),
    "no last proof": (lambda r: ending_of(r, 1, proof=None), "rank 1 at the end proves nothing"),
    "no loss again": (
        lambda r: ending_of(r, 1, recomputed=None),
        "rank 1 computed no step's loss a second time",
    ),
}


@pytest.mark.parametrize("name", HEARTBEATS)
def test_heartbeats_that_do_not_balance(name: str) -> None:
    change, text = HEARTBEATS[name]
    table, ranks = honest()
    assert text in "; ".join(all_accounts(table, change(ranks)))


def test_gradients_that_are_exchanged_once_balance() -> None:
    table, ranks = honest()
    assert not all_accounts(table, changed(ranks, 1, effects=(compressed(sent=2 * SIZE),)))


def test_of_a_mean_of_another_size_no_type_is_told() -> None:
    """The details in which a type shows have another size, too."""
    table, ranks = honest()
    halved = proof_of(ranks, 0, mean_low=0.484, mean_high=0.5, wire="8 bits or fewer")
    (found,) = all_accounts(table, halved)
    assert "came out as 0.484 to 0.5" in found and "travel" not in found


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


def env(**effective: Any) -> dict[str, Any]:
    known = {"per_rank_batch": 2, "seq_len": 64, "accumulation": 3, "dtype": "bf16"}
    train = {"grad_clip": 0.5, "seed": 7, "eval_every": 20, "eval_batches": 4}
    return {
        "world_size": 2,
        "effective": {**known, "dataset": "books", "device": "cpu", **effective},
        "config": {"nsa": {"l": 16}, "model": {"n_layers": 4}, "train": train},
    }


def shared(ranks: Sequence[RankLog]) -> list[str]:
    """Problems of the data account, but for rows that are none of the data's."""
    found = data.data_account(ranks, WORK)
    return [text for text in found if "other rows than" not in text]


def test_the_workload_of_a_launch() -> None:
    assert Workload.of(env()) == Workload(
        nproc=2,
        step_tokens=384,
        pass_tokens=128,
        seq_len=64,
        block=16,
        wire="fp32",
        data=None,
        dtype="bf16",
        device="cpu",
        layers=4,
        grad_clip=0.5,
        eval_every=20,
        eval_batches=4,
        shape={"n_layers": 4, "l": 16},
    )
    assert Workload.of(env(steps=9)).steps == 9
    assert Workload.of(env() | {"config": None}).block == 0


@pytest.mark.parametrize("dataset", ["synthetic", "markov"])
def test_what_generated_data_are_follows_from_the_config(dataset: str) -> None:
    told = env(dataset=dataset, vocab_size=256)
    assert Workload.of(told).data == GeneratedData(
        kind=dataset, seed=7, vocab_size=256, seq_len=64, nproc=2, rows=2, accumulation=3
    )
    del told["config"]["train"]["seed"]
    with pytest.raises(ValueError, match=r"no usable config\.train\.seed$"):
        Workload.of(told)
    with pytest.raises(ValueError, match=r"no usable effective\.vocab_size$"):
        Workload.of(env(dataset=dataset))
    with pytest.raises(ValueError, match="more tokens in a step than a rank can read"):
        Workload.of(env(dataset=dataset, vocab_size=256, per_rank_batch=1 << 40))


@pytest.mark.parametrize("bad", [None, 0, -1, -2, "many"])
def test_a_workload_that_cannot_be_known(bad: object) -> None:
    with pytest.raises(ValueError, match=r"no usable effective\.seq_len, effective\.accumulation$"):
        Workload.of(env(seq_len=bad, accumulation=bad))
    with pytest.raises(ValueError, match=r"no usable world_size$"):
        Workload.of(env() | {"world_size": bad})


def test_a_column_that_has_a_second_source_may_not_be_missing() -> None:
    table, ranks = honest()
    assert table_accounts(table.drop(columns=["loss", "dt_s"]), ranks, WORK, None) == [
        "the CSV has no column loss, dt_s"
    ]


def test_a_step_that_ends_twice_is_counted_and_the_first_is_named() -> None:
    table, ranks = honest()
    twice = table["step"].replace({9: 7, 10: 7, 31: 30})
    ranks = changed(steps_of(ranks, 1, step=twice), 0, steps=None)
    assert tables.step_account(ranks) == ["rank 1 ends 2 steps twice, first 7"]
    assert tables.step_account(changed(honest()[1], 1, param_hash="other")) == [
        "parameters differ between ranks at the end"
    ]


def test_tokens_are_counted_on_every_rank_whatever_another_says() -> None:
    table, ranks = honest()
    seen = np.where(table["step"] >= 30, PER_RANK + 1, PER_RANK)
    ranks = steps_of(steps_of(ranks, 0, embedded=np.where(seen > PER_RANK, np.nan, seen)), 1,
                     embedded=seen)  # fmt: skip
    assert data.token_account(table, proof_of(ranks, 1, positions=127), WORK) == [
        "rank 0 does not say how many tokens it embedded",
        "rank 1 embedded 129 tokens in step 30, not 128",
        "rank 1 takes the loss at 127 positions of 128 in a pass",
    ]
    _, ranks = honest()
    assert data.token_account(table, ending_of(ranks, 1, embedded_sum=8), WORK) == [
        "rank 1 embeds other tokens than it fetched: 8 for 7"
    ]
    nothing = ending_of(ranks, 1, fetched_sum=None, embedded_sum=None)
    assert len(data.token_account(table, nothing, WORK)) == 1
    assert data.token_account(table.drop(columns="tokens"), ranks, WORK) == []
    for more in (1, -1):
        other = table["tokens"] + more * (table["step"] == 60)
        assert data.token_account(table.assign(tokens=other), ranks, WORK) == [
            "column tokens is not what the ranks embed together"
        ]


def test_the_same_batch_of_two_ranks_in_one_step_and_in_another() -> None:
    table, ranks = honest()
    first, second = (rank.steps["data"] for rank in ranks)  # type: ignore[index]
    same = second.where(~table["step"].isin([7, 9]), first)
    assert shared(steps_of(ranks, 1, data=same)) == [
        "ranks 0 and 1 read the same data in 2 steps, first in step 7"
    ]
    moved = second.where(table["step"] != 20, first[29])
    assert shared(steps_of(ranks, 1, data=moved)) == [
        "rank 1 reads in step 20 what rank 0 reads in another (1 steps)"
    ]
    silent = changed(steps_of(ranks, 1, data=["1"] * len(table)), 0, steps=None)
    assert shared(silent) == [
        "rank 0 does not say which data it read",
        "rank 1 reads in step 2 what it read before",
    ]


def test_of_many_ranks_each_is_held_against_the_first_that_read_the_same() -> None:
    _, ranks = honest()
    many = [replace(ranks[0], rank=number) for number in range(64)]
    found = shared(many)
    assert len(found) == 63, "not each against each"
    assert found[0] == "ranks 0 and 1 read the same data in 60 steps, first in step 1"
    assert found[-1] == "ranks 0 and 63 read the same data in 60 steps, first in step 1"


def test_digests_add_up_in_64_bits() -> None:
    """A rank with a digest of 2^63 and one without were added as floats, to another sum."""
    _, ranks = honest()
    high = steps_of(ranks, 0, data="f" * 16)
    low = steps_of(high, 1, data="3")
    total = data.union_of_data(low)
    assert total is not None and set(total) == {2}
    assert data.union_of_data(steps_of(low, 0, data=None)) is None
    assert data.union_of_data(changed(low, 1, steps=None)) is None
    assert data.union_of_data(()) is None


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


@pytest.mark.parametrize(("apart", "found"), [(0.0019, 0), (0.0021, 1)])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_first_loss_may_be_off_by_what_another_order_of_sums_does(
    apart: float, found: int, sign: int
) -> None:
    table, ranks = honest()
    loss = (ranks[1].proof or {})["loss"]
    again = model.loss_account(table, proof_of(ranks, 1, loss_again=loss + sign * apart))
    assert len(again) == found


def test_a_loss_that_was_not_computed_again_hides_no_other() -> None:
    table, ranks = honest()
    table.loc[0, "loss"] = 9.0
    odd = proof_of(proof_of(ranks, 0, loss="5.6"), 1, loss=5.5, loss_again=None)
    assert model.loss_account(table, odd) == [
        "rank 0: the loss of the first batch is 5.6, computed again 5.595",
        "rank 1: the loss of the first batch is 5.5, computed again None",
        *(
            f"the CSV's loss of step 1 is 9.00000; rank {number} computed it again, 5.60000 "
            "(1 of 6 steps differ)"
            for number in (0, 1)
        ),
    ]
    assert model.loss_account(table, ()) == []


def test_every_process_is_one_rank() -> None:
    _, ranks = honest()
    shared = changed(changed(ranks, 0, pids=(40, 41)), 1, pids=(41, 40))
    assert tables.process_account(shared) == [
        "ranks 0 and 1 are one process, 41",
        "ranks 0 and 1 are one process, 40",
    ]
    nameless = changed(changed(ranks, 0, pids=()), 1, pids=())
    assert tables.process_account(nameless) == [
        f"rank {number} names no process" for number in (0, 1)
    ]


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
