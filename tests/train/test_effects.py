"""A toggle took effect only if something shows it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from nsa.attention import selection
from nsa.config import NSAConfig
from nsa.contract import SELECTION_RANGES
from nsa.toggles import SAFE_MODE, TOGGLES, parse_toggles, with_safe_mode
from nsa.train import effects
from nsa.train.effects import Seen

CFG = NSAConfig(
    dim=16, n_heads=2, n_kv_groups=1, d_k=8, d_v=8, l=8, d=4, l_sel=8, n_sel=4, w=8, phi="avg"
)
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


@pytest.mark.parametrize("asked", ["v1", "v2"])
@pytest.mark.parametrize("runs", ["v1", "v2"])
def test_ranges_are_told_apart_by_what_they_need_not_by_their_name(
    asked: str, runs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The range bears the name that was asked for, whatever runs in it."""
    monkeypatch.setattr(
        selection,
        {"v1": "ranges_v2", "v2": "ranges_v1"}[runs],
        getattr(selection, f"ranges_{runs}"),
    )
    toggles = {"NSA_SEL_RANGES_V2": "1" if asked == "v2" else "0"}
    shown = replace(
        seen(toggles),
        engine=cast(
            "Any", SimpleNamespace(model=SimpleNamespace(cfg=SimpleNamespace(attention=CFG)))
        ),
        ranges={SELECTION_RANGES[asked]: 1},
    )
    took, evidence = effects._judge("NSA_SEL_RANGES_V2", shown)
    assert took == (asked == runs)
    assert evidence["vectorized"] == (runs == "v2")


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("groups", [(False, False), (True, False), (True, True)])
def test_fused_is_what_the_optimizer_goes_by_in_every_group(
    asked: bool, groups: tuple[bool, ...]
) -> None:
    """The engine says that it is as asked, in each case."""
    optimizer = torch.optim.AdamW(
        [{"params": [torch.nn.Parameter(torch.ones(2))], "fused": one or None} for one in groups]
    )
    for group in optimizer.param_groups:
        (parameter,) = group["params"]
        parameter.grad = torch.ones(2)
    optimizer.step()
    shown = replace(
        seen({"NSA_OPT_FUSED": "1" if asked else "0"}),
        engine=cast("Any", SimpleNamespace(optimizer=optimizer, is_fused=lambda: asked)),
    )
    took, evidence = effects._judge("NSA_OPT_FUSED", shown)
    assert took == (set(groups) == {asked})
    assert evidence["fused"] == list(groups)


def test_safe_mode_is_all_of_its_consequences() -> None:
    took, evidence = effects._judge("NSA_DDP_SAFE_MODE", seen({"NSA_DDP_SAFE_MODE": "1"}))
    assert took is True
    assert evidence == {**SAFE_MODE, "gradient_as_bucket_view": False}
