"""The work of a launch, as its config and what it was told say it."""

from __future__ import annotations

from typing import Any

import pytest

from runbook.accounts.gradients import gradient_account
from runbook.accounts.workload import GeneratedData, Workload
from tests.accounts.launches import ending_of, honest, proof_of

ENV: dict[str, Any] = {
    "world_size": 2,
    "effective": {"per_rank_batch": 1, "seq_len": 8, "accumulation": 1, "dtype": "fp32"},
    "toggles": [{"name": "NSA_DDP_COMPRESS", "value": "bf16"}],
}


def env(**effective: Any) -> dict[str, Any]:
    known = {"per_rank_batch": 2, "seq_len": 64, "accumulation": 3, "dtype": "bf16"}
    train = {"grad_clip": 0.5, "seed": 7, "eval_every": 20, "eval_batches": 4}
    return {
        "world_size": 2,
        "effective": {**known, "dataset": "books", "device": "cpu", **effective},
        "config": {"nsa": {"l": 16}, "model": {"n_layers": 4}, "train": train},
    }


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


def test_arms_that_differ_in_compression_have_no_single_wire() -> None:
    env = ENV
    assert Workload.of(env).wire == "bf16"
    assert Workload.of(env | {"arms": {"set": {"NSA_DDP_COMPRESS": "off"}}}).wire is None
    assert Workload.of(env | {"toggles": []}).wire == "fp32"
    assert Workload.of(env | {"world_size": 1, "toggles": []}).wire == "fp32"


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
