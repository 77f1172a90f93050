"""Profiles, and the settings given with `--set`."""

from __future__ import annotations

from runbook.config.detect import detect_profile
from runbook.config.load import (
    is_profile_file,
    load_profile,
    load_profile_document,
    profile_names,
)
from runbook.config.profile import Profile
from runbook.config.settings import Settings, parse_settings

__all__ = [
    "Profile",
    "Settings",
    "detect_profile",
    "is_profile_file",
    "load_profile",
    "load_profile_document",
    "parse_settings",
    "profile_names",
]
