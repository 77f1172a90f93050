"""The work of a launch and the size of its model, by its config; what steps waited for data."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from nsa.config import ModelConfig, NSAConfig
from nsa.contract import Event
from nsa.model import NSALanguageModel
from runbook.accounts import GeneratedData, Workload
from runbook.accounts.between_steps import fetch_account
from runbook.accounts.first_weights import size_account
from runbook.accounts.gradients import gradient_account
from runbook.accounts.model import flops_account
from runbook.folder.launch.shapes import shape_of, shaped
from tests.accounts.launches import STEPS, Ranks, changed, ending_of, honest, proof_of, steps_of

GIVEN: dict[str, Any] = {
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
    work = Workload.of(env())
    assert (work.nproc, work.step_tokens, work.pass_tokens, work.block) == (2, 384, 128, 16)
    assert (work.wire, work.data, work.dtype, work.layers) == ("fp32", None, "bf16", 4)
    assert (work.grad_clip, work.eval_every, work.eval_batches) == (0.5, 20, 4)
    assert work.shape == {"n_layers": 4, "l": 16}
    assert Workload.of(env(steps=9)).steps == 9
    assert Workload.of(env() | {"config": None}).block == 0


def test_arms_that_differ_in_compression_have_no_single_wire() -> None:
    env = GIVEN
    assert Workload.of(env).wire == "bf16"
    assert Workload.of(env | {"arms": {"set": {"NSA_DDP_COMPRESS": "off"}}}).wire is None
    assert Workload.of(env | {"toggles": []}).wire == "fp32"
    assert Workload.of(env | {"world_size": 1, "toggles": []}).wire == "fp32"


def test_what_generated_data_are_follows_from_the_config() -> None:
    told = env(dataset="markov", vocab_size=256)
    assert Workload.of(told).data == GeneratedData(
        kind="markov", seed=7, vocab_size=256, seq_len=64, nproc=2, rows=2, accumulation=3
    )
    del told["config"]["train"]["seed"]
    with pytest.raises(ValueError, match=r"no usable config\.train\.seed$"):
        Workload.of(told)
    with pytest.raises(ValueError, match=r"no usable effective\.vocab_size$"):
        Workload.of(env(dataset="markov"))
    with pytest.raises(ValueError, match="more tokens in a step than a rank can read"):
        Workload.of(env(dataset="synthetic", vocab_size=256, per_rank_batch=1 << 40))


@pytest.mark.parametrize("bad", [None, 0, "many"])
def test_a_workload_that_cannot_be_known(bad: object) -> None:
    with pytest.raises(ValueError, match=r"no usable effective\.seq_len, effective\.accumulation$"):
        Workload.of(env(seq_len=bad, accumulation=bad))
    with pytest.raises(ValueError, match=r"no usable world_size$"):
        Workload.of(env() | {"world_size": bad})


@pytest.mark.parametrize("told", ["bf16", "fp32"])
def test_one_rank_narrows_its_gradients_in_ddp_and_not_without(told: str) -> None:
    # As torchrun --nproc_per_node=1 with NSA_DDP_COMPRESS=bf16 leaves it, and python without DDP.
    work = Workload.of(GIVEN | {"world_size": 1})
    low = 0.998046875 if told == "bf16" else 1.0
    _, ranks = honest()
    alone = proof_of(ranks, 0, wire=told, mean_low=low)[:1]
    alone = ending_of(alone, 0, proof=alone[0].proof)
    assert gradient_account(alone, work) == []
    wrong = proof_of(alone, 0, mean_low=0.97)
    assert "came out as 0.97" in gradient_account(wrong, work)[0]


SMALL = {"dim": 24, "n_heads": 4, "n_kv_groups": 2, "d_k": 6, "d_v": 10, "l": 8, "d": 4}
SMALL |= {"l_sel": 8, "n_sel": 3, "w": 8}


def of_model(cfg: ModelConfig, n_params: object) -> dict[str, Any]:
    """What env.json has of a model."""
    own = asdict(cfg.attention)
    names = ("dim", "n_heads", "n_kv_groups", "d_k", "d_v")
    return {
        "config": {
            "model": {name: own[name] for name in names}
            | {
                "n_layers": cfg.n_layers,
                "mlp_ratio": cfg.mlp_ratio,
                "tie_embeddings": cfg.tie_embeddings,
            },
            "nsa": {name: own[name] for name in ("l", "d", "l_sel", "n_sel", "w", "phi")},
        },
        "effective": {
            "per_rank_batch": 1,
            "seq_len": 50,
            "accumulation": 1,
            "dtype": "fp32",
            "n_params": n_params,
            "vocab_size": cfg.vocab_size,
        },
        "world_size": 1,
    }


def built(cfg: ModelConfig, *, once: bool = True) -> int:
    """The parameters of a model of this config: a shared one once, or as often as it is named."""
    with torch.device("meta"):
        model = NSALanguageModel(cfg)
    return sum(p.numel() for _, p in model.named_parameters(remove_duplicate=once))


@pytest.mark.parametrize(
    ("phi", "tied", "ratio", "layers"),
    [("avg", True, 8 / 3, 1), ("mlp", False, 1.3, 3)],
)
def test_a_models_own_count_balances(phi: Any, tied: bool, ratio: float, layers: int) -> None:
    attention = NSAConfig(**SMALL, phi=phi)
    cfg = ModelConfig(
        vocab_size=50, n_layers=layers, attention=attention, mlp_ratio=ratio, tie_embeddings=tied
    )
    assert size_account(of_model(cfg, built(cfg))) == []
    if tied:
        (problem,) = size_account(of_model(cfg, built(cfg, once=False)))
        assert f"a model of its config has {built(cfg)}" in problem
    for wrong in (built(cfg) - 1, 0, None):
        assert size_account(of_model(cfg, wrong))


@pytest.mark.parametrize("seq_len", [1, 7, 50, 64])
def test_flops_of_a_token_are_those_of_the_keys_that_it_meets(seq_len: int) -> None:
    """Counted key by key; FLOPs that are told twice as high would double MFU."""
    cfg = ModelConfig(vocab_size=50, n_layers=2, attention=NSAConfig(**SMALL))
    told = of_model(cfg, built(cfg))
    told["effective"]["seq_len"] = seq_len
    met = 0
    for query in range(seq_len):
        met += sum(1 for first in range(0, seq_len, 4) if first + 7 <= query)
        blocks = sorted({0, query // 8 - 1, query // 8} & set(range(seq_len)))
        met += sum(1 for key in range(query + 1) if key // 8 in blocks)
        met += sum(1 for key in range(query + 1) if query - key < 8)
    # Scores and weighted sums, each a product and a sum, once forward and twice backward.
    wanted = 6 * built(cfg) + 3 * 2 * 4 * (6 + 10) * 2 * met / seq_len
    for share in (1, 2, 1 + 1e-5, 0):
        told["effective"]["model_flops_per_token"] = wanted * share
        assert (not flops_account(told, Workload.of(told))) is (share == 1)


@pytest.mark.parametrize(
    ("section", "name"),
    [("model", "dim"), ("model", "tie_embeddings"), ("nsa", "phi"), ("nsa", "l")],
)
@pytest.mark.parametrize("odd", [None, [1]])
def test_a_shape_that_is_not_told_is_no_proof(section: str, name: str, odd: object) -> None:
    told = of_model(ModelConfig(vocab_size=256, n_layers=12), 78_404_784)
    told["config"][section][name] = odd
    fitted, _ = shaped(told, shape_of("env"), "env.json")
    assert size_account(fitted)
    del told["config"][section]
    assert size_account(told) == ["env.json does not say which shape the model has"]
    assert size_account({})


# A slow loader: every step waits 10 ms, the marks are written 0.03 ms apart.
WAITED, MARKED = 0.01, 0.01003


def waiting(said: Any, clock: Any = MARKED, *, csv: Any = None) -> tuple[pd.DataFrame, Ranks]:
    """Both ranks wait; rank 1 tells `said` of it, and training.csv `csv`."""
    table, ranks = honest()
    table = table.assign(fetch_s=WAITED if csv is None else csv)
    ranks = steps_of(ranks, 0, fetch_s=table["fetch_s"], fetch_clock_s=MARKED)
    return table, steps_of(ranks, 1, fetch_s=said, fetch_clock_s=clock)


def test_one_pause_in_a_launch_of_a_step_or_two_is_within_what_a_launch_may_pause() -> None:
    for steps, fine in ((2, True), (3, False)):
        table, ranks = waiting(0.0)
        few = [replace(r, steps=r.steps.head(steps)) for r in ranks if r.steps is not None]
        assert (fetch_account(table.head(steps), tuple(few), "cpu") == []) is fine
    without = fetch_account(table.drop(columns="fetch_s"), ranks, "cpu")
    assert without == ["the CSV has no column fetch_s"]


def test_steps_with_more_between_the_marks_are_left_out() -> None:
    clock = np.where(np.arange(STEPS) < 10, 1.0, MARKED)
    table, ranks = waiting(WAITED, clock)
    for kind in (Event.MEMORY_DUMP, Event.PROFILER):
        for last in (10, STEPS):
            dumps = dict.fromkeys(range(1, last + 1), frozenset({str(kind)}))
            assert fetch_account(table, changed(ranks, 1, beside=dumps), "cpu") == []


def test_writing_the_first_mark_takes_longer_on_cuda() -> None:
    # Medians of one H200's twelve steps: 0.38 ms told, 0.30 ms for the mark.
    table, ranks = waiting(3.8e-4, 6.8e-4, csv=WAITED)
    assert fetch_account(table, ranks, "cuda") == []
    assert (
        "rank 1 says that a typical step waits 0.00038 s" in fetch_account(table, ranks, "cpu")[0]
    )
    assert fetch_account(*waiting(WAITED / 10), device="cuda")
