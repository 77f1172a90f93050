"""A toggle took effect only if something shows it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from nsa.toggles import SAFE_MODE, TOGGLES, parse_toggles, with_safe_mode
from nsa.train import effects
from nsa.train.effects import Seen

# Not in the table of rules: the loop and the tables say what they really do.
RUNNING = {
    "NSA_TB_DISABLE": False,
    "NSA_DISABLE_CSV_LOGS": True,
    "NSA_DISABLE_AUX_STATS": None,
    "NSA_HEARTBEAT_EVERY": 1,
    "NSA_MEM_DUMP_EVERY": 0,
}


def seen(variables: dict[str, str], running: dict[str, Any] | None = None) -> Seen:
    return Seen(
        engine=cast("Any", SimpleNamespace(wrapped=None)),
        toggles=with_safe_mode(parse_toggles(variables)),
        ranges={},
        kernels=None,
        wire=None,
        running=running or {},
    )


def test_every_toggle_of_the_trainer_has_something_that_shows_its_effect() -> None:
    trainers = {name for name, row in TOGGLES.items() if row.reader == "trainer"}
    assert trainers == set(effects._RULES) | set(RUNNING)


def test_without_a_rule_a_toggle_is_unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(effects._RULES, "NSA_USE_FA2")
    took, why = effects._judge("NSA_USE_FA2", seen({"NSA_USE_FA2": "1"}))
    assert took is None
    assert "unproven" in why


def test_what_runs_is_held_against_what_was_asked_for() -> None:
    asked = seen({"NSA_TB_DISABLE": "1", "NSA_DISABLE_CSV_LOGS": "1"}, RUNNING)
    assert effects._judge("NSA_TB_DISABLE", asked) == (False, {"in_force": False})
    assert effects._judge("NSA_DISABLE_CSV_LOGS", asked) == (True, {"in_force": True})
    assert effects._judge("NSA_DISABLE_AUX_STATS", asked)[0] is None


def test_safe_mode_is_all_of_its_consequences() -> None:
    took, evidence = effects._judge("NSA_DDP_SAFE_MODE", seen({"NSA_DDP_SAFE_MODE": "1"}))
    assert took is True
    assert evidence == {**SAFE_MODE, "gradient_as_bucket_view": False}
