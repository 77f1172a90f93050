"""Are two launches alike in everything but what is being compared?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nsa.toggles import TOGGLES
from phases.common.case import Case
from phases.common.finding import Finding, invalid, passed
from runbook.records import Reason

__all__ = ["alike", "differences"]

# What must be equal in env.json for numbers of two launches to be held against each other.
_SAME: tuple[str, ...] = (
    "git.sha",
    "git.diff_sha256",
    "versions.torch",
    "versions.cuda",
    "versions.nccl",
    "versions.driver",
    "versions.triton",
    "device.type",
    "device.name",
    "world_size",
    "config_sha256",
    "effective",
    "config",
)
# Free text and where results go; both differ without meaning anything.
_IGNORED = (
    "config.train.out_dir",
    "config.train.steps",
    # What counts is whether checkpointing really ran: effective.gradient_checkpointing.
    "config.runtime.gradient_checkpointing",
    "effective.steps",
    "effective.schedule_steps",
    "effective.attention_path_reason",
    "effective.gradient_checkpointing_reason",
)
# Toggles that only watch or log.
_OBSERVERS = frozenset(
    {
        "NSA_TB_DISABLE",
        "NSA_DISABLE_CSV_LOGS",
        "NSA_HEARTBEAT_EVERY",
        "NSA_PG_TIMEOUT_MIN",
        "NSA_TEST_SEL_PACK",
    }
)


def differences(
    left: Mapping[str, Any], right: Mapping[str, Any], *, but: Sequence[str] = ()
) -> list[str]:
    """`key: left against right` for every fact in which two env.json files differ.

    `but` names keys that may differ, because they are what is compared.
    """
    skip = {*_IGNORED, *but}
    first, second = dict(_facts(left)), dict(_facts(right))
    keys = dict.fromkeys((*first, *second))
    return [
        f"{key}: {first.get(key)!r} against {second.get(key)!r}"
        for key in keys
        if key not in skip and first.get(key) != second.get(key)
    ]


def alike(case: Case, names: Sequence[str], *, but: Sequence[str] = ()) -> Finding:
    """PASS if all launches ran the same thing on the same machine, else INVALID with the keys."""
    found = {name: case.env(name) for name in names}
    paths = [case.launch(name).env_path for name in names]
    first = names[0]
    for name in names[1:]:
        unlike = differences(found[first], found[name], but=but)
        if unlike:
            reason = f"{first} and {name} are not comparable: {'; '.join(unlike)}"
            return invalid(Reason.NOT_COMPARABLE, reason, evidence=paths)
    drift = _drift(found)
    if drift:
        return invalid(Reason.NOT_COMPARABLE, drift, evidence=paths)
    what = "one launch" if len(names) == 1 else f"{len(names)} launches of one config"
    return passed(f"{what}, one checkout and one machine", evidence=paths)


def _drift(found: Mapping[str, Mapping[str, Any]]) -> str:
    digests = {name: env.get("config_sha256") for name, env in found.items()}
    missing = [name for name, digest in digests.items() if not digest]
    return f"no config digest in env.json of {', '.join(missing)}" if missing else ""


def _facts(env: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in _SAME:
        value: Any = env
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        yield from _flat(key, value)
    given = {row.get("name"): row.get("value") for row in env.get("toggles") or ()}
    for name, toggle in TOGGLES.items():
        if name not in _OBSERVERS and toggle.reader == "trainer":
            yield f"toggles.{name}", given.get(name, toggle.default)


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield key, value
        return
    for name, inner in value.items():
        yield from _flat(f"{key}.{name}", inner)
