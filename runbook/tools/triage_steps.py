"""One change to a failing command, as data, and the command with it.

The changes are in `configs/triage/steps.yaml`: a new one is one entry there.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from pydantic import Field, TypeAdapter

from nsa.contract import NSAError
from nsa.settings import CONFIG_TOGGLES, TrainerConfig, load_config
from nsa.toggles import TOGGLES, meaning, safe_mode_changes
from runbook.config.precedence import SAFE_MODE
from runbook.config.settings import Scalar
from runbook.errors import RunbookError
from runbook.files import shipped_data
from runbook.launch.command import resolve_config
from runbook.records import Launch
from runbook.records.launch import CONFIG_FLAG, DATASET_FLAG, TORCHRUN, option, with_option
from runbook.records.measurement import Record

# Flags of the trainer that go over the toggle.
_FLAGS = {"NSA_ACCUM": "--accum", "NSA_SEQ_LEN": "--seq-len", "NSA_BATCH_SIZE": "--batch-size"}


class TriageStep(Record):
    """One change to the failing command; the fields are those of the file, explained there."""

    name: str
    title: str
    source: str
    set: dict[str, str] = Field(default_factory=dict)
    unset: tuple[str, ...] = ()
    config: dict[str, str | int | float | bool] = Field(default_factory=dict)
    dataset: str = ""
    at_most: dict[str, float] = Field(default_factory=dict)
    times: dict[str, float] = Field(default_factory=dict)
    single: bool = False
    parity: bool = False
    always: bool = False

    def changes(self, launch: Launch) -> bool:
        """Does it change anything about this launch?

        A value that the launch has anyway is no change: run all the same, it could be called the
        cure of a failure that comes and goes.
        """
        names = (*self.set, *self.unset)
        variables = any(meaning(n, launch.env) != meaning(n, self.set) for n in names)
        numbers = self.numbers(launch)
        return (
            variables
            or self.always
            or bool(numbers)
            or (self.single and launch.nproc > 1)
            or any(effective(key, launch) != value for key, value in self.config.items())
            or (bool(self.dataset) and dataset_of(launch) != self.dataset)
        )

    def numbers(self, launch: Launch) -> dict[str, str]:
        """The numeric toggles that it changes, with their new values; empty if it cannot."""
        found: dict[str, str] = {}
        for name, most in self.at_most.items():
            now = number(name, launch)
            if now is not None and now > most:
                found[name] = f"{most:g}"
        for name, factor in self.times.items():
            now = number(name, launch)
            value = None if now is None else now * factor
            if value is None or value == now or not _possible(name, value, launch):
                return {}
            found[name] = f"{value:g}"
        return found

    def exports(self, launch: Launch) -> list[str]:
        """Lines for a shell that apply it to this launch."""
        changed = {**self._safe(launch.env), **self.set, **self.numbers(launch)}
        lines = [f"export {name}={value}" for name, value in changed.items()]
        lines += [f"unset {name}" for name in self.unset]
        flags = [f"--set {key}={str(value).lower()}" for key, value in self.config.items()]
        flags += [f"{DATASET_FLAG} {self.dataset}"] if self.dataset else []
        return [*lines, *([f"# and {' '.join(flags)}"] if flags else [])]

    def apply(self, launch: Launch) -> Launch:
        """The launch with this change."""
        env, argv, nproc = dict(launch.env), list(launch.argv), launch.nproc
        for name in self.unset:
            env.pop(name, None)
        env |= {**self._safe(env), **self.set}
        for name, value in self.numbers(launch).items():
            if option(argv, _FLAGS.get(name, "")):
                argv = with_option(argv, _FLAGS[name], value)
            else:
                env[name] = value
        if self.dataset:
            argv = with_option(argv, DATASET_FLAG, self.dataset)
        if self.single:
            argv, nproc = _single(argv), 1
            env = {k: v for k, v in env.items() if not k.startswith(("NSA_DDP_", "NCCL_"))}
        overrides = {**launch.config_overrides, **self.config}
        changed = {"env": env, "argv": tuple(argv), "nproc": nproc, "config_overrides": overrides}
        return launch.model_copy(update=changed)

    def _safe(self, env: Mapping[str, str]) -> dict[str, str]:
        return safe_mode_changes(env) if meaning(SAFE_MODE, self.set) is True else {}


STEPS = TypeAdapter(dict[str, tuple[TriageStep, ...]]).validate_python(shipped_data("triage/steps"))


# What comes before all steps, and changes nothing.
AS_IT_WAS = TriageStep(
    name="as_it_was", title="the command as it was", source="the failing launch", always=True
)


def applied(step: TriageStep, launch: Launch, *, name: str, steps: int) -> Launch:
    """The launch with one step's change, for `steps` steps."""
    changed = step.apply(launch)
    return changed.model_copy(
        update={
            "name": name,
            "phase": "triage",
            "argv": tuple(with_option(changed.argv, "--steps", str(steps))),
            "run_dir": name,
            "steps": steps,
            "schedule": None,
            "purpose": step.title,
        }
    )


def number(name: str, launch: Launch) -> float | None:
    """What a numeric toggle comes to in this launch: flag, variable, config; None if unknown."""
    text = option(launch.argv, _FLAGS.get(name, "")) or launch.env.get(name, "")
    value = meaning(name, {name: text}) if text else effective(CONFIG_TOGGLES[name], launch)
    return float(value) if isinstance(value, int | float) else None


def dataset_of(launch: Launch) -> str:
    """The data that this launch trains on; empty if unknown."""
    return option(launch.argv, DATASET_FLAG) or str(effective("data.dataset", launch) or "")


def effective(key: str, launch: Launch) -> Scalar | None:
    """What a config key comes to in this launch; None where its config cannot be read."""
    if key in launch.config_overrides:
        return launch.config_overrides[key]
    section, _, name = key.partition(".")
    config = _config(option(launch.argv, CONFIG_FLAG) or launch.config)
    value = getattr(getattr(config, section, None), name, None)
    return value if isinstance(value, str | int | float | bool) else None


@lru_cache(maxsize=8)
def _config(named: str) -> TrainerConfig | None:
    if not named:
        return None
    try:
        return load_config(resolve_config(named)).config
    except (NSAError, RunbookError):
        return None  # a trainer of one's own has configs of its own


def _possible(name: str, value: float, launch: Launch) -> bool:
    """Can the toggle hold it, and can the ranks share it?"""
    if TOGGLES[name].kind != "int":
        return value > 0
    ranks = launch.nproc if name == "NSA_BATCH_SIZE" else 1
    return value >= 1 and value == int(value) and int(value) % ranks == 0


def _single(argv: list[str]) -> list[str]:
    """The same trainer in one process: torchrun and its options become python."""
    if argv[0] != TORCHRUN:
        return argv
    rest = argv[argv.index("-m") :] if "-m" in argv else argv[1:]
    return with_option(["python", *rest], "--ddp", "0")
