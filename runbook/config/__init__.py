"""Profiles, and the settings given with `--set`.

Names are resolved on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runbook.config.load import (
        is_profile_file,
        load_profile,
        load_profile_document,
        profile_names,
    )
    from runbook.config.profile import Profile
    from runbook.config.settings import Settings, parse_settings

_HOME = {
    "Profile": "runbook.config.profile",
    "Settings": "runbook.config.settings",
    "is_profile_file": "runbook.config.load",
    "load_profile": "runbook.config.load",
    "load_profile_document": "runbook.config.load",
    "parse_settings": "runbook.config.settings",
    "profile_names": "runbook.config.load",
}

__all__ = [
    "Profile",
    "Settings",
    "is_profile_file",
    "load_profile",
    "load_profile_document",
    "parse_settings",
    "profile_names",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
