"""The trainer config of a planned launch: does it load as it will be changed, and fit the rest?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from nsa.contract import CONFIG_VARIABLE, NSAError
from nsa.settings import CONFIG_TOGGLES, Override, TrainerConfig, load_config
from nsa.toggles import NEEDS_CUDA, TOGGLES, ToggleSet
from runbook.config.precedence import TYPED
from runbook.config.settings import Scalar, word
from runbook.errors import RunbookError
from runbook.launch.command import resolve_config
from runbook.records import Launch

if TYPE_CHECKING:
    from runbook.config.setup import Setup

# The trainer whose configs this program can read; another one has its own.
_TRAINER = "nsa.train"
_SCALER = "NSA_SCALER_"


def config_problems(setup: Setup, launch: Launch, toggles: ToggleSet) -> Iterator[str]:
    """Why the launch's config cannot run as asked, each in one line."""
    if setup.profile.trainer != _TRAINER:
        return
    overrides = launch.config_overrides
    for name, key in CONFIG_TOGGLES.items():
        if (
            toggles.is_set(name)
            and overrides.get(key, toggles.values[name]) != toggles.values[name]
        ):
            yield (
                f"{name}={toggles.values[name]} ({toggles.sources[name]}) and {key}="
                f"{overrides[key]} ({TYPED}) are the same setting: give one of the two"
            )
    try:
        config = _of_launch(launch)
    except NSAError as error:
        yield from (f"{launch.config}: {text}" for text in error.problems)
        return
    except RunbookError as error:
        source = setup.settings.sources.get(CONFIG_VARIABLE, f"profile {setup.profile.name}")
        yield f"{CONFIG_VARIABLE} ({source}): {error}"
        return
    yield from _against_machine(setup, launch, config)
    yield from _against_toggles(config, toggles)


def config_of(setup: Setup, launch: Launch) -> TrainerConfig | None:
    """What a planned launch will read; None for another trainer's, which cannot be read here."""
    return _of_launch(launch) if setup.profile.trainer == _TRAINER else None


def _of_launch(launch: Launch) -> TrainerConfig:
    path = resolve_config(launch.config)
    overrides = tuple(sorted(launch.config_overrides.items()))
    return _loaded(path, path.stat().st_mtime_ns, overrides)


def config_before(setup: Setup) -> dict[str, str]:
    """What the config itself has for each of its keys that a person gave, as it would be typed.

    Empty for another trainer's config, which this program cannot read.
    """
    names = setup.settings.config_overrides
    if not names or setup.profile.trainer != _TRAINER:
        return {}
    path = resolve_config(setup.profile.config)
    sections = _loaded(path, path.stat().st_mtime_ns, ()).model_dump()
    found = {}
    for name in names:
        section, _, key = name.partition(".")
        value = sections[section][key]
        if isinstance(value, str | int | float):
            found[name] = word(value)
    return found


@lru_cache(maxsize=64)
def _loaded(
    path: Path, _changed_at: int, overrides: tuple[tuple[str, Scalar], ...]
) -> TrainerConfig:
    """The config as it will be changed; many launches of a plan share one."""
    changes = []
    for key, value in overrides:
        section, _, name = key.partition(".")
        changes.append(Override(section=section, key=name, value=value, origin=TYPED))
    return load_config(path, settings=changes).config


def _against_machine(setup: Setup, launch: Launch, config: TrainerConfig) -> Iterator[str]:
    device, wanted = config.runtime.device, setup.profile.hardware.device
    if device not in ("auto", wanted):
        yield (
            f"{launch.config} has runtime.device {device}, and the profile {setup.profile.name} "
            f"is for {wanted}: name another config or another profile"
        )
    if config.runtime.use_triton_sel and wanted == "cpu":
        why = NEEDS_CUDA["NSA_USE_TRITON_SEL=1"]
        yield f"runtime.use_triton_sel=true: {why}, and the profile has none; set it to false"


def _against_toggles(config: TrainerConfig, toggles: ToggleSet) -> Iterator[str]:
    runtime = config.runtime
    if not runtime.use_flash and toggles.flag("NSA_SDPA_FLASH_ONLY"):
        source = toggles.sources["NSA_SDPA_FLASH_ONLY"]
        yield (
            f"NSA_SDPA_FLASH_ONLY=1 ({source}) and runtime.use_flash=false exclude each other: "
            "no kernel would be left"
        )
    for name in toggles.sources:
        changed = toggles.values[name] != TOGGLES[name].default
        if name.startswith(_SCALER) and changed and runtime.precision != "fp16":
            yield (
                f"{name}={toggles.values[name]} ({toggles.sources[name]}): only fp16 has a "
                f"gradient scaler, and runtime.precision is {runtime.precision}"
            )
