"""The table of accounts: every one is described, and what a row says of those that are off."""

from __future__ import annotations

from runbook.accounts.registry import ACCOUNTS, Row, Unbalanced, unbalanced
from runbook.records import Reason
from tests.accounts.launches import honest, sources


def _off(*names: str) -> Unbalanced:
    known = {one.check.__name__.removesuffix("_account"): one for one in ACCOUNTS}
    return Unbalanced(found=tuple((known[name], (f"{name} is off",)) for name in names))


def test_one_account_alone_gives_its_row_topic_and_reason() -> None:
    alone = _off("settings").account
    assert (alone.topic, alone.reason) == ("settings", Reason.MISMATCH)
    assert _off("settings", "memory").account is None
    assert _off("memory", "settings").problems == ["memory is off", "settings is off"]


def test_accounts_of_one_remedy_give_it_together() -> None:
    both = _off("token", "data").account
    assert both is not None and both.topic == "trained_on"
    assert _off("token", "saved").account is None
    assert _off("memory", "gates").account is None  # both without one


def test_an_account_from_which_others_follow_gives_it_beside_them_too() -> None:
    both = _off("first_weights", "oracle").account
    assert both is not None and both.topic == "first_weights"
    left = _off("shadow", "left_over").account
    assert left is not None and (left.topic, left.reason) == ("left_over", Reason.NOT_LEARNING)


def test_without_a_column_that_heartbeats_tell_nothing_is_held_against_them() -> None:
    table, ranks = honest()
    found = unbalanced(sources(table.drop(columns=["loss", "dt_s"]), ranks), Row.ACCOUNTS).found
    assert found[0][1] == ("the CSV has no column loss, dt_s",)
    assert not any(one.copied for one, _ in found)
