"""A launch as a line that works when pasted into a shell, wherever one stands."""

from __future__ import annotations

import importlib.util
import shlex
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.contract import ARMS_JSON, CONFIG_VARIABLE
from runbook.errors import RunbookError, UsageError
from runbook.files import data_path
from runbook.records import Launch

_CONFIG_FLAG = "--config"
_PYTEST_SETTINGS = """\
[pytest]
markers =
    gpu: needs a CUDA device
    slow: more than about ten seconds
    e2e: starts the real trainer in real processes
"""
_PYTEST_INI = """\
[pytest]
markers =
    gpu: needs a CUDA device
    slow: more than about ten seconds
    e2e: starts the real trainer in real processes
"""


@dataclass(frozen=True, kw_only=True)
class Command:
    """What is executed: `env` are the launch's variables with the config's path resolved."""

    argv: tuple[str, ...]
    env: dict[str, str]
    port: int | None
    steps: int


def free_port() -> int:
    """A TCP port on the loopback interface that nobody listens on right now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def resolve_config(name: str) -> Path:
    """The trainer config of this name: a file where the user is, or a shipped one.

    Raises `RunbookError` if there is neither.
    """
    path = Path(name)
    if path.is_file():
        return path.resolve()
    shipped = data_path("configs")
    relative = path.relative_to("configs") if path.parts[:1] == ("configs",) else path
    candidate = (shipped / relative).resolve()
    if candidate.is_relative_to(shipped.resolve()) and candidate.is_file():
        return candidate
    known = ", ".join(sorted(p.name for p in shipped.glob("*.yaml")))
    raise RunbookError(f"no trainer config {name!r}; shipped are: {known}")


def build_command(launch: Launch, run_dir: Path, *, retry: bool = False) -> Command:
    """Write the launch's input files into `run_dir` and return what to execute.

    A retry takes `launch.retry_steps` steps if the plan names them. Raises `RunbookError` if the
    config cannot be found or changed as asked.
    """
    words, env = list(launch.argv), dict(launch.env)
    steps = launch.steps
    if launch.kind == "trainer":
        _place_config(launch, run_dir, words, env)
        if retry and launch.retry_steps is not None and launch.schedule is None:
            steps = launch.retry_steps
            _replace_option(words, "--steps", str(steps))
        if launch.schedule is not None:
            arms = run_dir / ARMS_JSON
            arms.write_text(launch.schedule.to_trainer_json(), encoding="utf-8")
            words += ["--arms", str(arms)]
    else:
        words += _pytest_options(run_dir)
    port = free_port() if words[0] == "torchrun" else None
    return Command(argv=tuple(_executable(words, port)), env=env, port=port, steps=steps)


def _pytest_options(run_dir: Path) -> list[str]:
    """Settings of our own, whatever project the current folder belongs to.

    The root is where the nsa package lies, so that JUnit names the tests by their module; no
    conftest.py and no ini file of anybody else has a say.
    """
    settings = run_dir / "pytest.ini"
    settings.write_text(_PYTEST_INI, encoding="utf-8")
    spec = importlib.util.find_spec("nsa")
    if spec is None or spec.origin is None:
        raise RunbookError("the nsa package, whose tests are to be run, is not installed")
    root = Path(spec.origin).resolve().parent.parent
    return [
        *("-c", str(settings), f"--rootdir={root}", "--noconftest", "-p", "no:cacheprovider"),
        *("--junitxml", str(run_dir / "junit.xml")),
    ]


def _executable(words: list[str], port: int | None) -> list[str]:
    first, rest = words[0], words[1:]
    if first == "torchrun":
        rendezvous = [f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
        return [sys.executable, "-m", "nsa.loopback", *rendezvous, *rest]
    if first in ("python", "python3"):
        return [sys.executable, *rest]
    raise UsageError(f"a launch begins with {first!r}", hint="allowed are torchrun and python")


def _place_config(launch: Launch, run_dir: Path, words: list[str], env: dict[str, str]) -> None:
    named = _option(words, _CONFIG_FLAG) or env.get(CONFIG_VARIABLE) or launch.config
    if not named:
        return
    path = resolve_config(named)
    if launch.config_overrides:
        path = _write_effective(path, launch.config_overrides, run_dir / "config.yaml")
    if _option(words, _CONFIG_FLAG):
        _replace_option(words, _CONFIG_FLAG, str(path))
    elif CONFIG_VARIABLE in env:
        env[CONFIG_VARIABLE] = str(path)
    else:
        words += [_CONFIG_FLAG, str(path)]


def _write_effective(source: Path, overrides: Mapping[str, Any], target: Path) -> Path:
    import yaml

    from nsa.settings import load_strict

    document, problems = load_strict(source.read_text(encoding="utf-8"))
    if problems or not isinstance(document, dict):
        raise UsageError([f"{source}: {text}" for text in problems or ["holds no mapping"]])
    for dotted, value in overrides.items():
        *sections, key = dotted.split(".")
        place: Any = document
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise UsageError(f"{source}: {section!r} of {dotted!r} is no section")
        place[key] = value
    text = yaml.safe_dump(document, sort_keys=False)
    target.write_text(f"# {source.name} with: {', '.join(sorted(overrides))}\n{text}", "utf-8")
    return target


def _option(words: list[str], flag: str) -> str:
    for index, word in enumerate(words):
        if word == flag and index + 1 < len(words):
            return words[index + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return ""


def _replace_option(words: list[str], flag: str, value: str) -> None:
    for index, word in enumerate(words):
        if word == flag and index + 1 < len(words):
            words[index + 1] = value
            return
        if word.startswith(f"{flag}="):
            words[index] = f"{flag}={value}"
            return
    words += [flag, value]


@dataclass(frozen=True, kw_only=True)
class Pasteable:
    """The command line, and what the harness does that the line cannot say."""

    line: str
    notes: tuple[str, ...] = ()


def pasteable(launch: Launch) -> Pasteable:
    """The command line with paths that exist here and with the arms that take turns."""
    argv = [_existing(word) for word in launch.argv]
    if launch.schedule is not None:
        argv += ["--arms", launch.schedule.to_trainer_json()]
    settings = [f"{name}={shlex.quote(_existing(value))}" for name, value in launch.env.items()]
    notes = []
    if launch.config_overrides:
        keys = ", ".join(f"{key}={value}" for key, value in sorted(launch.config_overrides.items()))
        notes.append(f"runs with a copy of the config in which {keys}")
    return Pasteable(line=" ".join([*settings, shlex.join(argv)]), notes=tuple(notes))


def _existing(word: str) -> str:
    """A shipped config's full path where the short one does not exist in this folder."""
    path = Path(word)
    if path.suffix not in (".yaml", ".yml") or path.exists():
        return word
    shipped = data_path("configs") / path.name
    return str(shipped) if shipped.is_file() else word
