"""Environment variables checked before anything starts: wrong names, wrong values, no effect."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from itertools import takewhile
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from nsa import torch_env
from nsa.contract import CONFIG_VARIABLE, NSAError, is_secret_name
from nsa.settings import TrainerConfig
from nsa.strict_yaml import scalar
from nsa.toggles import TOGGLES, parse_toggles
from nsa.torch_env import TORCH_VARIABLES
from runbook.errors import UsageError, did_you_mean, not_one_line, shown

Scalar = str | int | float | bool


# What a launch's environment may hold beside what the machine needs: never PATH, LD_* or PYTHON*.
VARIABLE_FAMILIES = (
    "NSA_*", "NCCL_*", "TORCH_*", "TORCHELASTIC_*", "TORCHINDUCTOR_*", "PYTORCH_*", "CUDA_*",
    "GLOO_*", "OMP_*", "MKL_*", "TRITON_*", "HF_*", "CUBLAS_*", "NVIDIA_TF32_OVERRIDE",
    CONFIG_VARIABLE,
)  # fmt: skip


# Whose names are listed (github.com/NVIDIA/nccl); any other it ignores in silence.
_NCCL_VERSION = "2.30.7"
# Whose every name a run takes, beside those of torch that `nsa.torch_env` knows.
NCCL_FAMILIES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_")
# What NVIDIA's libraries read themselves and what changes numbers or speed.
LIBRARY_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING")
# What a process needs to run on this machine and to reach a data hub. Settings are not among them:
# a launch gets exactly the ones that its plan shows.
_FROM_MACHINE = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR",
    "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED",
    "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_*",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "HF_*", "TIKTOKEN_CACHE_DIR",
    "TORCH_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY",
    "http_proxy", "https_proxy", "all_proxy", "no_proxy",
)  # fmt: skip

# What a shell has for itself: nobody means them for a trainer.
_OF_SHELL = (
    "_", "*PWD", "SHLVL", "TERM*", "COLORTERM", "COLUMNS", "LINES", "LS*COLORS", "LESS*", "PAGER",
    "EDITOR", "VISUAL", "DISPLAY", "MAIL", "HOST*", "PS[0-9]", "PROMPT*", "HIST*", "PIP_*", "UV*",
    "SSH_*", "XDG_*", "DBUS_*", "TMUX*", "SUDO_*", "GPG_*", "GIT_*", "CONDA_*", "DEBIAN_FRONTEND",
    "PYTHONUNBUFFERED",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a person gave: environment variables by name, config keys by dotted path, a config.

    `sources` says of each by whom (`runbook.config.precedence`).
    """

    toggles: Mapping[str, str] = field(default_factory=dict)
    config_overrides: Mapping[str, Scalar] = field(default_factory=dict)
    config: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)

    def texts(self) -> dict[str, str]:
        """Every setting as run.json keeps it, and as it is typed after `--set NAME=`."""
        overrides = {name: word(value) for name, value in self.config_overrides.items()}
        config = {CONFIG_VARIABLE: self.config} if self.config else {}
        return {**self.toggles, **overrides, **config}

    def words(self) -> tuple[str, ...]:
        """`KEY=VALUE` words, by which `--set` asks for the same again."""
        return tuple(f"{name}={value}" for name, value in self.texts().items())


def config_keys() -> dict[str, Any]:
    """Every key of a trainer config as `section.key`, with the type that it takes."""
    keys: dict[str, Any] = {}
    for section, owner in TrainerConfig.model_fields.items():
        model = cast("type[BaseModel]", owner.annotation)
        for name, info in model.model_fields.items():
            keys[f"{section}.{name}"] = Annotated[info.annotation, info]
    return keys


def parse_settings(pairs: Sequence[str]) -> Settings:
    """Sort `KEY=VALUE` words into toggles and config keys.

    Raises UsageError that lists every word without `=`, unknown or repeated key, bad value and
    contradiction.
    """
    toggles: dict[str, str] = {}
    overrides: dict[str, Scalar] = {}
    config = ""
    problems: list[str] = []
    keys = config_keys()
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            problems.append(f"--set {pair!r}: expected KEY=VALUE")
        elif name in toggles or name in overrides or (name == CONFIG_VARIABLE and config):
            problems.append(f"--set {name}: given twice")
        elif problem := not_one_line(value):
            problems.append(f"--set {name}: {problem}")
        elif name == CONFIG_VARIABLE:
            config = value
        elif is_variable(name):
            toggles[name] = value
        elif name in keys:
            overrides[name] = scalar(value)
        else:
            problems.append(_unknown(name, keys))
    wrong = [*_nccl_problems(toggles), *_toggle_problems(toggles), *override_problems(overrides)]
    problems += [f"--set {problem}" for problem in wrong]
    if problems:
        raise UsageError(problems)
    return Settings(toggles=toggles, config_overrides=overrides, config=config)


def is_variable(name: str) -> bool:
    """May this variable be set with `--set`? What it changes a person has to see."""
    known = name in TOGGLES or name in TORCH_VARIABLES or name in LIBRARY_VARIABLES
    return known or name.startswith(NCCL_FAMILIES)


def is_passed_on(name: str) -> bool:
    """Does a launch get this variable from the machine it runs on? No secret is passed on."""
    if name in LIBRARY_VARIABLES or is_secret_name(name):
        return False
    return any(fnmatchcase(name, pattern) for pattern in _FROM_MACHINE)


def is_of_shell(name: str) -> bool:
    """Does a shell have this variable for itself, or for other programs than a trainer?"""
    return any(fnmatchcase(name, pattern) for pattern in _OF_SHELL)


def word(value: Scalar) -> str:
    """A config value as a person types it after `--set KEY=`."""
    if isinstance(value, float):
        return _shortest(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _shortest(value: float) -> str:
    """`1e6` for 1000000.0: the shorter of two texts that mean the same."""
    plain = str(value)
    short = re.sub(r"e([+-])0*", lambda found: f"e{found[1].strip('+')}", f"{value:.6g}")
    same = "e" in short and float(short) == value
    return short if same and len(short) < len(plain) else plain


def may_be_set(name: str) -> bool:
    """May a plan, a profile or `--set` put this variable into a launch's environment?"""
    return any(fnmatchcase(name, family) for family in VARIABLE_FAMILIES)


def variable_problems(values: Mapping[str, str]) -> list[str]:
    """What is wrong with variables that a profile sets: names, values and contradictions."""
    problems = [
        f"{name}: no such toggle{did_you_mean(name, TOGGLES)}"
        if name.startswith("NSA_")
        else f"{name}: a launch may not set it; allowed are {', '.join(VARIABLE_FAMILIES)}"
        for name in values
        if name not in TOGGLES and (name.startswith("NSA_") or not may_be_set(name))
    ]
    toggles = {name: value for name, value in values.items() if name in TOGGLES}
    return [*problems, *_broken_lines(values), *_nccl_problems(values), *_toggle_problems(toggles)]


def _broken_lines(values: Mapping[str, Scalar]) -> list[str]:
    """Values that would not stay one line where they are printed: the rest would look like ours."""
    found = {name: not_one_line(str(value)) for name, value in values.items()}
    return [f"{name}: {problem}" for name, problem in found.items() if problem]


def _nccl_problems(values: Iterable[str]) -> list[str]:
    return [
        f"{name}: {'torch' if name.startswith('TORCH_') else 'NCCL'} reads {right}"
        for name, right in mistyped(values).items()
    ]


def override_problems(values: Mapping[str, Scalar]) -> list[str]:
    """What is wrong with config keys that a profile sets: names and values."""
    keys = config_keys()
    problems = [
        f"{name}: every launch has a folder of its own in the run's; --out names that of the runs"
        if name == "train.out_dir"
        else _value_problem(name, keys[name], value)
        if name in keys
        else f"{name}: no such config key{did_you_mean(name, keys)}"
        for name, value in values.items()
    ]
    return [*_broken_lines(values), *filter(None, problems)]


def _unknown(name: str, keys: Mapping[str, Any]) -> str:
    known = [*TOGGLES, *TORCH_VARIABLES, *keys]
    hint = did_you_mean(name, known) or "; see `runbook toggles`, or use section.key of a config"
    return f"--set {name}: no such toggle or config key{hint}"


def _toggle_problems(toggles: Mapping[str, str]) -> list[str]:
    try:
        parse_toggles(toggles)
    except NSAError as error:
        return list(error.problems)
    return []


def _value_problem(name: str, kind: Any, value: Scalar) -> str:
    try:
        TypeAdapter(kind, config=ConfigDict(strict=True)).validate_python(value)
    except ValidationError as error:
        return f"{name}: {error.errors()[0]['msg']}, got {shown(value)}"
    return ""


def environment_problems(environ: Mapping[str, str], *, uses_nccl: bool) -> list[str]:
    """Everything that is wrong with the variables: unknown, not allowed, contradicting."""
    problems = _toggle_problems(environ)
    problems += torch_env.plan(environ, uses_nccl=uses_nccl)[1]
    return [*problems, *_nccl_problems(environ)]


def environment_notes(environ: Mapping[str, str], *, uses_nccl: bool) -> dict[str, str]:
    """What becomes of each variable that is set under an old name or to a harmful value."""
    rows, _ = torch_env.plan(environ, uses_nccl=uses_nccl)
    notes = {row.name: row.note for row in rows}
    notes |= {name: unknown_note(name) for name in sorted(environ) if name not in notes}
    return {name: note for name, note in notes.items() if note}


@cache
def nccl_names() -> frozenset[str]:
    """Every name that NCCL and torch read, as `nccl.txt` lists them: documented, or read by code.

    A newer one may read more, so an unknown name is a note; one that differs from a known one by a
    slip of the hand is refused.
    """
    text = (files("runbook.config") / "nccl.txt").read_text(encoding="utf-8")
    names = [name for line in text.splitlines() if line[:1] != "#" for name in line.split()]
    return frozenset(name if name.startswith(NCCL_FAMILIES) else f"NCCL_{name}" for name in names)


def mistyped(names: Iterable[str]) -> dict[str, str]:
    """Of these names each that is a known one but for one slip, and the known one."""
    found = {}
    for name in filter(unknown_note, names):
        near = sorted(other for other in nccl_names() if _one_slip(name, other))
        if near:
            found[name] = near[0]
    return found


def unknown_note(name: str) -> str:
    """That NCCL or torch may ignore this variable, in words; empty for any other name."""
    if not name.startswith(NCCL_FAMILIES) or name in nccl_names():
        return ""
    reader = f"NCCL {_NCCL_VERSION}" if name.startswith(NCCL_FAMILIES[0]) else "torch"
    near = did_you_mean(name, nccl_names())
    return f"no name that {reader} reads: another version may, or it is ignored{near}"


def _one_slip(name: str, known: str) -> bool:
    """One letter too many, too few or another one, or two neighbors that changed places."""
    same = _alike(name, known)
    ends = _alike(name[same:][::-1], known[same:][::-1])
    one, other = name[same : len(name) - ends], known[same : len(known) - ends]
    return len(one) <= 1 >= len(other) or (len(one) == 2 and one == other[::-1])


def _alike(one: str, other: str) -> int:
    """How many letters both begin with."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
