"""The engine: plans, launches, watches, judges and records runs. Never imports torch.

Here is what a run does where nobody says otherwise, and the packages that it does without until
then. Imports nothing of ours: the command line reads it first.
"""

from __future__ import annotations

# Its only place: pyproject.toml and a checkout that is not installed read it here.
__version__ = "1.0.0"

DEFAULT_OUT = "artifacts"
DEFAULT_PLAN = "production"
# How arms are compared; the first is the default.
PROTOCOLS = ("blocks", "launches", "single")
DEFAULT_PROTOCOL = PROTOCOLS[0]
# Where launches run: on this machine.
DEFAULT_LAUNCHER = "local"
# Between the name of a launcher and the file that it reads.
FILE_AFTER = ":"
# How long a job may wait for its nodes.
DEFAULT_QUEUE_S = 3600.0

BOARD = "tensorboard"
BOARD_TOGGLE = "NSA_TB_DISABLE"
# The extra of this package that brings a module.
EXTRAS = {"datasets": "fineweb", "tiktoken": "gpt2", BOARD: "tensorboard"}


def is_installed(module: str) -> bool:
    """Can it be imported here?"""
    import importlib.util

    return importlib.util.find_spec(module) is not None


def absent(module: str) -> str:
    """That it is not installed, and the command that brings it."""
    return (
        f"the package {module} is not installed here; pip install 'nsa-runbook[{EXTRAS[module]}]'"
    )
