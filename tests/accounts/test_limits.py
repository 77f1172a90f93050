"""Each account at its limits, and just beyond them: limits.yaml has the cases."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from runbook.accounts.registry import Account, Row
from runbook.records import RankExit
from tests.accounts.launches import WORK, Ranks, changed, honest, sources, steps_of

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
