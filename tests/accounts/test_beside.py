"""Time between steps that no clock counts: only what the plan asks for, as often as it asks."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from nsa.contract.digests import recomputed_steps
from runbook.accounts.between_steps import beside_account, beside_words
from runbook.folder.launch.rank_log import read_heartbeats
from tests.accounts.launches import RANKS, STEPS, Ranks, rank, rows
from tests.factory.files import beat

NOTHING_ASKED: dict[str, Any] = {"config": {"train": {"eval_every": 0, "save_every": 0}}}


def doing(steps: Collection[int], *kinds: str) -> Ranks:
    """Two ranks, of which rank 1 did these things before these steps ended."""
    table = rows()
    ranks = [rank(number, table) for number in range(RANKS)]
    object.__setattr__(ranks[1], "beside", {step: frozenset(kinds) for step in steps})
    return tuple(ranks)


def asked(**train: int) -> dict[str, Any]:
    return {"config": {"train": train}, "toggles": []}


@pytest.mark.parametrize(
    "kind", ["memory_dump", "eval", "checkpoint_start", "coffee", "effect", "compiled"]
)
def test_what_nothing_asks_for_every_third_step_does_not_balance(kind: str) -> None:
    (problem,) = beside_account(rows(), doing(range(3, STEPS, 3), kind), NOTHING_ASKED)
    assert problem.startswith("rank 1 did beside 19 steps ") and kind in problem


@pytest.mark.parametrize(
    ("kinds", "env", "most"),
    [
        (("memory_dump",), {"toggles": [{"name": "NSA_MEM_DUMP_EVERY", "value": 10}]}, 14),
        (("eval_start", "eval"), asked(eval_every=20), 8),
        (("checkpoint_start", "checkpoint"), asked(save_every=30), 6),
        (("ddp_buckets", "effect"), NOTHING_ASKED, 10),
    ],
)
def test_what_is_asked_for_balances_as_often_as_it_is_asked_for(
    kinds: tuple[str, ...], env: dict[str, Any], most: int
) -> None:
    assert beside_account(rows(), doing(range(2, 2 + most), *kinds), env) == []
    assert beside_account(rows(), doing(range(2, 3 + most), *kinds), env) != []


def test_only_steps_that_the_token_draws_are_computed_twice() -> None:
    env = {"effective": {"steps": STEPS}}
    drawn = recomputed_steps("t", 1, STEPS)[1:]
    assert beside_account(rows(), doing(drawn, "recomputed"), env) == []
    others = [step for step in range(2, STEPS) if step not in drawn][:2]
    assert beside_account(rows(), doing([*drawn, *others], "recomputed"), env) == [
        f"rank 1 did beside 2 steps recomputed, first {others[0]}, which no token draws"
    ]


def test_each_block_of_an_arm_may_prove_its_toggles() -> None:
    table = rows().assign(block=[step // 30 for step in range(STEPS)])
    assert beside_account(table, doing(range(2, 22), "effect"), NOTHING_ASKED) == []


def test_the_share_of_the_time_that_went_beside_is_told() -> None:
    table, ranks = rows(), doing(())
    assert beside_words(table, ranks[0]) == ""
    steps = ranks[0].steps
    steps.loc[steps["step"] >= 30, "mono"] += 0.2
    object.__setattr__(ranks[0], "beside", {30: frozenset({"eval", "effect"})})
    whole = float(table["dt_s"][1:].sum())
    assert f"; {0.2 / (whole + 0.2):.1%} of the time went to eval beside 1 step(s)" in beside_words(
        table, ranks[0]
    )


def test_the_events_between_two_ends_are_kept(tmp_path: Path) -> None:
    steps = 6
    text = beat("boot")
    for step in range(1, steps + 1):
        others = "".join(beat(event, step=step) for event in ("effect", "memory_dump"))
        text += beat("step_start", step=step) + others * (step % 3 == 0 or step == 1)
        text += beat("step_end", step=step, mono=float(step))
    (tmp_path / "heartbeat_rank0.jsonl").write_text(text + beat("exit", code=0))
    path = tmp_path / "heartbeat_rank0.jsonl"
    log = read_heartbeats(path, rank=0, relative_to=tmp_path)
    expected = frozenset({"effect", "memory_dump"})
    assert log.beside == dict.fromkeys(range(3, steps + 1, 3), expected)
