"""Preflight collectors: what the machine, the checkout and the environment are like."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runbook.collect.preflight import collect_preflight

__all__ = ["collect_preflight"]


def __getattr__(name: str) -> Any:
    if name != "collect_preflight":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from runbook.collect.preflight import collect_preflight

    return collect_preflight
