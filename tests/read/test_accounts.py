"""Two sources for each fact: an honest launch balances, and each dishonest one does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from runbook.read import accounts, clocks, learning, training_accounts
from runbook.read.accounts import Workload
from runbook.records import RankExit
from runbook.records.evidence import RankLog

STEPS, RANKS, PER_RANK = 60, 2, 128
WORK = Workload(
    nproc=RANKS,
    step_tokens=PER_RANK,
    pass_tokens=PER_RANK,
    seq_len=128,
    block=16,
    wire="bf16",
    generated=True,
    dtype="bf16",
    device="cuda",
    layers=12,
    grad_clip=1.0,
)
Ranks = tuple[RankLog, ...]
EXITS = (RankExit(rank=0, code=0, said_s=0.6, watched_s=0.9), RankExit(rank=1, code=0))


def rows() -> pd.DataFrame:
    """A CSV with step times of 10 ms that jitter by a fifth."""
    dt = np.random.default_rng(3).uniform(0.008, 0.012, STEPS)
    return pd.DataFrame(
        {
            "step": range(1, STEPS + 1),
            "loss": np.linspace(5.6, 2.0, STEPS),
            "toks_per_s": RANKS * PER_RANK / dt,
            "tokens": RANKS * PER_RANK,
            "dt_s": dt,
            "arm": "",
            "grad_norm": np.linspace(3.0, 1.0, STEPS),
            "block": 0,
        }
    )


def proof(number: int) -> dict[str, Any]:
    """What a rank proves, before its first step and after its last one."""
    return {
        "loss": 5.6 + 0.01 * (number - 0.5),
        "loss_again": 5.6 + 0.01 * (number - 0.5),
        "positions": PER_RANK,
        "own_gradient": {"embedding": 1e-3, "attention.k_cmp": 1e-6},
        "mean_low": 0.998,
        "mean_high": 1.0,
        "wire": "bf16",
        "missing": [],
        "norm_told": 4.0,
        "norm_before": 4.0,
        "norm_after": 1.0,
        "oracle": dict.fromkeys(
            ("attention", "layer", "logits", "embedding", "blocks_illegal", "blocks_shortfall"),
            0.0,
        )
        | {"attention": 0.005, "layers": 12.0, "seams": 0.0}
        if number == 0
        else None,
    }


def rank(number: int, table: pd.DataFrame) -> RankLog:
    """The heartbeats of a rank that tells the same; its clock reads 1 ms late now and then.

    The loss is agreed by all ranks, but each times its own steps.
    """
    late = np.where(table["step"] % 7 == 0, 0.001, 0.0)
    steps = pd.DataFrame(
        {
            "step": table["step"],
            "mono": 500.0 + table["dt_s"].cumsum() + late,
            "alone": True,
            "embedded": PER_RANK,
            "data": [f"{step * 8 + number:016x}" for step in table["step"]],
            "mem_mib": 300.0,
            "rss_mib": 2000.0,
            "cuda_mib": 290.0,
            "loss": table["loss"],
            "grad_norm": table["grad_norm"],
            "toks_per_s": table["toks_per_s"] * (1 + 0.01 * number),
        }
    )
    return RankLog(
        rank=number,
        path=f"heartbeat_rank{number}.jsonl",
        sha256="",
        events=3 * STEPS,
        tokens=frozenset({"t"}),
        first_step=1,
        last_step=STEPS,
        exit_code=0,
        exit_reason="",
        param_hash="h",
        counts={},
        pids=(40 + number,),
        clock_s=float(table["dt_s"].sum()),
        proof=proof(number),
        ending={
            "fetched_sum": 9,
            "embedded_sum": 9,
            "moved": {"embedding": 0.01, "norm": 0.02},
            "largest_lr": 3e-3,
            "proof": proof(number),
            "updates": [STEPS, STEPS],
            "first_update": {"moved": 3e-4, "lr": 3e-4},
        },
        steps=steps,
    )


def all_accounts(table: pd.DataFrame, ranks: Ranks, work: Workload = WORK) -> list[str]:
    """Everything that does not balance."""
    return [
        *accounts.process_account(ranks),
        *clocks.time_account(table, ranks, float(rows()["dt_s"].sum()) + 5.0, EXITS),
        *accounts.token_account(table, ranks, work),
        *accounts.data_account(ranks, work),
        *accounts.copy_account(table, ranks),
        *accounts.loss_account(table, ranks, work),
        *learning.gradient_account(ranks, work),
        *learning.movement_account(ranks),
        *learning.oracle_account(ranks, work),
        *training_accounts.clip_account(ranks, work),
        *training_accounts.update_account(ranks, work),
        *training_accounts.memory_account(ranks, work),
    ]


def honest() -> tuple[pd.DataFrame, Ranks]:
    table = rows()
    return table, tuple(rank(number, table) for number in range(RANKS))


def changed(ranks: Ranks, number: int, **values: Any) -> Ranks:
    return tuple(replace(log, **values) if log.rank == number else log for log in ranks)


def steps_of(ranks: Ranks, number: int, **values: Any) -> Ranks:
    steps = ranks[number].steps
    assert steps is not None
    return changed(ranks, number, steps=steps.assign(**values))


def proof_of(ranks: Ranks, number: int, **values: Any) -> Ranks:
    return changed(ranks, number, proof={**(ranks[number].proof or {}), **values})


def ending_of(ranks: Ranks, number: int, **values: Any) -> Ranks:
    return changed(ranks, number, ending={**ranks[number].ending, **values})


def oracle_of(ranks: Ranks, **values: Any) -> Ranks:
    found = (ranks[0].proof or {})["oracle"]
    return proof_of(ranks, 0, oracle={**found, **values})


def test_an_honest_launch_balances() -> None:
    assert all_accounts(*honest()) == []


def test_a_pause_of_the_machine_between_a_step_and_its_heartbeat_is_no_fraud() -> None:
    table, ranks = honest()
    steps = ranks[1].steps
    assert steps is not None
    late = steps["mono"] + np.where(steps["step"] == 30, 0.05, 0.0)
    assert all_accounts(table, steps_of(ranks, 1, mono=late)) == []


def test_time_beside_the_steps_is_left_out() -> None:
    """An evaluation of 9 s before step 31, which dt_s leaves out as it should."""
    table, ranks = honest()
    for number in range(RANKS):
        steps = ranks[number].steps
        assert steps is not None
        late = steps["mono"] + np.where(steps["step"] >= 31, 9.0, 0.0)
        ranks = steps_of(ranks, number, mono=late, alone=steps["step"] != 31)
    assert clocks.step_clock(table, ranks[0], ranks) == []


def test_the_others_wait_for_a_profiler_in_its_step_and_the_next() -> None:
    """Rank 0 closes its profiler at the end of step 20; rank 1 waits for it in step 21."""
    table, ranks = honest()
    first, second = ranks[0].steps, ranks[1].steps
    assert first is not None
    assert second is not None
    ranks = steps_of(
        ranks,
        0,
        mono=first["mono"] + np.where(first["step"] >= 20, 9.0, 0.0),
        alone=first["step"] != 20,
    )
    ranks = steps_of(ranks, 1, mono=second["mono"] + np.where(second["step"] >= 21, 9.0, 0.0))
    assert [clocks.step_clock(table, rank, ranks) for rank in ranks] == [[], []]


def test_memory_may_grow_while_a_profiler_saves_its_trace() -> None:
    _, ranks = honest()
    steps = ranks[0].steps
    assert steps is not None
    cpu = replace(WORK, device="cpu")
    level = steps_of(ranks, 0, rss_mib=300.0)[:1]
    assert training_accounts.memory_account(level, cpu) == []
    saved = steps_of(level, 0, rss_mib=np.where(steps["step"] == 9, 500.0, 300.0))
    assert "memory of step 9" in training_accounts.memory_account(saved, cpu)[0]
    busy = steps_of(saved, 0, alone=steps["step"] != 9)
    assert training_accounts.memory_account(busy, cpu) == []


def test_each_rank_has_a_rate_of_its_own() -> None:
    table, ranks = honest()
    steps = ranks[1].steps
    assert steps is not None
    assert all_accounts(table, steps_of(ranks, 1, toks_per_s=steps["toks_per_s"] * 1.1)) == []


def test_a_few_steps_on_a_busy_machine_are_no_fraud_but_half_the_time_is() -> None:
    """Twelve steps whose ends a busy rank 1 notes up to 1 ms early or late, in steps of 10 ms."""
    wrong = 0
    for seed in range(200):
        table, ranks = honest()
        table = table[:12]
        steps = ranks[1].steps
        assert steps is not None
        noise = np.random.default_rng(seed).uniform(-0.001, 0.001, 12)
        ranks = steps_of(ranks, 1, mono=steps["mono"][:12] + noise)
        wrong += clocks.step_clock(table, ranks[1], ranks) != []
        assert clocks.step_clock(table.assign(dt_s=table["dt_s"] / 2), ranks[1], ranks) != []
    assert wrong <= 2


def test_what_is_done_between_the_arms_of_a_round_is_left_out() -> None:
    """Two arms of one round; DDP is wrapped anew for 9 s before the second one."""
    table, ranks = honest()
    table = table.assign(arm=["a"] * 30 + ["b"] * 30)
    for number in range(RANKS):
        steps = ranks[number].steps
        assert steps is not None
        late = steps["mono"] + np.where(steps["step"] >= 31, 9.0, 0.0)
        ranks = steps_of(ranks, number, mono=late)
    assert clocks.step_clock(table, ranks[0], ranks) == []
    assert clocks.step_clock(table.assign(arm="a"), ranks[0], ranks) != []


def test_what_rank_0_does_beside_a_step_the_others_wait_for_in_the_next() -> None:
    """Rank 0 writes a trace for 9 s at the end of step 30, which dt_s leaves out as it should."""
    table, ranks = honest()
    for number in range(RANKS):
        steps = ranks[number].steps
        assert steps is not None
        late = steps["mono"] + np.where(steps["step"] >= 30 + number, 9.0, 0.0)
        ranks = steps_of(ranks, number, mono=late)
    beside = steps_of(ranks, 0, alone=table["step"] != 30)
    assert clocks.time_account(table, beside, None) == []
    assert len(clocks.time_account(table, ranks, None)) == RANKS


CSV: dict[str, tuple[Callable[[pd.DataFrame], pd.DataFrame], str]] = {
    "dt halved": (lambda t: t.assign(dt_s=t["dt_s"] / 2), "dt_s sums to 0.500"),
    "the optimizer outside the step": (lambda t: t.assign(dt_s=t["dt_s"] * 0.85), "0.850"),
    "3 % less": (lambda t: t.assign(dt_s=t["dt_s"] * 0.97), "0.970"),
    "one long stall hidden": (
        lambda t: t.assign(dt_s=np.where(t["step"] == 20, 0.01, t["dt_s"])),
        "",
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


@pytest.mark.parametrize("name", [name for name, (_, text) in CSV.items() if text])
def test_a_csv_that_the_heartbeats_contradict(name: str) -> None:
    change, text = CSV[name]
    table, ranks = honest()
    assert text in "; ".join(all_accounts(change(table), ranks))


def test_a_hidden_stall_is_noticed_by_the_clock() -> None:
    table, ranks = honest()
    for number in range(RANKS):
        steps = ranks[number].steps
        assert steps is not None
        ranks = steps_of(
            ranks, number, mono=steps["mono"] + np.where(steps["step"] >= 20, 2.0, 0.0)
        )
    assert "of what rank 0's clock shows" in "; ".join(all_accounts(table, ranks))


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
    "no first update": (lambda r: ending_of(r, 0, first_update=None), "but by nan of it"),
    "reading below what is in use": (lambda r: steps_of(r, 1, cuda_mib=900.0), "memory of step"),
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
    "no oracle": (lambda r: proof_of(r, 0, oracle=None), "rank 0 did not hold"),
}


@pytest.mark.parametrize("name", HEARTBEATS)
def test_heartbeats_that_do_not_balance(name: str) -> None:
    change, text = HEARTBEATS[name]
    table, ranks = honest()
    assert text in "; ".join(all_accounts(table, change(ranks)))


def test_a_clock_that_runs_at_half_speed_is_noticed_by_the_launcher() -> None:
    table, ranks = honest()
    slow = RankExit(rank=0, code=0, said_s=10.0, watched_s=20.0)
    assert clocks.time_account(table, ranks, 30.0, (slow,)) == [
        "rank 0 counts 10.0 s between steps that arrived at the launcher in 20.0 s"
    ]


def test_the_first_row_has_the_loss_of_the_first_batch() -> None:
    table, ranks = honest()
    table.loc[0, "loss"] = 5.58
    assert "the CSV's first loss is 5.58000, the ranks' mean was 5.60000" in "; ".join(
        accounts.loss_account(table, ranks, WORK)
    )
    two = replace(WORK, step_tokens=2 * PER_RANK)
    assert accounts.loss_account(table, ranks, two) == []  # a pass is half of the step


def test_the_model_of_the_last_step_is_held_against_the_oracle_in_fp32() -> None:
    _, ranks = honest()
    exact = {**proof(0)["oracle"], "attention": 1e-6}
    ranks = proof_of(ranks, 0, oracle=exact)
    spots = {**exact, "layer": 0.3}
    changed_since = ending_of(ranks, 0, proof={**proof(0), "oracle": spots})
    half = replace(WORK, dtype="bf16")
    assert "last batch" not in "; ".join(learning.oracle_account(changed_since, half))
    (text,) = learning.oracle_account(changed_since, replace(WORK, dtype="fp32"))
    assert "layer is off by 0.3 of itself in the last batch" in text


def test_a_document_may_be_read_again_but_not_at_once() -> None:
    table, ranks = honest()
    digests = [f"{step % 20:016x}" for step in table["step"]]
    again = steps_of(ranks, 0, data=digests)
    assert all_accounts(table, again, replace(WORK, generated=False)) == []
    stuck = steps_of(ranks, 0, data=["1", *["1"], *digests[2:]])
    assert "what it read before" in "; ".join(
        all_accounts(table, stuck, replace(WORK, generated=False))
    )


def test_too_short_for_two_compressed_blocks_their_keys_may_stay_idle() -> None:
    _, ranks = honest()
    idle = proof_of(ranks, 0, own_gradient={"attention.k_cmp": 0.0})
    assert learning.gradient_account(idle[:1], replace(WORK, seq_len=31)) == []
    assert "k_cmp" in learning.gradient_account(idle[:1], replace(WORK, seq_len=32))[0]


def test_the_ranks_together_read_what_one_reads() -> None:
    _, ranks = honest()
    steps = ranks[0].steps
    assert steps is not None
    both = [f"{(step * 8) + (step * 8 + 1):016x}" for step in steps["step"]]
    alone = steps_of(ranks, 0, data=both)[:1]
    together, single = accounts.union_of_data(ranks), accounts.union_of_data(alone)
    assert together is not None
    assert single is not None
    assert together.tolist() == single.tolist()


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
    assert least < learning.oracle_tolerance(replace(WORK, dtype=dtype, device=device)) < most


def test_arms_that_differ_in_compression_have_no_single_wire() -> None:
    env: dict[str, Any] = {
        "world_size": 2,
        "effective": {"per_rank_batch": 1, "seq_len": 8, "accumulation": 1, "dtype": "fp32"},
        "toggles": [{"name": "NSA_DDP_COMPRESS", "value": "bf16"}],
    }
    assert Workload.of(env).wire == "bf16"
    assert Workload.of(env | {"arms": {"set": {"NSA_DDP_COMPRESS": "off"}}}).wire is None
    assert Workload.of(env | {"toggles": []}).wire == "fp32"
    assert Workload.of(env | {"world_size": 1}).wire == "fp32"
