"""Profiles, and the settings given with `--set`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runbook.config.detect import detect_profile
    from runbook.config.load import (
        is_profile_file,
        load_profile,
        load_profile_document,
        profile_names,
    )
    from runbook.config.profile import (
        Hardware,
        LimitValue,
        PhaseSettings,
        Profile,
        Sourced,
        Workload,
    )
    from runbook.config.settings import Settings, parse_settings

__all__ = [
    "Hardware",
    "LimitValue",
    "PhaseSettings",
    "Profile",
    "Settings",
    "Sourced",
    "Workload",
    "detect_profile",
    "is_profile_file",
    "load_profile",
    "load_profile_document",
    "parse_settings",
    "profile_names",
]

_HOME = {
    "detect_profile": "detect",
    "is_profile_file": "load",
    "load_profile": "load",
    "load_profile_document": "load",
    "profile_names": "load",
    "Settings": "settings",
    "parse_settings": "settings",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME.get(name, 'profile')}"), name)
