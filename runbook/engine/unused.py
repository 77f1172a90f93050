"""Variables of the caller's environment that look like settings of a run and are none.

A launch gets what its plan shows and what the machine needs (`runbook.launch.processes`), so that a
run can be repeated from its record. Whoever exported something else has to be told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nsa.contract import CONFIG_VARIABLE
from nsa.toggles import PREFIX, TOGGLES
from nsa.torch_env import TORCH_VARIABLES
from runbook.launch.processes import is_passed_on

# Under this name the record's environment, and so every report, lists them.
UNUSED = "variables not used"
_FAMILIES = (PREFIX, "NCCL_", "TORCH_NCCL_")
_TYPED = "give it with --set NAME=value"
_IN_PROFILE = "give it as env of a profile, --profile FILE"
_CONFIG = "the profile names the config, --profile FILE"
_UNKNOWN = "no such toggle"


def unused_variables(environ: Mapping[str, str], given: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the settings in `environ` that a run does not take from there, sorted.

    `given` is what profile and `--set` say; a variable with that very value is no surprise.
    """
    return tuple(
        name
        for name, value in sorted(environ.items())
        if _is_setting(name) and not is_passed_on(name) and given.get(name) != value
    )


def unused_text(names: Iterable[str]) -> str:
    """One line for a person: each name, and how to give it to a run."""
    ways: dict[str, list[str]] = {}
    for name in names:
        ways.setdefault(_way(name), []).append(name)
    told = "; ".join(f"{', '.join(group)} ({way})" for way, group in ways.items())
    return f"this run does not use these variables of the environment: {told}"


def _is_setting(name: str) -> bool:
    return name.startswith(_FAMILIES) or name in TORCH_VARIABLES or name == CONFIG_VARIABLE


def _way(name: str) -> str:
    if name == CONFIG_VARIABLE:
        return _CONFIG
    if name in TOGGLES or name in TORCH_VARIABLES:
        return _TYPED
    return _UNKNOWN if name.startswith(PREFIX) else _IN_PROFILE
