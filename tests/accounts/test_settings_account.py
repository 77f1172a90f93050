"""What ranks run with against what they were given: buckets of other caps are told."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from runbook.accounts import Keeping
from runbook.accounts.settings import (
    bucket_account,
    bucket_words,
    checkpoints_left_out,
    saved_account,
)
from runbook.records.evidence import RankLog
from tests.accounts.launches import Ranks, honest

MIB = 2**20
# Bytes of parameters of very different sizes, as gradients come.
PARAMETERS = random.Random(7).choices([512, 65_536, 131_072, 400_000], k=60)


def cut(cap_mib: float, parameters: list[int] = PARAMETERS) -> dict[str, Any]:
    """The buckets that torch makes: `compute_bucket_assignment_by_size`, for one type."""
    import torch
    from torch import distributed

    tensors = [torch.empty(size // 4) for size in parameters]
    places, _ = distributed._compute_bucket_assignment_by_size(tensors, [int(cap_mib * MIB)])
    sizes = [sum(parameters[at] for at in bucket) for bucket in places]
    return {
        "arm": "",
        "block": 0,
        "bytes": sizes,
        "last_bytes": [parameters[bucket[-1]] for bucket in places],
    }


def ranks_with(told: dict[str, Any]) -> Ranks:
    return tuple(replace(rank, ddp_buckets=(told,)) for rank in honest()[1])


def env(cap: object, **more: Any) -> dict[str, Any]:
    return {"toggles": [{"name": "NSA_DDP_BUCKET_MB", "value": cap}], **more}


@pytest.mark.parametrize("cap", [0.25, 25.0])
def test_the_buckets_of_a_cap_are_those_of_that_cap(cap: float) -> None:
    told = cut(cap)
    assert bucket_account(ranks_with(told), env(cap)) == []
    # While DDP looks for unused parameters it keeps the first buckets, turned round.
    turned = told | {name: told[name][::-1] for name in ("bytes", "last_bytes")}
    assert bucket_account(ranks_with(turned), env(cap)) == []


def test_the_caps_that_explain_buckets_are_all_of_them() -> None:
    """Whatever cap is asked for: it is among them exactly where torch makes the same buckets."""
    told = cut(0.5)
    for number in range(1, 200):
        cap = number / 100
        assert (bucket_account(ranks_with(told), env(cap)) == []) is (cut(cap) == told), cap


def test_one_bucket_is_told_apart_from_smaller_caps_only_and_says_so() -> None:
    small = [40_000] * 3
    ranks = ranks_with(cut(25.0, small))
    assert bucket_account(ranks, env(25.0)) == bucket_account(ranks, env(50.0)) == []
    assert "in one bucket" in bucket_words(ranks)
    (problem, _) = bucket_account(ranks, env(0.05))
    assert "of a cap above 0.07629 MiB" in problem
    assert bucket_words(ranks_with(cut(0.5))) == bucket_words(honest()[1]) == ""


def test_the_cap_of_an_arm_is_its_own() -> None:
    blocks = [
        {"block": 0, "arm": "half", "set": {"NSA_DDP_BUCKET_MB": "0.5"}},
        {"block": 0, "arm": "as given", "set": {}},
        {"block": 1, "arm": "half", "set": {"NSA_DDP_BUCKET_MB": "0.5"}},
    ]
    given = env(1.0, arms={"warmup_steps": 0, "blocks": blocks})
    half, whole = cut(0.5) | {"arm": "half"}, cut(1.0) | {"arm": "as given"}
    for right in (half, whole, half | {"block": 1}):
        assert bucket_account(ranks_with(right), given) == []
    (problem, _) = bucket_account(ranks_with(half | {"arm": "as given"}), given)
    assert problem.startswith("rank 0 in arm as given: DDP's buckets")
    odd = env(
        1.0, arms={"blocks": [{"block": 0, "arm": "half", "set": {"NSA_DDP_BUCKET_MB": "?"}}]}
    )
    assert "does not say" in bucket_account(ranks_with(half), odd)[0]


def test_the_default_counts_where_nothing_is_given() -> None:
    assert bucket_account(ranks_with(cut(25.0)), {}) == []
    assert bucket_account(ranks_with(cut(1.0)), {}) != []


TOLD = {
    "step": 20,
    "tensors": ["model.norm.weight"],
    "elements": 64,
    "other": 0,
    "read": 1,
    "wrong": [],
    "kept": [20],
}


def test_a_step_without_the_checkpoint_that_is_due_is_told() -> None:
    first, *others = honest()[1]
    assert first.steps is not None and list(first.steps["step"])[-1] == 60
    written = tuple({"path": f"checkpoints/step_{step}"} for step in (20, 40))
    told = {**TOLD, "step": 40, "read": 2, "kept": [20, 40]}
    rank = replace(first, checkpoints=written, ending={**first.ending, "saved": told})
    # The last step's is the launch's end to decide.
    assert saved_account((rank, *others), Keeping(saves=20)) == []
    (problem,) = checkpoints_left_out((rank, *others), Keeping(saves=10))
    assert problem == (
        "no checkpoint of step 10, 30, 50 was written, train.save_every=10 asks for it; "
        "those of 20, 40 were"
    )
    none = replace(rank, checkpoints=())
    (problem,) = checkpoints_left_out((none, *others), Keeping(saves=1))
    assert problem.startswith("no checkpoint of step 1, 2, 3, 4, 5, 6, 7, 8 and 51 more was")
    assert problem.endswith("; none was")


# Validation losses of the steps that were evaluated; all but 25 were saved, 50 was not evaluated.
LOSSES = {10: 3.0, 20: 2.0, 25: 1.0, 30: 2.0, 40: float("nan")}
SAVED = (10, 20, 30, 40, 50)


def that_keeps(kept: Any) -> tuple[RankLog, ...]:
    first, *others = honest()[1]
    saved = {**TOLD, "step": SAVED[-1], "read": len(SAVED), "kept": kept}
    written = tuple({"path": f"checkpoints/step_{step}"} for step in SAVED)
    told = tuple({"step": step, "loss": loss} for step, loss in LOSSES.items())
    ending = {**first.ending, "saved": saved}
    return (replace(first, ending=ending, checkpoints=written, evaluations=told), *others)


@pytest.mark.parametrize(
    ("keeping", "kept"),
    [
        (Keeping(), [10, 20, 30, 40, 50]),
        (Keeping(last=2), [40, 50]),
        (Keeping(last=1, every=20), [20, 40, 50]),
        (Keeping(last=1, best=True), [20, 50]),
    ],
)
def test_what_stays_follows_from_config_and_evaluations(keeping: Keeping, kept: list[int]) -> None:
    assert saved_account(that_keeps(kept), keeping) == []
    for other in ([10, *kept], kept[1:], None):
        if other != kept and sorted(set(other or ())) != kept:
            (problem,) = saved_account(that_keeps(other), keeping)
            assert f"train.keep_last={keeping.last}, keep_every={keeping.every}" in problem


def test_another_one_than_the_best_is_told_with_the_losses() -> None:
    (problem,) = saved_account(that_keeps([30, 50]), Keeping(last=1, best=True))
    assert problem == (
        "checkpoints of the steps 30, 50 were kept, train.keep_last=1, keep_every=0 and "
        "keep_best=true keep 20, 50; validation loss 3.0000 at 10, 2.0000 at 20, 2.0000 at 30, "
        "nan at 40"
    )
