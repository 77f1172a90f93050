"""What a run will do: the options, the planned launches, what they need and how long they take.

Here: settings that cannot hold together, in any launch that a run would start. A profile, what a
person gave and the arms of a phase are each sound by themselves. Only the planned launch has them
all, and the trainer would refuse it, or run without what was asked for, hours later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from pathlib import Path

from nsa import torch_env
from nsa.contract import CONFIG_VARIABLE, NSAError
from nsa.settings import CONFIG_TOGGLES, OVERRIDES, TrainerConfig, load_config, share_problem
from nsa.strict_yaml import scalar
from nsa.toggles import (
    NEEDS_CUDA,
    TOGGLES,
    UNAVAILABLE,
    ToggleSet,
    conflicts,
    meaning,
    read_values,
    toggle_set,
    with_safe_mode,
)
from runbook import BOARD, BOARD_TOGGLE, absent, is_installed
from runbook.config.precedence import PRESET, SHELL, TYPED
from runbook.config.registry import Phase
from runbook.config.settings import Scalar, word
from runbook.config.setup import Setup
from runbook.errors import RunbookError
from runbook.launch.command import resolve_config
from runbook.records import Launch
from runbook.records.launch import TORCHRUN, option

_PROFILE = "profile "
_OF_RANKS = ("NSA_DDP_", "NCCL_")


def planned_problems(setup: Setup) -> list[str]:
    """Every contradiction in the launches of this setup, by the trainer's own rules.

    Each is said once, with both settings, where they come from, the phases, and what to do. What
    an earlier phase chooses is not known yet; its arms, of which it chooses one, are.
    """
    if problems := [*_not_of_own(setup), *_other_workload(setup)]:
        return problems
    phases: dict[str, dict[str, None]] = {}
    for phase, launches in setup.plan():
        found = [
            *_excluded(setup, phase),
            *_not_honored(setup, phase, launches),
            *_not_obeyed(setup, launches),
        ]
        for launch in launches:
            if launch.kind == "trainer":
                found += _launch_problems(setup, launch)
        for text in found:
            phases.setdefault(text, {})[phase.name] = None
    return [f"{text} (planned in {', '.join(names)})" for text, names in phases.items()]


def _excluded(setup: Setup, phase: Phase) -> Iterator[str]:
    """A phase that was named and has nothing to do; of all phases it is one that says so."""
    why = phase.excluded(setup.context({}))
    if why and phase.name in setup.options.phases.split(","):
        yield f"{why}: leave out the setting, or the phase (--phase)"


def _not_of_own(setup: Setup) -> list[str]:
    """What a person asked of a trainer of one's own that only ours has."""
    own = setup.profile.own_trainer
    if own is None:
        return []
    ours = {*setup.settings.config_overrides, CONFIG_VARIABLE}
    return [
        f"--set {name}: {own.name} is a trainer of your own and takes none of it; change its "
        "command or env in the profile"
        for name, source in setup.settings.sources.items()
        if source == TYPED and (name.startswith("NSA_") or name in ours)
    ]


def _other_workload(setup: Setup) -> Iterator[str]:
    """What was typed of the workload, on which every limit of the profile is defined."""
    work, name = setup.profile.workload, setup.profile.name
    judged = {
        "train.seq_len": work.seq_len,
        "train.batch_size": work.global_batch,
        "runtime.precision": work.dtype,
    }
    for key, value in setup.settings.config_overrides.items():
        if judged.get(key, value) != value:
            yield (
                f"{key}={word(value)} ({setup.settings.sources.get(key, TYPED)}): no launch could "
                f"be judged, the limits of profile {name} are for {judged[key]}; leave it out, or "
                "name a profile of your own with that workload"
            )


def _launch_problems(setup: Setup, launch: Launch) -> Iterator[str]:
    values, problems = read_values(launch.env)
    yield from problems
    yield from torch_env.plan(launch.env, uses_nccl=setup.profile.has_gpu)[1]
    given = toggle_set(values, {name: _source(setup, launch, name) for name in values})
    cuda = setup.profile.has_gpu
    yield from _toggle_problems(given, cuda=cuda)
    yield from config_problems(setup, launch, given)
    arms = launch.schedule.settings if launch.schedule else {}
    for arm, settings in arms.items():
        values, problems = read_values(settings)
        yield from problems
        source = f"arm {arm} of phase {launch.phase}"
        yield from _toggle_problems(with_safe_mode(given).replaced(values, source), cuda=cuda)


def _toggle_problems(toggles: ToggleSet, *, cuda: bool) -> Iterator[str]:
    for found in conflicts(toggles):
        ways = (way_out(toggles, found.one, "0"), way_out(toggles, found.other, found.needs))
        yield f"{found.text}: {' or '.join(ways)}"
    for name, why in UNAVAILABLE.items():
        if toggles.flag(name):
            yield (
                f"{name}=1 ({toggles.sources[name]}) can never take effect: {why}; "
                f"{way_out(toggles, name, '0')}"
            )
    for setting, why in NEEDS_CUDA.items():
        name, _, value = setting.partition("=")
        if not cuda and toggles.values[name] == TOGGLES[name].parse(value):
            yield (
                f"{setting} ({toggles.sources[name]}): {why}, and the profile has none; "
                f"{way_out(toggles, name, 'off' if 'off' in TOGGLES[name].choices else '0')}"
            )
    if not toggles.flag(BOARD_TOGGLE) and not is_installed(BOARD):
        yield (
            f"{BOARD_TOGGLE}=0 ({toggles.sources[BOARD_TOGGLE]}): {absent(BOARD)}, or "
            f"{way_out(toggles, BOARD_TOGGLE, '1')}"
        )


def _not_honored(setup: Setup, phase: Phase, launches: Sequence[Launch]) -> Iterator[str]:
    """What a person gave, and a launch of the phase would not have: said, never ignored."""
    compared = phase.compares(setup.context({}))
    for name, value in setup.settings.toggles.items():
        for launch in launches:
            now = {**launch.env, **compared} if launch.kind == "trainer" else launch.env
            if _says_nothing(name, launch) or meaning(name, now) == meaning(name, {name: value}):
                continue
            own = now.get(name, "unset")
            toggles = toggle_set({}, setup.settings.sources)
            # A plan has its phases; of a run's they can be chosen.
            fewer = "" if setup.profile.plan else ", or name the phases that can have it (--phase)"
            yield (
                f"{name}={value} ({toggles.sources[name]}) cannot be had where a phase itself "
                f"decides it ({own}): {way_out(toggles, name, own)}{fewer}"
            )
            break


def _not_obeyed(setup: Setup, launches: Sequence[Launch]) -> Iterator[str]:
    """Config keys that a person gave, and a launch sets otherwise by a flag of its own."""
    for key, value in setup.settings.config_overrides.items():
        flag = OVERRIDES[key][0] if key in OVERRIDES else ""
        for launch in launches:
            own = option(launch.argv, flag) if flag else ""
            if own and scalar(own) != value:
                source = setup.settings.sources.get(key, TYPED)
                steps = "; --steps-scale shortens a run" if key == "train.steps" else ""
                yield (
                    f"{key}={word(value)} ({source}) cannot be had: a phase decides it itself "
                    f"({flag} {own}); leave out --set {key}{steps}"
                )
                break


def _says_nothing(name: str, launch: Launch) -> bool:
    """Has this launch no use for the variable, whatever its value?"""
    if launch.kind != "trainer":
        # Tests and ceilings get the few variables that their plan shows.
        return name not in launch.env
    return name.startswith(_OF_RANKS) and launch.argv[0] != TORCHRUN


def way_out(toggles: ToggleSet, name: str, harmless: str) -> str:
    """What a person changes so that a launch does not get this value."""
    source = toggles.sources[name]
    if source == TYPED:
        return f"leave out --set {name}"
    if source == SHELL:
        return f"unset {name}"
    if source.startswith((_PROFILE, PRESET)):
        return f"add --set {name}={harmless}"
    return f"name the phases without {source.rpartition(' ')[2]} (--phase)"


def _source(setup: Setup, launch: Launch, name: str) -> str:
    """Where a launch's variable comes from, as a person would say it."""
    profile, value = setup.profile, launch.env[name]
    given: Mapping[str, str] = setup.settings.toggles
    if given.get(name) == value:
        return setup.settings.sources.get(name, TYPED)
    for known in (profile.phases[launch.phase].env, profile.env):
        if name in known and known[name].value == value:
            return f"{_PROFILE}{profile.name}"
    return f"phase {launch.phase}"


# The trainer whose configs this program can read; another one has its own.
_TRAINER = "nsa.train"
_SCALER = "NSA_SCALER_"
_BATCH = "NSA_BATCH_SIZE"


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
        given = (f"{key}={word(one)}" for key, one in setup.settings.config_overrides.items())
        where = " with ".join(filter(None, (launch.config, ", ".join(given))))
        yield from (f"{where}: {text}" for text in error.problems)
        return
    except RunbookError as error:
        source = setup.settings.sources.get(CONFIG_VARIABLE, f"profile {setup.profile.name}")
        yield f"{CONFIG_VARIABLE} ({source}): {error}"
        return
    if problem := share_problem(_batch(config, toggles), launch.nproc):
        yield f"{launch.config}: {problem}"
    yield from _against_machine(setup, launch, config)
    yield from _against_toggles(config, toggles)


def config_of(setup: Setup, launch: Launch) -> TrainerConfig | None:
    """What a planned launch will read; None for another trainer's, which cannot be read here."""
    return _of_launch(launch) if setup.profile.trainer == _TRAINER else None


def _of_launch(launch: Launch) -> TrainerConfig:
    return _changed_by(launch.config, launch.config_overrides)


def _changed_by(name: str, overrides: Mapping[str, Scalar]) -> TrainerConfig:
    path = resolve_config(name)
    return _loaded(path, path.stat().st_mtime_ns, tuple(sorted(overrides.items())))


def config_before(setup: Setup) -> dict[str, str]:
    """What the config itself has for each of its keys that a person gave, as it would be typed.

    Empty for another trainer's config, which this program cannot read.
    """
    names = setup.settings.config_overrides
    if not names or setup.profile.trainer != _TRAINER:
        return {}
    config = _changed_by(setup.profile.config, {})
    values = {name: attrgetter(name)(config) for name in names}
    return {name: word(one) for name, one in values.items() if isinstance(one, str | int | float)}


@lru_cache(maxsize=64)
def _loaded(
    path: Path, _changed_at: int, overrides: tuple[tuple[str, Scalar], ...]
) -> TrainerConfig:
    """The config as it will be changed; many launches of a plan share one."""
    return load_config(path, settings=dict(overrides)).config


def _batch(config: TrainerConfig, toggles: ToggleSet) -> int:
    given = toggles.values[_BATCH] if toggles.is_set(_BATCH) else None
    return given if isinstance(given, int) else config.train.batch_size


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
