"""Packages that the program does without until a launch asks for them, and how to get each."""

from __future__ import annotations

import importlib.util

BOARD = "tensorboard"
BOARD_TOGGLE = "NSA_TB_DISABLE"
# The extra of this package that brings a module.
EXTRAS = {"datasets": "fineweb", "tiktoken": "gpt2", BOARD: "tensorboard"}


def is_installed(module: str) -> bool:
    """Can it be imported here?"""
    return importlib.util.find_spec(module) is not None


def absent(module: str) -> str:
    """That it is not installed, and the command that brings it."""
    return (
        f"the package {module} is not installed here; pip install 'nsa-runbook[{EXTRAS[module]}]'"
    )
