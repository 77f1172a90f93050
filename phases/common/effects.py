"""Took-effect probes: nothing is concluded from a toggle that did nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nsa.contract import NSAError
from nsa.toggles import TOGGLES
from runbook.records.evidence import Effect, LaunchEvidence

# Toggles that switch logging, watching or limits; their absence changes no number.
_PASSIVE = frozenset(
    {
        "NSA_TB_DISABLE",
        "NSA_DISABLE_CSV_LOGS",
        "NSA_DISABLE_AUX_STATS",
        "NSA_HEARTBEAT_EVERY",
        "NSA_MEM_DUMP_EVERY",
        "NSA_PG_TIMEOUT_MIN",
    }
)


def toggles_in_force(env: Mapping[str, str]) -> dict[str, str]:
    """The trainer toggles of a launch that must prove themselves."""
    return {
        name: value
        for name, value in env.items()
        if name in TOGGLES and TOGGLES[name].reader == "trainer" and name not in _PASSIVE
    }


def same_value(toggle: str, left: object, right: object) -> bool:
    """Do two spellings of a toggle's value mean the same (`50` and `50.0`, `1` and `True`)?"""
    row = TOGGLES[toggle]
    try:
        return row.parse(str(left)) == row.parse(str(right))
    except NSAError:
        return str(left) == str(right)


def effects_of(
    launch: LaunchEvidence, toggle: str, value: str, *, arm: str | None = None
) -> tuple[Effect, ...]:
    """The trainer's reports on this toggle at this value."""
    return tuple(
        effect
        for effect in launch.effects(toggle, arm=arm)
        if same_value(toggle, effect.value, value)
    )


def proof_text(evidence: Any) -> str:
    """The trainer's evidence as a reader wants it: `fused yes, state_entries 16`.

    >>> proof_text({"hook": "bf16", "fused": [True, True], "bytes_after": 2773392})
    'hook bf16, fused yes/yes, bytes_after 2773392'
    """
    if isinstance(evidence, Mapping):
        return ", ".join(f"{name} {proof_text(value)}" for name, value in evidence.items())
    if isinstance(evidence, list | tuple):
        return "/".join(proof_text(value) for value in evidence) or "none"
    if isinstance(evidence, bool):
        return "yes" if evidence else "no"
    return str(evidence)


def effect_problem(
    launch: LaunchEvidence, toggle: str, value: str, *, arm: str | None = None
) -> str:
    """Why this toggle is not proven to have taken effect, or an empty string.

    Proven means: at least one rank reports it, and no report says otherwise.
    """
    where = f" in arm {arm}" if arm else ""
    found = effects_of(launch, toggle, value, arm=arm)
    if not found:
        others = sorted({effect.value for effect in launch.effects(toggle, arm=arm)})
        seen = f"; reported for {', '.join(others)}" if others else ""
        return f"{toggle}={value}{where}: no proof that it took effect{seen}"
    refused = [effect for effect in found if effect.took_effect is False]
    if refused:
        return f"{toggle}={value}{where}: did nothing ({proof_text(refused[0].evidence)})"
    if not any(effect.took_effect for effect in found):
        return f"{toggle}={value}{where}: the trainer cannot tell whether it took effect"
    return ""
