"""What a launch executes and is given: its command line, files, environment, a commit's checkout.

The one builder of torchrun's commands: on this machine, as typed, and over several nodes.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from nsa.contract import ARMS_JSON, CONFIG_VARIABLE, RUN_DIR_VARIABLE, RUN_TOKEN_VARIABLE
from nsa.contract.digests import package_digest
from runbook.config.settings import VARIABLE_FAMILIES, is_passed_on, may_be_set
from runbook.errors import RunbookError, UsageError
from runbook.files import data_path, make_private_dir, write_document
from runbook.folder import (
    CHECKOUT_JSON,
    JUNIT_XML,
    OWN_FOLDER,
    config_copy,
    kept_config,
)
from runbook.launch.foreign import own_words
from runbook.machine.git import clone_at, find_checkout, read_git
from runbook.records import Launch
from runbook.records.launch import CONFIG_FLAG, RESUME_FLAG, TORCHRUN, option, with_option

# Top-level packages of modules that a launch of ours runs.
_INSTALLED = ("nsa", "runbook", "pytest", "torch")
# Words for the Python that runs this program; a path is taken as it is.
OURS = (TORCHRUN, "python", "python3")


@dataclass(frozen=True, kw_only=True)
class Command:
    """What is executed: `env` are the launch's variables with the config's path resolved.

    `folder`: where it is executed and what comes first on PYTHONPATH; None for where we are.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    port: int | None
    steps: int
    folder: Path | None = None

    @property
    def is_ours(self) -> bool:
        """Does it run nothing but installed modules of this program, pytest and torch?"""
        run = [word for flag, word in pairwise(self.argv) if flag == "-m"]
        return bool(run) and all(word.partition(".")[0] in _INSTALLED for word in run)


@dataclass(frozen=True, kw_only=True)
class Pasteable:
    """The command as one line, as lines that a person can read, and how the harness runs it."""

    line: str
    lines: str
    notes: tuple[str, ...] = ()


def pasteable(launch: Launch) -> Pasteable:
    """The command line with paths that exist here; pasted, it is the same experiment."""
    notes = []
    if launch.schedule is not None:
        notes.append(launch.schedule.in_words())
    if launch.resumes:
        notes.append(f"the path after {RESUME_FLAG} is relative to the run's folder")
    if launch.stop is not None:
        notes.append(f"ended by {launch.stop.by} after {launch.stop.steps} steps of its own")
    if launch.own is not None:
        notes.append("out is a folder of the launch, new and empty")
        launch = launch.model_copy(update={"argv": tuple(own_words(launch.argv, "out"))})
    whole = completed(launch)
    line, lines = whole.command_line(), whole.command_line(lines=True)
    if launch.commit:
        folder = folder_of(launch.commit)
        clone = f"git clone --shared --no-checkout . {folder}"
        notes.append(f"{clone} && git -C {folder} checkout --detach {launch.commit}")
        line, lines = (f"(cd {folder} && PYTHONPATH=$PWD {text})" for text in (line, lines))
    return Pasteable(line=line, lines=lines, notes=tuple(notes))


def build_command(
    launch: Launch,
    run_dir: Path,
    *,
    retry: bool = False,
    here: bool = True,
    run_root: Path | None = None,
    begin_at: Path | None = None,
) -> Command:
    """Write the launch's input files into `run_dir` and return what to execute.

    What does not run `here` keeps the word torchrun: where its agents meet is said there.
    The config is the copy that the run in `run_root` began with, if it has one.
    A retry takes `launch.retry_steps` steps if the plan names them. `begin_at`: the checkpoint that
    a launch which resumes another one goes on from (default: the newest one). Raises `RunbookError`
    if the config cannot be found.
    """
    if launch.own is not None:
        return _own_command(launch, run_dir)
    steps = launch.steps
    if retry and launch.retry_steps is not None and launch.schedule is None:
        steps = launch.retry_steps
        argv = with_option(launch.argv, "--steps", str(steps))
        launch = launch.model_copy(update={"argv": tuple(argv)})
    kept = kept_config(run_root, launch.named_config) if run_root else None
    launch = _with_config(launch, str(kept)) if kept else completed(launch, must_exist=True)
    launch = _with_arms(launch, run_dir)
    if launch.resumes:
        before = (begin_at or run_dir.parent / launch.resumes).resolve()
        argv = with_option(launch.argv, RESUME_FLAG, str(before))
        launch = launch.model_copy(update={"argv": tuple(argv)})
    words = list(launch.words())
    if launch.kind == "pytest":
        # pytest expands variables in this word: what the folder is called has to stand in one.
        words += [f"--junitxml=${RUN_DIR_VARIABLE}/{JUNIT_XML}"]
    port = free_port() if words[0] == TORCHRUN and here else None
    return Command(argv=tuple(_executable(words, port)), env=launch.env, port=port, steps=steps)


def _own_command(launch: Launch, run_dir: Path) -> Command:
    """As it is typed, but for `python` and `torchrun`, which are those that run this program."""
    words = own_words(launch.argv, str((run_dir / OWN_FOLDER).resolve()))
    meets = any(re.match(r"--(rdzv|master)[-_]", word) for word in words)  # by words of its own
    port = free_port() if words[0] == TORCHRUN and not meets else None
    if words[0] == TORCHRUN and port is None:
        argv = as_typed(words[1:])
    elif words[0] in OURS:
        argv = _executable([word for word in words if word != "--standalone"], port)
    else:
        argv = words
    return Command(argv=tuple(argv), env=launch.env, port=port, steps=launch.steps)


def completed(launch: Launch, *, must_exist: bool = False) -> Launch:
    """The launch with a config path that exists here, and with pytest's options.

    A config that is not there is left as typed, or raises `RunbookError` if it `must_exist`.
    """
    if launch.kind == "pytest":
        return launch.model_copy(update={"argv": (*launch.argv, *_pytest_options())})
    named = launch.named_config
    try:
        path = resolve_config(named) if named else None
    except RunbookError:
        if must_exist:
            raise
        return launch
    # A checkout of a commit has a config of its own under that name; the experiment is ours.
    short = Path(named).is_file() and not must_exist and not launch.commit
    if path is None or (short and path.samefile(named)):
        return launch
    return _with_config(launch, str(path))


def _with_config(launch: Launch, path: str) -> Launch:
    if option(launch.argv, CONFIG_FLAG):
        argv = with_option(launch.argv, CONFIG_FLAG, path)
        return launch.model_copy(update={"argv": tuple(argv)})
    if CONFIG_VARIABLE in launch.env:
        return launch.model_copy(update={"env": {**launch.env, CONFIG_VARIABLE: path}})
    return launch.model_copy(update={"config": path})


def _with_arms(launch: Launch, run_dir: Path) -> Launch:
    """The same experiment with its arms in a file, which is kept."""
    if launch.schedule is None:
        return launch
    arms = run_dir / ARMS_JSON
    arms.write_text(launch.schedule.to_trainer_json(), encoding="utf-8")
    argv = (*launch.argv, "--arms", str(arms))
    return launch.model_copy(update={"argv": argv, "schedule": None})


def _pytest_options() -> tuple[str, ...]:
    """Options that keep out the settings of whatever project the current folder belongs to.

    The root is where the nsa package lies, so that JUnit names the tests by their module; no
    conftest.py and no ini file has a say. Without an ini file nobody declares the marks of the
    shipped tests, so that pytest would warn of each. Left out is what they do not need and takes
    seconds: plugins of other packages, and the log, into which torch writes every call of a save.
    Our plugins record the device of each test as a property, for which only the family xunit1 has
    a place, and run the tests in two processes.
    """
    spec = importlib.util.find_spec("nsa")
    if spec is None or spec.origin is None:
        raise RunbookError("the nsa package, whose tests are to be run, is not installed")
    root = Path(spec.origin).resolve().parent.parent
    return (
        *("-c", os.devnull, f"--rootdir={root}", "--noconftest"),
        *("--disable-plugin-autoload", "-p", "no:cacheprovider", "-p", "no:logging"),
        *("-p", "nsa.tests.told", "-p", "nsa.tests.side_by_side"),
        *("-o", "junit_family=xunit1"),
        *("-W", "ignore::pytest.PytestUnknownMarkWarning"),
    )


def _executable(words: list[str], port: int | None) -> list[str]:
    first, rest = words[0], words[1:]
    if first == TORCHRUN:
        return words if port is None else on_loopback(rest, port)
    if first in OURS:
        return [sys.executable, *rest]
    raise UsageError(f"a launch begins with {first!r}", hint="allowed are torchrun and python")


def keep_config(run_root: Path, name: str) -> None:
    """Copy a trainer config into a run's folder, from which every launch of the run reads it.

    What is edited while the run goes on then changes nothing; a copy that is there stays. A name
    that is no config is left to the launch that needs it.
    """
    if kept_config(run_root, name):
        return
    try:
        content = resolve_config(name).read_bytes()
    except RunbookError:
        return
    copy = config_copy(run_root, name)
    if not copy.parent.is_dir():
        make_private_dir(copy.parent)
    copy.write_bytes(content)


def resolve_config(name: str) -> Path:
    """The trainer config of this name: a shipped one, or a file where the user is.

    In this order: a profile means ours, whatever lies in the folder in which somebody stands. One
    that a person typed is named by its whole path (`config_name`).

    Raises `RunbookError` if there is neither.
    """
    path, shipped = Path(name), data_path("configs")
    relative = path.relative_to("configs") if path.parts[:1] == ("configs",) else path
    candidate = (shipped / relative).resolve()
    if candidate.is_relative_to(shipped.resolve()) and candidate.is_file():
        return candidate
    if path.is_file():
        return path.resolve()
    known = ", ".join(sorted(p.name for p in shipped.glob("*.yaml")))
    raise RunbookError(f"no trainer config {name!r}; shipped are: {known}")


# torchrun's own folder of logs: without it, one is left in the machine's folder for temporary files
# by every launch, empty. What the ranks write goes to the launch's console log.
_NO_LOG_FOLDER = f"--log-dir={os.devnull}"


def as_typed(words: Sequence[str]) -> list[str]:
    """torchrun by this Python with these words."""
    return [sys.executable, "-m", "torch.distributed.run", _NO_LOG_FOLDER, *words]


def on_loopback(words: Sequence[str], port: int) -> list[str]:
    """torchrun by this Python with these words, whose ranks meet on the loopback interface."""
    rendezvous = [f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
    return [sys.executable, "-m", "nsa.loopback", _NO_LOG_FOLDER, *rendezvous, *words]


def rendezvous(endpoint: str, number: str) -> list[str]:
    """The words with which the agents of several nodes meet at an address and port."""
    return ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={number}"]


def free_port(address: str = "127.0.0.1") -> int:
    """A TCP port at one of this machine's addresses that nobody listens on right now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


CHECKOUTS = "checkouts"
_PACKAGE = "nsa"


class RefusedError(RunbookError):
    """A launch cannot be had here; the message has the words of who refused it."""


def folder_of(commit: str) -> str:
    """Where the checkout of a commit lies, below the run's folder."""
    return f"{CHECKOUTS}/{commit[:12]}"


def check_out(commit: str, run_root: Path, run_dir: Path) -> Path:
    """The clean checkout of a commit below the run's folder; makes it unless it is there.

    What lies in it now is written into the run directory, where the trainer's own word about what
    it ran is held against it. Raises `RefusedError` if the commit cannot be had.
    """
    folder = run_root.resolve() / folder_of(commit)
    if not _is_whole(folder, commit):
        _make(commit, folder)
    state = read_git(folder)
    document = {
        "commit": commit,
        "path": str(folder / _PACKAGE),
        "sha": state.sha,
        "changed": state.changed,
        "sha256": package_digest(folder / _PACKAGE),
    }
    write_document(run_dir / CHECKOUT_JSON, document)
    return folder


def remove_checkouts(run_root: Path) -> None:
    """Remove the checkouts of a run, which can be made again from its commits."""
    if (run_root / CHECKOUTS).is_dir():
        shutil.rmtree(run_root / CHECKOUTS)


def _is_whole(folder: Path, commit: str) -> bool:
    """False for what a crash left half made, or what somebody changed."""
    if not folder.is_dir():
        return False
    state = read_git(folder)
    return state.sha == commit and not state.dirty and not state.problems


def _make(commit: str, folder: Path) -> None:
    source = find_checkout()
    if source is None:
        raise RefusedError(f"commit {commit[:12]} cannot be checked out: there is no repository")
    if folder.exists():
        shutil.rmtree(folder)
    if not folder.parent.is_dir():
        make_private_dir(folder.parent)
    if problem := clone_at(source, commit, folder):
        raise RefusedError(f"commit {commit[:12]} cannot be checked out from {source}: {problem}")
    if not (folder / _PACKAGE / "__init__.py").is_file():
        raise RefusedError(f"commit {commit[:12]} has no package {_PACKAGE}")


def build_environment(
    machine: Mapping[str, str],
    command: Command,
    *,
    token: str,
    run_dir: Path,
    loopback: bool,
    own: Iterable[str] = (),
) -> dict[str, str]:
    """The whole environment of one launch.

    `machine` is the harness's own environment, of which only a fixed list is passed on.
    `loopback` keeps gloo's sockets on this machine. The packages of the command's folder come
    before all others. `own` are variables of a trainer of one's own, checked in its profile. A
    command of ours imports nothing from the folder that it runs in, where somebody's `nsa` or
    `pytest.py` may lie.

    Raises `UsageError` for a variable that a plan may not set.
    """
    if bad := sorted(name for name in set(command.env) - set(own) if not may_be_set(name)):
        raise UsageError(
            [f"a launch may not set {name}" for name in bad],
            hint=f"allowed are {', '.join(VARIABLE_FAMILIES)}",
        )
    environment = {name: value for name, value in machine.items() if is_passed_on(name)}
    environment["PYTHONUNBUFFERED"] = "1"
    # Python's stack for a crash in native code; the trainer's own handler comes much later.
    environment["PYTHONFAULTHANDLER"] = "1"
    if command.is_ours:
        environment["PYTHONSAFEPATH"] = "1"
    if loopback:
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    environment.update(command.env)
    if command.folder is not None:
        places = filter(None, (str(command.folder), environment.get("PYTHONPATH")))
        environment["PYTHONPATH"] = os.pathsep.join(places)
    environment[RUN_TOKEN_VARIABLE] = token
    environment[RUN_DIR_VARIABLE] = str(run_dir)
    return environment
