"""Two sources for each fact: an honest launch balances, and each dishonest one does not."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from runbook.accounts import tables
from runbook.accounts.registry import ACCOUNTS, Account, Row, Unbalanced, unbalanced
from runbook.records import RankExit, Reason
from runbook.records.evidence import Effect
from tests.accounts.launches import WORK, Ranks, all_accounts, changed, honest, sources, steps_of


def test_an_honest_launch_balances() -> None:
    assert all_accounts(*honest()) == []


SIZE = 1_848_928


def compressed(sent: int) -> Effect:
    """What a rank tells of the bytes of its gradients in two steps."""
    told = {"bytes_before": sent * SIZE, "bytes_of_gradients": SIZE, "steps": 2}
    return Effect(toggle="NSA_DDP_COMPRESS", value="bf16", took_effect=True, evidence=told)


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


@pytest.mark.parametrize(("more", "apart"), [(0.0008, 0), (0.0012, 1)])
def test_a_rate_is_written_with_three_digits(more: float, apart: int) -> None:
    table, ranks = honest()
    said = ranks[0].steps["toks_per_s"]  # type: ignore[index]
    found = tables.copy_account(table.assign(toks_per_s=said * (1 + 1e-6) + more), ranks)
    assert len(found) == apart
    assert all(f"({len(table)} steps differ)" in text for text in found)


@pytest.mark.parametrize(
    ("names", "topic"),
    [
        ("timeout thread", "settings"),
        ("timeout memory", None),
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
    assert alone is None or topic != "settings" or alone.reason is Reason.MISMATCH


def test_without_a_column_that_heartbeats_tell_nothing_is_held_against_them() -> None:
    table, ranks = honest()
    found = unbalanced(sources(table.drop(columns=["loss", "dt_s"]), ranks), Row.ACCOUNTS).found
    assert found[0][1] == ("the CSV has no column loss, dt_s",)
    assert not any(one.copied for one, _ in found)
    assert tables.copy_account(table[:-1], ranks[:1]) == ["the CSV has 59 steps, rank 0 ended 60"]


LISTED = yaml.safe_load(Path(__file__).with_name("limits.yaml").read_text())
CASES = [(account, *case) for account, cases in LISTED.items() for case in cases]


def put(tree: Any, path: Sequence[str], value: Any) -> Any:
    """A copy of nested mappings with this value at its place."""
    if not path:
        return value
    return {**tree, path[0]: put((tree or {}).get(path[0]), path[1:], value)}


def column(table: pd.DataFrame, name: str, value: Any) -> Any:
    """This value in all steps, or one for each step that is named and one for `all`."""
    if not isinstance(value, Mapping):
        return value
    others = pd.Series(value.get("all", table.get(name)), index=table.index)
    return others.where(~table["step"].isin(list(value)), table["step"].map(value))


def with_field(ranks: Ranks, number: int, path: Sequence[str], value: Any) -> Ranks:
    if path[0] == "steps" and path[1:]:
        return steps_of(ranks, number, **{path[1]: column(ranks[number].steps, path[1], value)})
    own = getattr(ranks[number], path[0])
    return changed(ranks, number, **{path[0]: put(own, path[1:], value)})


def with_fields(ranks: Ranks, changes: Mapping[str, Any]) -> Ranks:
    # What is changed of all ranks comes first.
    for key, value in sorted(changes.items(), key=lambda one: not one[0].startswith("all.")):
        first, *rest = path = key.split(".")
        numbers = {"all": (0, 1), "0": (0,)}.get(first, (1,))
        for number in numbers:
            ranks = with_field(ranks, number, rest if first in ("all", "0") else path, value)
    return ranks


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}: {case[1:]}")
def test_what_an_account_says_of_a_launch_that_is_otherwise_honest(case: list[Any]) -> None:
    name, changes, *says = case
    own = dict(changes)
    work = replace(WORK, **own.pop("work", {}))
    toggles = [{"name": n, "value": v} for n, v in own.pop("toggles", {}).items()]
    given, seen, duration_s = own.pop("given", {}), own.pop("exit", {}), own.pop("duration_s", None)
    table, ranks = honest()
    for column_name, value in own.pop("csv", {}).items():
        table[column_name] = column(table, column_name, value)
    exits = (RankExit(rank=0, code=0), RankExit(rank=1, code=0, **seen))
    told = replace(
        sources(table, with_fields(ranks, own), work, duration_s, exits),
        env={"toggles": toggles},
        given=given,
    )
    module, _, check = name.partition(".")
    account = getattr(importlib.import_module(f"runbook.accounts.{module}"), check)
    problems = Account(Row.ACCOUNTS, account).problems(told)
    assert len(problems) == len(says), problems
    assert all(part in text for part, text in zip(says, problems, strict=True)), problems
