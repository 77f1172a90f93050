"""What ranks run with against what they were given: buckets of other caps are told."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from runbook.accounts.settings import (
    bucket_account,
    bucket_words,
    checkpoints_left_out,
    position_account,
    saved_account,
    thread_account,
    timeout_account,
)
from runbook.accounts.workload import Keeping
from runbook.records.evidence import RankLog
from tests.accounts.launches import DATA, WORK, Ranks, changed, ending_of, honest

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


def test_no_single_cap_makes_buckets_that_are_cut_anyhow() -> None:
    told = {"bytes": [MIB, 3 * MIB, MIB], "last_bytes": [1024, 1024, 1024]}
    (problem, _) = bucket_account(ranks_with(told), env(1.0))
    assert "those of no single cap" in problem
    (problem, _) = bucket_account(ranks_with({**told, "last_bytes": [1]}), env(1.0))
    assert "told without the bytes" in problem


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


def test_a_launch_that_tells_no_buckets_is_told_once_it_must_have_some() -> None:
    _, ranks = honest()
    assert bucket_account(ranks, env(1.0)) == [
        f"rank {number} does not tell which buckets DDP made" for number in (0, 1)
    ]
    assert bucket_account(ranks[:1], env(1.0)) == []
    assert bucket_account(ranks, env(1.0, arms={"blocks": []})) == []
    steps = ranks[0].steps
    short = changed(changed(ranks, 0, steps=steps[:3]), 1, steps=steps[:3])
    assert bucket_account(short, env(1.0)) == []


def in_force(**changes: Any) -> dict[str, Any]:
    """What a healthy rank says that it runs with; `variables` are those that it found."""
    variables = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": None}
    return {"timeout_s": 900.0, "threads": 1, "cpus": 8, "variables": variables, **changes}


def running(**changes: Any) -> Ranks:
    """Two ranks, of which the second runs with something else."""
    ranks = ending_of(honest()[1], 0, in_force=in_force())
    return ending_of(ranks, 1, in_force=in_force(**changes))


def minutes(value: object) -> dict[str, Any]:
    return {"toggles": [{"name": "NSA_PG_TIMEOUT_MIN", "value": value}]}


def test_the_process_group_waits_as_long_as_it_was_told() -> None:
    assert timeout_account(running(), {}) == []
    assert timeout_account(running(timeout_s=9.0), minutes(0.15)) == [
        "rank 0: the process group waits for 900 s, NSA_PG_TIMEOUT_MIN=0.15 asks for 9 s"
    ]
    # A third of a minute is no whole number of milliseconds in every step of the way.
    third = ending_of(running(timeout_s=20.0), 0, in_force=in_force(timeout_s=19.999))
    assert timeout_account(third, minutes(1 / 3)) == []
    assert "does not say" in timeout_account(running(), minutes("soon"))[0]

    for ignored in (600.0, 1800.0):  # torch's own, for NCCL and for gloo
        (problem,) = timeout_account(running(timeout_s=ignored), {})
        assert problem.startswith(f"rank 1: the process group waits for {ignored:g} s")
    assert timeout_account(running(timeout_s=None), {}) == [
        "rank 1 does not tell the timeout of its process group"
    ]
    assert timeout_account(honest()[1][:1], {}) == []


def test_every_rank_computes_with_the_threads_of_the_plan() -> None:
    assert thread_account(running(), {"OMP_NUM_THREADS": "1"}) == []
    wanted = ["rank 1 computes with 2 threads, OMP_NUM_THREADS=1"]
    assert thread_account(running(threads=2), {"OMP_NUM_THREADS": "1"}) == wanted
    assert thread_account(running(threads=2), {}) == wanted, "by what the rank found"
    # A trainer that changes the variable itself is held against the plan.
    found = {"OMP_NUM_THREADS": "2"}
    told = running(threads=2, variables=found)
    assert thread_account(told, {"OMP_NUM_THREADS": "1"}) == wanted
    assert thread_account(told, {}) == []
    assert thread_account(honest()[1][:1], {}) == [
        "rank 0 does not tell with how many threads it computes"
    ]


@pytest.mark.parametrize(
    ("asked", "threads", "cpus", "told"),
    [
        ("16", 8, 16, False),  # eight cores, of which each has two CPUs: MKL takes no more
        ("16", 6, 16, True),  # no machine of 16 CPUs has so few cores
        ("4", 5, 4, True),
        ("2", 1, None, True),
        # Where torch decides nothing is asked.
        ("3,2", 2, 8, False),
        (None, 2, 8, False),
    ],
)
def test_fewer_threads_than_asked_for_are_explained_by_the_cores_only(
    asked: str | None, threads: int, cpus: int | None, told: bool
) -> None:
    variables = {"OMP_NUM_THREADS": asked, "MKL_NUM_THREADS": None}
    ranks = running(threads=threads, cpus=cpus, variables=variables)
    assert bool(thread_account(ranks[1:], {})) is told
    both = running(threads=threads, cpus=cpus, variables={**variables, "MKL_NUM_THREADS": "7"})
    assert thread_account(both[1:], {}) == []


@pytest.mark.parametrize("odd", [math.nan, 10**400, True, "25"])
def test_a_setting_that_is_no_number_is_told(odd: object) -> None:
    (problem, _) = bucket_account(ranks_with(cut(25.0)), env(odd))
    assert "NSA_DDP_BUCKET_MB" in problem
    assert "NSA_PG_TIMEOUT_MIN" in timeout_account(running(), minutes(odd))[0]


THREE = replace(WORK, data=replace(DATA, accumulation=3))
WRITTEN = {"path": "checkpoints/step_20", "seconds": 1.0}
TOLD = {
    "step": 20,
    "tensors": ["model.norm.weight"],
    "elements": 64,
    "other": 0,
    "read": 1,
    "wrong": [],
    "kept": [20],
}


def ranks(told: Any, *, written: bool = True) -> tuple[RankLog, ...]:
    first, *others = honest()[1]
    ending = {**first.ending, "saved": told}
    kept = (WRITTEN,) if written else ()
    return (replace(first, ending=ending, checkpoints=kept), *others)


def test_what_was_read_back_as_it_was_saved_balances() -> None:
    assert saved_account(ranks(TOLD), Keeping()) == []
    assert saved_account(ranks(None, written=False), Keeping()) == []


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (None, "nothing of the checkpoint step_20 was read back"),
        ({**TOLD, "step": 10}, "step 10 was read back, the newest checkpoint is step_20"),
        ({**TOLD, "other": 3}, "step_20: 3 of 64 elements read back are not what the run held"),
        ({**TOLD, "read": 0}, "0 of the 1 checkpoints that were written were read back"),
        ({**TOLD, "wrong": [10]}, "checkpoints of the steps 10 did not hold what the run held"),
        (
            {**TOLD, "other": 64, "wrong": [20], "unreadable": "names builtins.getattr"},
            "checkpoints of the steps 20: not to be read back: names builtins.getattr",
        ),
    ],
)
def test_anything_else_is_told(told: Any, said: str) -> None:
    (problem,) = saved_account(ranks(told), Keeping())
    assert problem.startswith(said)


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ([{"step": 60}, {"step": 60}], []),
        ([{"step": 60}, {"step": 59}], ["rank 1 goes on from step 20 at {'step': 59} in its data"]),
        ([{"step": 20}] * 2, ["rank 0 goes on", "rank 1 goes on"]),
        ([{"step": 60}], ["the checkpoint does not tell where each rank goes on"]),
        (None, ["the checkpoint does not tell where each rank goes on"]),
    ],
)
def test_every_rank_goes_on_behind_the_step_that_was_saved(places: Any, said: list[str]) -> None:
    """Three micro-batches a step."""
    problems = position_account(ranks({**TOLD, "positions": places}), THREE)
    assert len(problems) == len(said)
    assert all(text.startswith(begin) for text, begin in zip(problems, said, strict=True))
    assert position_account(ranks(None, written=False), THREE) == []
    unread = {**TOLD, "unreadable": "why", "positions": None}
    assert position_account(ranks(unread), THREE) == [], "saved_account says why"


def test_of_more_checkpoints_than_are_kept_as_evidence_the_count_is_held() -> None:
    (first, *others) = ranks({**TOLD, "read": 5000})
    many = replace(first, counts={"checkpoint": 5000})
    assert saved_account((many, *others), Keeping()) == []
    assert len(saved_account((first, *others), Keeping())) == 1


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
    first, *others = ranks({**TOLD, "step": SAVED[-1], "read": len(SAVED), "kept": kept})
    written = tuple({"path": f"checkpoints/step_{step}"} for step in SAVED)
    told = tuple({"step": step, "loss": loss} for step, loss in LOSSES.items())
    return (replace(first, checkpoints=written, evaluations=told), *others)


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
